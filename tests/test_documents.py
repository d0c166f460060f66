"""The documents are short, name files that are there, and link to pages and headings that are there."""

import pathlib
import re

import pytest

from kvjax.eval import tasks

ROOT = pathlib.Path(__file__).parent.parent
MANUALS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CARDS = sorted((ROOT / "kvjax").glob("*/README.md"))
PAGES = [*MANUALS, *CARDS]
MOST_LINES = {"README.md": 120, "WORKSPACE_NOTES.md": 150}  # of other documents: 250
FOLDERS = "kvjax|scripts|configs|examples|experiments|tests|docs"
PLACEHOLDERS = {"configs/NAME.py"}


def page_id(page: pathlib.Path) -> str:
    return page.relative_to(ROOT).as_posix()


def without_blocks(text: str) -> str:
    """Returns a page without its fenced blocks, in which a line with # is no heading."""
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def anchors_of(page: pathlib.Path) -> set[str]:
    """Returns the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)", without_blocks(page.read_text()), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def files_in(text: str) -> set[str]:
    """Returns the files and folders of the repository that a page names."""
    return set(re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w/.-]*\w)", text)) - PLACEHOLDERS


def broken_links(page: pathlib.Path) -> list[str]:
    """Returns the relative links of a page that lead to no file, or to no heading."""
    broken = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        other = page.parent / target if target else page
        if "://" not in target and not (other.exists() and (not anchor or anchor in anchors_of(other))):
            broken.append(f"{target}#{anchor}")
    return broken


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_it_names_are_there(page):
    assert not [name for name in files_in(page.read_text()) if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    assert not broken_links(page)


@pytest.mark.parametrize("page", MANUALS, ids=page_id)
def test_it_is_short(page):
    assert len(page.read_text().splitlines()) <= MOST_LINES.get(page_id(page), 250)


def test_files_and_links_are_found():
    texts = [page.read_text() for page in PAGES]
    assert sum(len(files_in(text)) for text in texts) > 100
    assert sum(len(re.findall(r"\]\([^)]+\)", text)) for text in texts) > 100


def test_a_missing_file_and_heading_are_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n[a](other.md) [b](#nowhere) [c](#title) `kvjax/nowhere.py`\n```\n# Nowhere\n```\n")
    assert broken_links(page) == ["other.md#", "#nowhere"]
    assert files_in(page.read_text()) == {"kvjax/nowhere.py"}


def test_every_task_is_in_the_table():
    cells = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/api/evaluation.md").read_text(), re.M)
    assert {name.removesuffix(":FILE") for cell in cells for name in re.findall(r"`(.*?)`", cell)} == set(tasks.TASKS)


def test_functions_of_one_tokens_path_are_there():
    text = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`\w+\.(\w+)`", text)) - {"py", "c", "md"}
    code = "\n".join(path.read_text() for path in (ROOT / "kvjax").rglob("*.py"))
    assert len(named) > 25 and not [name for name in named if not re.search(rf"\b(def|class) {name}\b", code)]
