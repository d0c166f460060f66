"""The README's example runs as it is written, and its commands exist."""

import doctest
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_gives_what_it_shows(monkeypatch):
    monkeypatch.chdir(ROOT)
    example = re.search(r"```python\n(>>> .*?)```", README, re.S).group(1)
    test = doctest.DocTestParser().get_doctest(example, {}, "README", "README.md", 0)
    assert len(test.examples) >= 4
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0


def test_every_file_it_names_is_there():
    named = set(re.findall(r"\b(?:kvjax|scripts|configs|experiments|tests)/[\w/.]+\w", README))
    assert named and all((ROOT / name).exists() for name in named), [n for n in named if not (ROOT / n).exists()]
