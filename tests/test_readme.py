"""README.md and docs/ show what is so: examples run, and commands parse against their configurations."""

import dataclasses
import doctest
import functools
import pathlib
import re
import shlex
import shutil
from typing import NamedTuple

import pytest
from absl import flags
from ml_collections import config_flags

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [
    *sorted(ROOT.glob("*.md")), *sorted((ROOT / "kvjax").glob("*/README.md")), *sorted((ROOT / "docs").rglob("*.md")),
]
CONFIG = re.compile(r"(?:--config=)?(configs/[a-z_]+\.py(?::\w+)?)")


class Command(NamedTuple):
    """A configuration with its preset, "" where only the text before tells which, and the words after it."""

    config: str
    fields: tuple[str, ...]  # --config.FIELD or --config.FIELD=VALUE
    workdir: str


def code_of(text: str) -> list[str]:
    """Lines of blocks, a continued one being one, and inline code, in the order in which they are written."""
    found = re.findall(r"```\w*\n(.*?)```|((?:^    [^\n]*\n)+)|`([^`]+)`", text, re.S | re.M)
    lines = []
    for fenced, indented, inline in found:
        block = (fenced or indented).replace("\\\n", "")
        lines += block.splitlines() if block else [" ".join(inline.split())]
    return lines


def commands_in(text: str) -> list[Command]:
    """Everything that names a configuration or one of its fields."""
    found: list[Command] = []
    for line in code_of(text):
        if not re.search(r"configs/[a-z_]+\.py|--config\.|scripts/demo\.sh", line):
            continue
        words = shlex.split(line, comments=True)
        named = [match[1] for word in words if (match := CONFIG.fullmatch(word))]
        named += ["configs/demo.py" for word in words if word == "scripts/demo.sh"]
        fields = tuple(" ".join(word.split()) for word in words if word.startswith("--config."))
        workdir = next((word for word in words if word.startswith("--workdir=")), "")
        if named or fields:
            found.append(Command(named[0] if named else found[-1].config, fields, workdir))
    return found


def parsed(command: Command):
    """Its configuration, made by the parser that the experiments use. Raises on an unknown field or a wrong value."""
    values, argv = flags.FlagValues(), ["", f"--config={ROOT / command.config}"]
    argv += [field for field in command.fields if "=" in field]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    values(argv)
    return values.config


def page_id(page: pathlib.Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_the_example_gives_what_it_shows(monkeypatch):
    monkeypatch.chdir(ROOT)
    example = re.search(r"```python\n(>>> .*?)```", README, re.S).group(1)
    test = doctest.DocTestParser().get_doctest(example, {}, "README", "README.md", 0)
    assert len(test.examples) >= 4
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0


def test_a_model_of_ones_own_answers_and_comes_back(tmp_path, monkeypatch, capsys):
    import kvjax

    text = (ROOT / "kvjax/inference/decode.py").read_text()
    shutil.copytree(ROOT / "kvjax/reference", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    monkeypatch.setattr(kvjax, "keep_programs", lambda: None)  # the tests have a directory of their own
    names = {
        "kvjax": kvjax, "DIR": tmp_path / "model", "SAVED": tmp_path / "saved", "SCRATCH": tmp_path / "scratch",
        "question": "The pass key is",
        "document": f"{text[:1000]}\nThe pass key is 29318.\n{text[1000:2000]}",
    }
    exec(re.search(r"```python\n(?!>>>)(.*?)```", README, re.S).group(1), names)
    assert "29318" in capsys.readouterr().out
    with names["chat"] as chat:
        assert "29318" in chat.messages[-1]["content"]
        assert chat.cache.plan.layers[-1].method == kvjax.KVSwap(budget=256, sigma=2, bits=4, per_head=True)
        assert chat.ask("And then?", max_new_tokens=3).text and len(chat.messages) == 4


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_parse(page):
    from experiments.common import NOT_FIELDS
    from kvjax import METHODS

    for command in commands_in(page.read_text()):
        config = parsed(command)
        for field in command.fields:
            functools.reduce(getattr, field.partition("=")[0].removeprefix("--config.").split("."), config)
        for settings in config.get("methods", ()):
            known = {one.name for one in dataclasses.fields(METHODS[settings["name"]])}
            assert set(settings) <= known | {"name", *NOT_FIELDS}, command


def test_commands_are_found():
    found = [command for page in PAGES for command in commands_in(page.read_text())]
    assert sum(bool(command.workdir) for command in found) > 40 and sum(bool(command.fields) for command in found) > 20


@pytest.mark.parametrize("field", ["--config.nosuch=1", "--config.context=many"])
def test_a_wrong_field_is_seen(field):
    with pytest.raises(Exception, match=r"nosuch|many"):
        parsed(Command("configs/demo.py", (field,), ""))


def test_a_workdir_belongs_to_one_command():
    of: dict[str, Command] = {}
    for page in PAGES:
        for command in commands_in(page.read_text()):
            if command.workdir:
                assert of.setdefault(command.workdir, command) == command
