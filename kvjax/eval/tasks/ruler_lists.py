"""RULER's tasks other than needles (Hsieh et al., 2024): variable tracking, common words, frequent words.

Prompts, counts and scores are those of its generator. Unlike RULER, lists have words of Python's library, followed by
made-up ones if these are too few.
"""

import dataclasses
import string
from collections.abc import Sequence

import numpy as np

from kvjax.eval.tasks import corpus
from kvjax.eval.tasks.base import Request, Sample
from kvjax.eval.tasks.ruler import NOISE, PlantedPrompt, fitted, planted, sampled

HOPS = 4
VT_TOKENS = 30
_EXAMPLE_TOKENS = 500  # of the solved example without its answer


def variable_tracking(request: Request) -> list[Sample]:
    """Draws vt: a chain of assignments over four hops in noise, whose five names are to be found, after an example."""
    return sampled(request, VT_TOKENS, _variables)


def _variables(request: Request):
    solved, example = _chain(request.rng, 3), _chain(request.rng, 5)
    shown = fitted(dataclasses.replace(request, length=_EXAMPLE_TOKENS), 0, solved.prompt)
    before = f"{shown.context}{shown.question} {' '.join(solved.names)}\n\n"

    def build(n: int) -> PlantedPrompt:
        prompt = example.prompt(n)
        return PlantedPrompt(before + prompt.context, prompt.question)

    return build, example.names


@dataclasses.dataclass(frozen=True)
class Chain:
    """Chain of assignments VAR A = value, VAR B = VAR A, ... in different places of the noise, drawn with `seed`."""

    names: tuple[str, ...]
    value: str
    seed: int

    def prompt(self, n: int) -> PlantedPrompt:
        sources = (self.value, *(f"VAR {name} " for name in self.names))
        lines = [f"VAR {name} = {source}" for name, source in zip(self.names, sources, strict=False)]
        places = np.random.default_rng(self.seed).permutation(max(n, len(lines)))[: len(lines)]
        text = planted([NOISE] * n, lines, sorted(places / max(n, len(lines))), "\n")
        return PlantedPrompt(
            f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{text}\n",
            f"Question: Find all variables that are assigned the value {self.value} in the text above. Answer: "
            f"According to the chain(s) of variable assignment in the text above, {len(self.names)} variables are "
            f"assigned the value {self.value}, they are: ",
        )


def _chain(rng: np.random.Generator, letters: int) -> Chain:
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choice(list(string.ascii_uppercase), size=letters))
        names += [name] if name not in names else []
    return Chain(tuple(names), str(rng.integers(10_000, 100_000)), int(rng.integers(2**32)))


LONG = 4_096  # tokens of a prompt from which lists are long
COMMON = 10
CWE_TOKENS, FWE_TOKENS = 120, 50
_ALPHA = 2.0  # parameter of fwe's Zeta distribution
_ZETA = np.pi**2 / 6  # zeta(2)


def common_words(request: Request) -> list[Sample]:
    """Draws cwe: ten words to find that occur 30 times in a numbered list, after a solved example.

    All other words occur 3 times. In prompts of fewer than 4,096 tokens it is 6 times and once.
    """
    return sampled(request, CWE_TOKENS, _common)


def _common(request: Request):
    repeats, rare = (30, 3) if request.length >= LONG else (6, 1)
    shown, counts = (40, (10, 3)) if request.length >= LONG else (20, (3, 1))
    rng, seed = request.rng, int(request.rng.integers(2**32))
    solved = _words(rng, shown)
    words = _words(rng, max(shown, request.length))
    example = _listed(np.random.default_rng(seed), solved, *counts)
    answer = " ".join(f"{i}. {word}" for i, word in enumerate(solved[:COMMON], 1))

    def build(n: int) -> PlantedPrompt:
        text = _listed(np.random.default_rng(seed), words[: COMMON + n], repeats, rare)
        return PlantedPrompt(f"{_cwe(example)}{_CWE_QUESTION} {answer}\n{_cwe(text)}", _CWE_QUESTION)

    return build, words[:COMMON]


_CWE_QUESTION = ("Question: What are the 10 most common words in the above list? Answer: The top 10 words that appear "
                 "most often in the list are:")


def _cwe(text: str) -> str:
    return ("Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            f"that appear most often.\n{text}\n")


def _listed(rng: np.random.Generator, words: Sequence[str], common: int, rare: int) -> str:
    """Returns a shuffled numbered list with the first ten words `common` times each, the others `rare` times."""
    listed = [*list(words[:COMMON]) * common, *list(words[COMMON:]) * rare]
    rng.shuffle(listed)
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))


def _words(rng: np.random.Generator, count: int) -> list[str]:
    """Draws different words of Python's library, and made-up ones if these are not enough."""
    known = [*corpus.key_words(held_out=False), *corpus.key_words(held_out=True)]
    drawn = dict.fromkeys(str(word) for word in rng.permutation(known)[:count])
    while len(drawn) < count:
        drawn[_coded(rng)] = None
    return list(drawn)


def _coded(rng: np.random.Generator) -> str:
    return "".join(rng.choice(list(string.ascii_lowercase), size=6))


def frequent_words(request: Request) -> list[Sample]:
    """Draws fwe: coded words whose counts follow a Zeta distribution.

    The most frequent one is noise (...); the next three are to be found.
    """
    return sampled(request, FWE_TOKENS, _frequent)


def _frequent(request: Request):
    rng, seed = request.rng, int(request.rng.integers(2**32))
    words = list(dict.fromkeys(["...", *(_coded(rng) for _ in range(max(4, request.length // 50)))]))
    share = np.arange(1, len(words) + 1) ** -_ALPHA / _ZETA

    def build(n: int) -> PlantedPrompt:
        counts = (share * (n + 100)).astype(int)  # with 100 or more the fourth word occurs, less often than the third
        text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
        np.random.default_rng(seed).shuffle(text)
        return PlantedPrompt(
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {' '.join(text)}\n",
            "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
            "frequently appeared words in the above coded text? Answer: According to the coded text above, the three "
            "most frequently appeared words are:",
        )

    return build, words[1:4]
