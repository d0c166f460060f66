"""LongGenBench (Wu et al., 2024): long texts in numbered blocks, some of which have to mention something.

Instructions are of three kinds: in one block, in every block of a range, in every n-th block. An answer is checked for
how many blocks there are (completion rate), and for each kind for the share of existing blocks that do as told. Blocks
begin with a mark and their number. Simplified: a block does as told if it contains the word; the paper lets a language
model judge. Its four scenarios (diary, menu, skyscraper, city) are one here, a diary.
"""

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from kvjax.eval.tasks import corpus
from kvjax.eval.tasks.base import Request, Sample

OPENING = "#*# Day 1:"  # what an answer goes on from
_MARK = re.compile(r"#\*# Day (\d+)\b:?")
_TOKENS = 32  # of a block, about


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Every block of `first, first + step, ..., last` is to mention `word`."""

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
        """One line, as `Sample.answers` has it."""
        return f"{self.kind} {self.first} {self.last} {self.step} {self.word}"

    @classmethod
    def decode(cls, line: str) -> "Instruction":
        kind, first, last, step, word = line.split(" ", 4)
        return cls(kind, int(first), int(last), int(step), word)


@dataclasses.dataclass(frozen=True)
class Check:
    """Shares in 0..1; NaN for a kind that no existing block was told."""

    completion: float
    once: float
    range: float
    periodic: float

    @property
    def mean(self) -> float:
        """Mean accuracy of the kinds; 0 where no block exists that was told anything."""
        found = [share for share in (self.once, self.range, self.periodic) if not np.isnan(share)]
        return float(np.mean(found)) if found else 0.0


def blocks(text: str) -> dict[int, str]:
    """The text of each numbered block; of two with one number the first."""
    parts = _MARK.split(text)
    found: dict[int, str] = {}
    for number, body in zip(parts[1::2], parts[2::2], strict=True):
        found.setdefault(int(number), body)
    return found


def check(text: str, answers: Sequence[str]) -> Check:
    """Checks an answer against `Sample.answers`: the number of blocks, then the instructions. It goes on from
    `OPENING`, or begins with it once more."""
    wanted, found = int(answers[0]), blocks(text if text.lstrip().startswith(OPENING) else OPENING + text)
    instructions = [Instruction.decode(line) for line in answers[1:]]
    kinds = ("once", "range", "periodic")
    shares = [_share(found, [one for one in instructions if one.kind == kind]) for kind in kinds]
    return Check(sum(number in found for number in range(1, wanted + 1)) / wanted, *shares)


def _share(found: dict[int, str], instructions: Sequence[Instruction]) -> float:
    """Share of the existing blocks with an instruction that follow it."""
    done = [one.word.lower() in found[n].lower() for one in instructions for n in one.blocks if n in found]
    return float(np.mean(done)) if done else float("nan")


def draw(request: Request) -> list[Sample]:
    """Diaries of as many days as fit in about `request.length` tokens with the instructions, at least four."""
    days = max(4, request.length // _TOKENS)
    days = max(4, days * request.length // max(request.length, _size(request, days)))
    return [_sample(request.rng, days) for _ in range(request.count)]


def _size(request: Request, days: int) -> int:
    """Tokens of one such diary with its instructions."""
    told = _sample(np.random.default_rng(0), days).context
    return len(request.tokenizer.encode(str(told))) + _TOKENS * days


def _sample(rng: np.random.Generator, days: int) -> Sample:
    """One instruction of each kind for every eight days."""
    instructions = [one for _ in range(max(1, days // 8)) for one in _instructions(rng, days)]
    told = "\n".join(map(str, instructions))
    context = (f"Write a diary of {days} days, one entry for each day, none left out. Begin every entry with #*# and "
               f"its day, as {OPENING}, and write about {_TOKENS // 2} words.\n{told}\n")
    answers = (str(days), *(one.encode() for one in instructions))
    return Sample(context, OPENING, answers, "longgen", _TOKENS * days)


def _instructions(rng: np.random.Generator, days: int) -> list[Instruction]:
    words = [str(word) for word in rng.choice(corpus.key_words(held_out=True), size=3, replace=False)]
    day, first = int(rng.integers(1, days + 1)), int(rng.integers(1, days))
    last, step = int(rng.integers(first + 1, days + 1)), int(rng.integers(2, max(3, days // 2)))
    return [
        Instruction("once", day, day, 1, words[0]), Instruction("range", first, last, 1, words[1]),
        Instruction("periodic", step, days, step, words[2]),
    ]
