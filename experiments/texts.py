"""Texts of several kinds for the distribution-shift experiment, from held-out library files."""

import ast

import numpy as np

import kvjax
from experiments import common
from kvjax.errors import ConfigError
from kvjax.eval.tasks import corpus, needles

KINDS = ("code", "prose", "needles", "mixed")
_FACT_EVERY = 48  # tokens of library code between two facts of a needles text


def facts_in_code(rng, llm: kvjax.LLM, code: np.ndarray, length: int, held_out: bool) -> list[int]:
    """Facts in library code, `length` tokens or a few more; every second one repeats an earlier one, so that there is
    something to retrieve. Words, values and templates are held-out ones or those of training."""
    tokens: list[int] = []
    facts: list[needles.Needle] = []
    while len(tokens) < length:
        tokens += needles.random_span(rng, code, _FACT_EVERY)
        if len(facts) < 2 or rng.random() < 0.5:
            facts += needles.draw_needles(rng, 1, held_out=held_out, digits=5)
            fact = facts[-1]
        else:
            fact = facts[rng.integers(len(facts))]
        tokens += needles.encode(llm.tokenizer.tokenizer, "\n" + fact.sentence)
    return tokens


class Texts:
    """Draws token rows that start with the beginning-of-text token."""

    def __init__(self, llm: kvjax.LLM, seed: int):
        self.llm, self.seed = llm, seed
        self.code = common.held_out_tokens(llm)
        prose = docstrings(corpus.stdlib_documents(held_out=True))
        self.prose = np.asarray(llm.encode("\n\n".join(prose), start=False))

    def draw(self, kind: str, number: int, prompt: int, length: int) -> list[int]:
        """Text `number` of a kind: `prompt` tokens to read and `length - prompt` to decode.

        Raises ConfigError on an unknown kind.
        """
        if kind not in KINDS:
            raise ConfigError(f"unknown kind of text {kind!r}; use some of {', '.join(KINDS)}")
        rng = np.random.default_rng((self.seed, KINDS.index(kind), number))
        start = self.llm.encode("", start=True)
        return (start + getattr(self, f"_{kind}")(rng, prompt, length))[:length]

    def _code(self, rng, prompt, length):
        return needles.random_span(rng, self.code, length)

    def _prose(self, rng, prompt, length):
        return needles.random_span(rng, self.prose, length)

    def _needles(self, rng, prompt, length):
        return facts_in_code(rng, self.llm, self.code, length, held_out=True)

    def _mixed(self, rng, prompt, length):
        """A prompt of prose; what is decoded changes its kind after every `prompt` tokens."""
        tokens, turn = self._prose(rng, prompt, prompt), 0
        while len(tokens) < length:
            tokens += getattr(self, ("_code", "_needles", "_prose")[turn % 3])(rng, prompt, prompt)[:prompt]
            turn += 1
        return tokens


def docstrings(documents: list[str]) -> list[str]:
    """Docstrings of all modules, classes and functions, in order."""
    nodes = (node for text in documents for node in ast.walk(ast.parse(text)))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for node in nodes if isinstance(node, documented) and (text := ast.get_docstring(node))]
