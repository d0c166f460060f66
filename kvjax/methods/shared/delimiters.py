"""Weights of a model's delimiters, and their file (DynSplit-KV, Algorithm 1).

Weights depend on the kind of text (Figure 3 b), so a model may have several tables.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from kvjax import _files
from kvjax.errors import ConfigError, FormatMismatch, WriteFailed
from kvjax.methods.shared.delimiter_texts import ends_sentence

NO_DELIMITER = -1.0  # weight of a token that is no delimiter


@dataclasses.dataclass(frozen=True)
class Delimiters:
    """Table of the importance of each delimiter of one model on one kind of text.

    Attributes:
      fingerprint: identity of model and tokenizer (`LLM.identity`).
      vocab_size: V, rows of the model's embedding.
      tokens: ids of the delimiters.
      texts: text of each delimiter.
      scores: mean s_i over the occurrences of each delimiter (Algorithm 1); the mean over all delimiters for one that
        is too rare.
      counts: occurrences of each delimiter.
    """

    fingerprint: str
    vocab_size: int
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    scores: tuple[float, ...]
    counts: tuple[int, ...]

    def weights(self) -> np.ndarray:
        """Returns w as float32[V]: the scores stretched to [0, 1], and NO_DELIMITER for other tokens.

        The paper has w in [0, 1] and does not say how it is derived from s.
        """
        scores = np.asarray(self.scores)
        spread = scores.max() - scores.min()
        weights = np.full(self.vocab_size, NO_DELIMITER, np.float32)
        weights[list(self.tokens)] = (scores - scores.min()) / spread if spread else 1.0
        return weights

    def sentence_weights(self) -> np.ndarray:
        """Returns float32[V]: 1 for pre-defined sentence ends, NO_DELIMITER for other tokens."""
        weights = np.full(self.vocab_size, NO_DELIMITER, np.float32)
        weights[[token for token, text in zip(self.tokens, self.texts, strict=True) if ends_sentence(text)]] = 1.0
        return weights

    def among(self, texts: Collection[str]) -> "Delimiters":
        """Returns the table of the delimiters that have one of these texts; raises ConfigError if none has."""
        kept = [row for row in self._rows() if row[1] in texts]
        if not kept:
            raise ConfigError(f"none of the {len(self.tokens)} delimiters is one of {' '.join(sorted(texts))}; use "
                              "candidates='all', or make the table with this model's tokenizer (configs/delimiters.py)")
        return Delimiters(self.fingerprint, self.vocab_size, *zip(*kept, strict=True))

    def _rows(self) -> Iterator[tuple[int, str, float, int]]:
        """Returns token, text, score and count of each delimiter."""
        return zip(self.tokens, self.texts, self.scores, self.counts, strict=True)

    def reversed(self) -> "Delimiters":
        """Returns the table with scores in reversed order: the best delimiter gets the worst score (Figure 3 d)."""
        order = np.argsort(self.scores, kind="stable")
        scores = np.empty(len(order))
        scores[order] = np.asarray(self.scores)[order[::-1]]
        return dataclasses.replace(self, scores=tuple(scores.tolist()))

    def check_model(self, fingerprint: str) -> None:
        """Raises FormatMismatch unless the table was made for the model of this fingerprint."""
        if fingerprint != self.fingerprint:
            raise FormatMismatch(f"the delimiters are those of the model {self.fingerprint!r}, not of {fingerprint!r}; "
                                 "make a table for this model (configs/delimiters.py)")

    def save(self, path: str | os.PathLike) -> None:
        """Writes a JSON file with one delimiter per line, replacing an existing file once all of it is written.

        Raises:
          WriteFailed: writing fails.
        """
        rows = ",\n".join(json.dumps(row) for row in self._rows())
        head = json.dumps({"fingerprint": self.fingerprint, "vocab_size": self.vocab_size})
        try:
            with _files.replacing(pathlib.Path(path)) as fresh:
                fresh.write_text(f'{head[:-1]}, "delimiters": [\n{rows}\n]}}\n')
        except OSError as cause:
            raise WriteFailed(f"writing {path} failed: {cause}; choose another path") from cause

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Delimiters":
        """Reads a file that `save` wrote.

        Raises:
          ConfigError: the file is missing or is no table of delimiters.
        """
        try:
            content = _files.read_json(path)
            tokens, texts, scores, counts = zip(*content["delimiters"], strict=True)
            size = int(content["vocab_size"])
            if not all(0 <= token < size for token in tokens) or not np.isfinite(scores).all():
                raise ValueError("tokens outside the vocabulary, or scores that are not finite")
            return cls(content["fingerprint"], size, tokens, texts, scores, counts)
        except (OSError, ValueError, KeyError, TypeError) as cause:
            raise ConfigError(
                f"{path} is no table of delimiters ({type(cause).__name__}: {cause}); make one with "
                "configs/delimiters.py"
            ) from cause


class DelimiterCounts:
    """Sums of boundary scores by token, collected over texts."""

    def __init__(self, vocab_size: int):
        self.total, self.square, self.count = np.zeros(vocab_size), np.zeros(vocab_size), np.zeros(vocab_size, np.int64)

    def add(self, tokens: np.ndarray, scores: np.ndarray) -> None:
        """Adds the boundary scores of a text.

        Args:
          tokens: int[T], ids of the text.
          scores: float[N], scores of its first N <= T tokens; the last tokens have none.
        """
        scored = tokens[: len(scores)]
        np.add.at(self.total, scored, scores)
        np.add.at(self.square, scored, scores**2)
        np.add.at(self.count, scored, 1)

    def merge(self, other: "DelimiterCounts") -> None:
        """Adds the sums of another instance."""
        self.total, self.square = self.total + other.total, self.square + other.square
        self.count = self.count + other.count

    def copy(self) -> "DelimiterCounts":
        """Returns an independent instance with the same sums."""
        duplicate = DelimiterCounts(len(self.count))
        duplicate.merge(self)
        return duplicate

    def mean(self) -> np.ndarray:
        """Returns the mean score of each token as float[V]; NaN for tokens that were not seen."""
        return np.where(self.count > 0, self.total / np.maximum(self.count, 1), np.nan)

    def standard_error(self) -> np.ndarray:
        """Returns the standard error of the mean as float[V]; NaN below two occurrences."""
        count = np.maximum(self.count, 2)
        variance = np.maximum(self.square - self.total**2 / count, 0) / (count - 1)
        return np.where(self.count > 1, np.sqrt(variance / count), np.nan)

    def table(self, fingerprint: str, texts: Mapping[int, str], least: int = 8) -> Delimiters:
        """Returns the table of delimiters.

        Args:
          fingerprint: identity of model and tokenizer (`LLM.identity`).
          texts: text of each delimiter, by token id.
          least: occurrences below which a delimiter gets the mean score over all occurrences of all delimiters.

        Raises:
          ConfigError: no delimiter was seen at all.
        """
        tokens = np.fromiter(texts, np.int64)
        count = self.count[tokens]
        if not count.sum():
            raise ConfigError("the texts have no delimiter at all; use more or other texts")
        overall = self.total[tokens].sum() / count.sum()
        scores = np.where(count >= least, self.total[tokens] / np.maximum(count, 1), overall)
        return Delimiters(
            fingerprint, len(self.count), tuple(tokens.tolist()), tuple(texts.values()), tuple(scores.tolist()),
            tuple(count.tolist()),
        )
