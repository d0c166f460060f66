"""Facts ("needles") hidden in text, each asked for at the end: the parts of retrieval tasks with a known answer.

The same generator makes training sequences and evaluation prompts; key words, values and templates of the two are
disjoint (`held_out`). Needles follow RULER's niah tasks. A passkey is one line that occurs once in ordinary text, where
landmark attention states it twice, with an instruction, among repeated sentences.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from kvjax.errors import ConfigError
from kvjax.eval.tasks import corpus
from kvjax.models.text_codec import TextCodec

# Text before the value, with the key word for {key}. The question repeats it, as RULER's answer prefix does.
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
_SPARE_WORDS = 8  # words for a random template, in addition to those of its needles
PASSKEY = "The pass key is"


@dataclasses.dataclass(frozen=True)
class Needle:
    """Fact to retrieve: `cue` is its text up to the `value`."""

    cue: str
    value: str

    @property
    def sentence(self) -> str:
        return f"{self.cue} {self.value}.\n"


def draw_value(rng: np.random.Generator, digits: int, held_out: bool) -> str:
    """Draws a number with the given digits from the training values or the held-out ones (one in ten)."""
    while True:
        value = str(rng.integers(10 ** (digits - 1), 10**digits))
        if corpus.is_held_out(value, 0.1) == held_out:
            return value


def made_words(rng: np.random.Generator, count: int) -> list[str]:
    """Makes words from the beginning of one and the end of another, too many to be learnt; none is held out."""
    known, words = corpus.key_words(held_out=False), set[str]()
    while len(words) < count:
        first, second = (known[i] for i in rng.integers(len(known), size=2))
        word = first[: rng.integers(2, len(first))] + second[rng.integers(1, len(second) - 1) :]
        if 4 <= len(word) <= 9 and not corpus.is_held_out(word, corpus.HELD_OUT_WORDS):
            words.add(word)
    return sorted(words)


def text_template(rng: np.random.Generator, tokenizer: Tokenizer, stream: np.ndarray) -> str:
    """Makes a template from two pieces of text without their digits."""
    lengths = int(rng.integers(1, 9)), int(rng.integers(0, 8))
    before, after = (re.sub(r"[{}\d\s]+", " ", tokenizer.decode(random_span(rng, stream, length))).strip()
                     for length in lengths)
    return f"{before} {{key}} {after}".strip() + _ending(rng)


def random_template(rng: np.random.Generator, words: Sequence[str]) -> str:
    """Makes a template of arbitrary words, which can only be answered by copying what followed them before."""
    before, after = (" ".join(rng.choice(words, size=rng.integers(most + 1))) for most in (5, 3))
    return f"{before} {{key}} {after}".strip() + _ending(rng)


def _ending(rng: np.random.Generator) -> str:
    return str(rng.choice(["", "", ":", " =", " is", " ->"]))


def draw_needles(
    rng: np.random.Generator, count: int, held_out: bool, digits: int | None = None
) -> list[Needle]:
    """Draws needles with one template and different key words; half of the training templates are random words.

    Args:
      rng: random generator.
      count: number of needles.
      held_out: whether words, values and template are held out from training.
      digits: digits of the values; None for a random number of them.
    """
    templates, words = HELD_OUT_TEMPLATES if held_out else TRAIN_TEMPLATES, corpus.key_words(held_out)
    template = templates[rng.integers(len(templates))]
    if not held_out and rng.random() < 0.5:
        template = random_template(rng, words)
    return _with_values(rng, template, rng.choice(words, size=count, replace=False).tolist(), held_out, digits)


def made_needles(rng: np.random.Generator, tokenizer: Tokenizer, stream: np.ndarray, count: int) -> list[Needle]:
    """Makes training needles with new words and a new template, so that neither can be memorised.

    Args:
      rng: random generator.
      tokenizer: tokenizer of `stream`.
      stream: token ids `[n]` of the text that half of the templates are taken from.
      count: number of needles.
    """
    words = made_words(rng, count + _SPARE_WORDS)
    template = random_template(rng, words) if rng.random() < 0.5 else text_template(rng, tokenizer, stream)
    return _with_values(rng, template, rng.choice(words, size=count, replace=False).tolist(), held_out=False)


def _with_values(
    rng: np.random.Generator, template: str, words: Sequence[str], held_out: bool, digits: int | None = None
) -> list[Needle]:
    length = digits or int(rng.choice([3, 3, 5, 6, 7]))
    return [Needle(template.format(key=word), draw_value(rng, length, held_out)) for word in words]


def passkey(rng: np.random.Generator, held_out: bool) -> Needle:
    """Draws a passkey fact with a key uniform among 1..50000, held out from training or not."""
    while True:
        value = str(rng.integers(1, 50_001))
        if corpus.is_held_out(value, 0.1) == held_out:
            return Needle(PASSKEY, value)


@functools.lru_cache(maxsize=4096)
def encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Returns the token ids of a text as a continuation (cached: a needle is inserted, asked for and counted)."""
    return tuple(_codec(tokenizer).encode_continuation(text))


@functools.lru_cache(maxsize=8)
def _codec(tokenizer: Tokenizer) -> TextCodec:
    return TextCodec(tokenizer, "the model")


def insert_needles(
    tokenizer: Tokenizer, filler: Sequence[int], needles: Sequence[Needle], depths: Sequence[float]
) -> list[int]:
    """Inserts each needle on a line of its own.

    Args:
      tokenizer: tokenizer of the filler.
      filler: token ids of the text around the needles.
      needles: needles to insert.
      depths: place of each in the filler: 0 = start, 1 = end.

    Returns:
      Token ids of the text with its needles.
    """
    out: list[int] = []
    previous = 0
    for needle, depth in sorted(zip(needles, depths, strict=True), key=lambda pair: pair[1]):
        place = int(depth * len(filler))
        out += filler[previous:place]
        out += encode(tokenizer, "\n" + needle.sentence)
        previous = place
    return [*out, *filler[previous:]]


def needle_cost(tokenizer: Tokenizer, needles: Sequence[Needle]) -> int:
    """Returns the number of tokens that the needles add to the filler."""
    return sum(len(encode(tokenizer, "\n" + needle.sentence)) for needle in needles)


def random_span(rng: np.random.Generator, stream: np.ndarray, length: int) -> list[int]:
    """Returns `length` random consecutive tokens of a stream. Raises ConfigError if the stream is shorter."""
    if len(stream) < length:
        raise ConfigError(f"the text has {len(stream)} tokens, but {length} are needed; give a longer one")
    start = int(rng.integers(0, max(1, len(stream) - length)))
    return stream[start : start + length].tolist()


def haystack(
    rng: np.random.Generator,
    tokenizer: Tokenizer,
    stream: np.ndarray,
    length: int,
    needles: Sequence[Needle],
    depths: Sequence[float] | None = None,
    start: Sequence[int] | None = None,
) -> list[int]:
    """Makes the token ids of a context of exactly `length` tokens with needles in it.

    Args:
      rng: random generator.
      tokenizer: tokenizer of `stream`.
      stream: token ids `[n]` of the text around the needles.
      length: tokens of the context.
      needles: needles to insert.
      depths: place of each needle: 0 = start, 1 = end; None for random places.
      start: ids that begin the context; None for those that the tokenizer begins a text with.

    Raises:
      ConfigError: the needles do not fit in `length` tokens, or the stream is too short.
    """
    start = list(tokenizer.encode("").ids if start is None else start)
    room = length - len(start) - needle_cost(tokenizer, needles)
    if room < 0:
        raise ConfigError(f"{len(needles)} needles do not fit in {length} tokens; use a longer context or fewer "
                          "needles")
    depths = tuple(rng.random(len(needles))) if depths is None else tuple(depths)
    filler = random_span(rng, stream, room)
    return start + insert_needles(tokenizer, filler, needles, depths)
