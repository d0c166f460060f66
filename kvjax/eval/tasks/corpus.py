"""Real text on any machine with Python: source and documentation of the standard library, in two splits."""

import functools
import pathlib
import re
import sysconfig
import zlib
from collections import Counter

HELD_OUT_WORDS = 0.2  # share of key words that are held out
_SKIP = {"site-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3", "encodings"}


def _share(name: str) -> float:
    """Returns a number in [0, 1) that depends on the name alone, so that a split is the same everywhere."""
    return zlib.crc32(name.encode()) % 10_000 / 10_000


def is_held_out(name: str, share: float = 0.05) -> bool:
    """Returns whether a file, word or number is held out from training."""
    return _share(name) < share


def stdlib_files() -> list[pathlib.Path]:
    """Returns the Python files of the standard library without its tests, sorted by path."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    return sorted(p for p in root.rglob("*.py") if not _SKIP & set(p.relative_to(root).parts))


def stdlib_documents(held_out: bool) -> list[str]:
    """Returns the text of every file of one split; files under 2,000 characters are left out."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in stdlib_files():
        if is_held_out(path.relative_to(root).as_posix()) == held_out:
            text = path.read_text(encoding="utf-8", errors="replace")
            if len(text) >= 2_000:
                texts.append(text)
    return texts


@functools.cache
def key_words(held_out: bool) -> tuple[str, ...]:
    """Returns plain lower-case words of the library's prose, most frequent first; a fifth is held out."""
    counts: Counter[str] = Counter()
    for text in stdlib_documents(held_out=False):
        counts.update(re.findall(r"(?<= )[a-z]{4,9}(?= )", text))
    common = [word for word, seen in counts.most_common(4_000) if seen >= 5]
    return tuple(word for word in common if is_held_out(word, HELD_OUT_WORDS) == held_out)
