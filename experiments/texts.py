"""Texts of several kinds, drawn from held-out library files."""

import ast

import numpy as np

import kvjax
from experiments import common
from kvjax.errors import ConfigError
from kvjax.eval.tasks import corpus, needles

KINDS = ("code", "prose", "needles", "mixed")
_FACT_EVERY = 48  # tokens of library code between two facts of a needles text


def facts_in_code(rng, llm: kvjax.LLM, code: np.ndarray, length: int, held_out: bool) -> list[int]:
    """Mixes facts into library code; every second fact repeats an earlier one, so that there is something to retrieve.

    Args:
      rng: NumPy's random generator.
      llm: the model, for its tokenizer.
      code: token ids of library code.
      length: least number of tokens.
      held_out: whether words, values and templates are the held-out ones, or those of training.

    Returns:
      `length` token ids or a few more.
    """
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
    """Source of token rows that start with the beginning-of-text token."""

    def __init__(self, llm: kvjax.LLM, seed: int):
        self.llm, self.seed = llm, seed
        self.code = common.held_out_tokens(llm)
        prose = docstrings(corpus.stdlib_documents(held_out=True))
        self.prose = np.asarray(llm.encode("\n\n".join(prose), start=False))

    def draw(self, kind: str, number: int, prompt: int, length: int) -> list[int]:
        """Draws one text.

        Args:
          kind: one of `KINDS`.
          number: tells texts of one kind apart; the same number gives the same text.
          prompt: tokens to read.
          length: tokens of prompt and continuation.

        Returns:
          `length` token ids.

        Raises:
          ConfigError: the kind is unknown.
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
        """Returns a prompt of prose whose continuation changes its kind after every `prompt` tokens."""
        tokens, turn = self._prose(rng, prompt, prompt), 0
        while len(tokens) < length:
            tokens += getattr(self, ("_code", "_needles", "_prose")[turn % 3])(rng, prompt, prompt)[:prompt]
            turn += 1
        return tokens


def docstrings(documents: list[str]) -> list[str]:
    """Returns the docstrings of all modules, classes and functions of Python files, in order."""
    nodes = (node for text in documents for node in ast.walk(ast.parse(text)))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for node in nodes if isinstance(node, documented) and (text := ast.get_docstring(node))]
