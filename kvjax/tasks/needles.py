"""Retrieval tasks with a known answer: facts ("needles") hidden in text, each asked for at the end.

The same generator writes training sequences and evaluation prompts; key words, values and
templates of the two are disjoint (`held_out`). Definitions follow RULER's niah tasks and the
passkey task of landmark attention.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from kvjax.errors import ConfigError
from kvjax.tasks import corpus

# Text before the value; {key} is the key word. The question repeats it, as RULER's answer prefix does.
TRAIN_TEMPLATES = (
    "The special magic number for {key} is:",
    "The number of {key} is",
    "One of the secret values: {key} =",
    "Remember that {key} has the code",
    "{key}:",
    "{key} =",
    "Note that the value stored for {key} equals",
    "In the table, the entry {key} holds",
    "# {key} ->",
    "The id of the {key} was set to",
    "We gave {key} the ticket",
    "set {key} to",
)
HELD_OUT_TEMPLATES = (
    "The hidden number of {key} is:",
    "Please keep in mind that {key} was given",
    "The secret code for {key} =",
)
PASSKEY = "The pass key is"


@dataclasses.dataclass(frozen=True)
class Needle:
    """A fact: `cue` is its text up to the value, `value` what has to be retrieved."""

    cue: str
    value: str

    @property
    def sentence(self) -> str:
        return f"{self.cue} {self.value}.\n"


@dataclasses.dataclass(frozen=True)
class Haystack:
    """A prompt: `context` with needles in it, and the needles asked for, in order."""

    context: list[int]
    questions: tuple[Needle, ...]
    depths: tuple[float, ...]


def draw_value(rng: np.random.Generator, digits: int, held_out: bool) -> str:
    """A number of the given length from the training or from the held-out values (one in ten)."""
    while True:
        value = str(rng.integers(10 ** (digits - 1), 10**digits))
        if corpus.is_held_out(value, 0.1) == held_out:
            return value


def made_words(rng: np.random.Generator, tokenizer: Tokenizer, count: int) -> list[str]:
    """Words that there are not, of one to three pieces each; none is held out. There are too many to be learnt."""
    first, later = _pieces(tokenizer)
    words: list[str] = []
    while len(words) < count:
        ends = rng.integers(len(later), size=rng.integers(3))
        word = first[rng.integers(len(first))] + "".join(later[i] for i in ends)
        if 4 <= len(word) <= 12 and not corpus.is_held_out(word, corpus.HELD_OUT_WORDS) and word not in words:
            words.append(word)
    return words


@functools.lru_cache(maxsize=2)
def _pieces(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Tokens of lower-case letters that begin words, and those that go on with them."""
    tokens = sorted(tokenizer.get_vocab())
    return ([token[1:] for token in tokens if re.fullmatch("\u0120[a-z]{2,}", token)],  # \u0120 stands for a space
            [token for token in tokens if re.fullmatch("[a-z]{1,4}", token)])


def random_template(rng: np.random.Generator, words: Sequence[str]) -> str:
    """A template of arbitrary words: only copying what followed the same words before can answer it."""
    before, after = (" ".join(rng.choice(words, size=rng.integers(most + 1))) for most in (5, 3))
    return f"{before} {{key}} {after}".strip() + str(rng.choice(["", "", ":", " =", " is", " ->"]))


def draw_needles(
    rng: np.random.Generator, count: int, held_out: bool, digits: int | None = None, words: Sequence[str] = ()
) -> list[Needle]:
    """Needles that share one template and differ in key word and value; half of the training templates are random.

    `words` are those to draw from, by default the plain words of the split.
    """
    words = words or corpus.key_words(held_out)
    templates = HELD_OUT_TEMPLATES if held_out else TRAIN_TEMPLATES
    template = templates[rng.integers(len(templates))]
    if not held_out and rng.random() < 0.5:
        template = random_template(rng, words)
    keys = rng.choice(words, size=count, replace=False)
    length = digits or int(rng.choice([3, 3, 5, 6, 7]))
    return [Needle(template.format(key=word), draw_value(rng, length, held_out)) for word in keys]


def passkey(rng: np.random.Generator, held_out: bool) -> Needle:
    """The passkey fact, its key uniform in 1..50000."""
    while True:
        value = str(rng.integers(1, 50_001))
        if corpus.is_held_out(value, 0.1) == held_out:
            return Needle(PASSKEY, value)


@functools.lru_cache(maxsize=50_000)
def encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Token ids without special tokens (cached: templates and words recur)."""
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def insert_needles(
    tokenizer: Tokenizer, filler: Sequence[int], needles: Sequence[Needle], depths: Sequence[float]
) -> list[int]:
    """Puts each needle on a line of its own at its depth (0 = start, 1 = end) of the filler."""
    out: list[int] = []
    previous = 0
    for needle, depth in sorted(zip(needles, depths, strict=True), key=lambda pair: pair[1]):
        at = int(depth * len(filler))
        out += filler[previous:at]
        out += encode(tokenizer, "\n" + needle.sentence)
        previous = at
    return [*out, *filler[previous:]]


def needle_cost(tokenizer: Tokenizer, needles: Sequence[Needle]) -> int:
    """Tokens that the needles add to the filler."""
    return sum(len(encode(tokenizer, "\n" + needle.sentence)) for needle in needles)


def random_span(rng: np.random.Generator, stream: np.ndarray, length: int) -> list[int]:
    """`length` consecutive tokens of a long token stream. Raises ConfigError for a stream that is shorter."""
    if len(stream) < length:
        raise ConfigError(f"the text has {len(stream)} tokens, and {length} of it are wanted; give a longer one")
    start = int(rng.integers(0, max(1, len(stream) - length)))
    return stream[start : start + length].tolist()


def haystack(
    rng: np.random.Generator,
    tokenizer: Tokenizer,
    stream: np.ndarray,
    length: int,
    needles: Sequence[Needle],
    questions: Sequence[Needle],
    depths: Sequence[float] | None = None,
) -> Haystack:
    """A context of exactly `length` tokens (begin-of-text included) holding the needles."""
    start = tokenizer.encode("").ids
    room = length - len(start) - needle_cost(tokenizer, needles)
    if room < 0:
        raise ConfigError(f"{len(needles)} needles do not fit in {length} tokens; use a longer context or fewer "
                          "needles")
    depths = tuple(rng.random(len(needles))) if depths is None else tuple(depths)
    filler = random_span(rng, stream, room)
    return Haystack(start + insert_needles(tokenizer, filler, needles, depths), tuple(questions), depths)
