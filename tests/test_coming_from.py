"""Pages for those who come from other libraries: every block of code is Python, and the project's own blocks run."""

import pathlib
import re
import shutil
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("from_*.md"))
FENCE = re.compile(r"```python\n# (\w+)\n(.*?)```", re.S)
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


class Block(NamedTuple):
    library: str
    code: str


def blocks_of(page: pathlib.Path) -> list[Block]:
    return [Block(library, code) for library, code in FENCE.findall(page.read_text())]


def names(tmp_path) -> dict:
    import kvjax

    text = (ROOT / "kvjax/inference/decode.py").read_text()
    shutil.copytree(ROOT / "kvjax/reference", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return {
        "kvjax": kvjax, "DIR": tmp_path / "model", "SAVED": tmp_path / "saved", "SCRATCH": tmp_path,
        "document": f"{text[:1000]}\nThe pass key is 29318.\n{text[1000:2000]}", "question": "\nThe pass key is",
        "questions": ["\nThe pass key is", "\nimport"],
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_says_whose_it_is_and_is_python(page):
    found = blocks_of(page)
    assert len(found) == page.read_text().count("```python") > 5
    assert {block.library for block in found} == {"kvjax", page.stem.removeprefix("from_")}
    for block in found:
        compile(block.code, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_kvjax_run(page, tmp_path):
    """From the top of the page to its end, in one namespace."""
    scope = names(tmp_path)
    for block in blocks_of(page):
        if block.library == "kvjax":
            exec(block.code, scope)
    answers = [value.text for value in scope.values() if hasattr(value, "text")] + [scope.get("answer", "")]
    assert any("29318" in text for text in answers)
