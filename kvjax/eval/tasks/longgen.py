"""LongGenBench (Wu et al., 2024): long texts in numbered blocks, some of which have to mention a given word.

An instruction applies to one block, to every block of a range, or to every n-th block. An answer is scored by the share
of blocks that exist (completion rate), and for each kind of instruction by the share of existing blocks that follow it;
the task's score is the product of the former and the mean of the latter, so that ending early does not pay.
Blocks begin with a mark and their number. Simplified: a block follows an instruction if it contains the word, where the
paper lets a language model judge; and of its four scenarios (diary, menu, skyscraper, city) only the diary is used.
"""

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from kvjax.eval.tasks import corpus
from kvjax.eval.tasks.base import Request, Sample

OPENING = "#*# Day 1:"  # beginning of the answer, given with the question
_MARK = re.compile(r"#\*# Day (\d+)\b:?")
_TOKENS = 32  # approximate tokens of a block


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Instruction that the blocks `first, first + step, ..., last` mention `word`."""

    kind: str  # once, range or periodic
    first: int
    last: int
    step: int
    word: str

    @property
    def blocks(self) -> range:
        return range(self.first, self.last + 1, self.step)

    def __str__(self) -> str:
        where = {
            "once": f"On day {self.first}", "range": f"On every day from {self.first} to {self.last}",
            "periodic": f"On every {self.step}th day from day {self.first} to day {self.last}",
        }
        return f"{where[self.kind]} write about: {self.word}."

    def encode(self) -> str:
        """Returns the instruction as a line of `Sample.answers`."""
        return f"{self.kind} {self.first} {self.last} {self.step} {self.word}"

    @classmethod
    def decode(cls, line: str) -> "Instruction":
        kind, first, last, step, word = line.split(" ", 4)
        return cls(kind, int(first), int(last), int(step), word)


@dataclasses.dataclass(frozen=True)
class Check:
    """Shares in 0..1; NaN for a kind of instruction that applies to no existing block."""

    completion: float
    once: float
    range: float
    periodic: float

    @property
    def mean(self) -> float:
        """Mean share of the kinds; 0 if no instruction applies to an existing block."""
        shares = [share for share in (self.once, self.range, self.periodic) if not np.isnan(share)]
        return float(np.mean(shares)) if shares else 0.0

    @property
    def score(self) -> float:
        """Share of blocks that exist, times `mean`."""
        return self.completion * self.mean


def blocks(text: str) -> dict[int, str]:
    """Returns the text of each numbered block; the first of those with the same number."""
    parts = _MARK.split(text)
    by_number: dict[int, str] = {}
    for number, body in zip(parts[1::2], parts[2::2], strict=True):
        by_number.setdefault(int(number), body)
    return by_number


def check(text: str, answers: Sequence[str]) -> Check:
    """Scores an answer.

    Args:
      text: answer, which continues `OPENING` or repeats it.
      answers: number of blocks, then an encoded instruction each, as in `Sample.answers`.

    Returns:
      The share of blocks that exist, and for each kind of instruction the share of them that follow it.
    """
    wanted, found = int(answers[0]), blocks(text if text.lstrip().startswith(OPENING) else OPENING + text)
    instructions = [Instruction.decode(line) for line in answers[1:]]
    kinds = ("once", "range", "periodic")
    shares = [_share(found, [each for each in instructions if each.kind == kind]) for kind in kinds]
    return Check(sum(number in found for number in range(1, wanted + 1)) / wanted, *shares)


def _share(found: dict[int, str], instructions: Sequence[Instruction]) -> float:
    """Returns the share of existing blocks with an instruction that follow it."""
    done = [one.word.lower() in found[n].lower() for one in instructions for n in one.blocks if n in found]
    return float(np.mean(done)) if done else float("nan")


def draw(request: Request) -> list[Sample]:
    """Draws diaries of as many days as fit in about `request.length` tokens with the instructions, at least four."""
    days = max(4, request.length // _TOKENS)
    days = max(4, days * request.length // max(request.length, _size(request, days)))
    return [_sample(request.rng, days) for _ in range(request.count)]


def _size(request: Request, days: int) -> int:
    """Returns the tokens of a diary with its instructions."""
    told = _sample(np.random.default_rng(0), days).context
    return len(request.tokenizer.encode(str(told))) + _TOKENS * days


def _sample(rng: np.random.Generator, days: int) -> Sample:
    """Draws a diary with one instruction of each kind for every eight days."""
    instructions = [instruction for _ in range(max(1, days // 8)) for instruction in _instructions(rng, days)]
    told = "\n".join(map(str, instructions))
    context = (f"Write a diary of {days} days, one entry for each day, none left out. Begin every entry with #*# and "
               f"its day, as {OPENING}, and write about {_TOKENS // 2} words.\n{told}\n")
    answers = (str(days), *(instruction.encode() for instruction in instructions))
    return Sample(context, OPENING, answers, "longgen", _TOKENS * days)


def _instructions(rng: np.random.Generator, days: int) -> list[Instruction]:
    words = [str(word) for word in rng.choice(corpus.key_words(held_out=True), size=3, replace=False)]
    day, first = int(rng.integers(1, days + 1)), int(rng.integers(1, days))
    last, step = int(rng.integers(first + 1, days + 1)), int(rng.integers(2, max(3, days // 2)))
    return [
        Instruction("once", day, day, 1, words[0]), Instruction("range", first, last, 1, words[1]),
        Instruction("periodic", step, days, step, words[2]),
    ]
