"""Training sequences of the reference model: library text, needles in it, and dense recall tasks.

Each row of a batch has `tokens[T + 1]`, `weights[T]` of the predictions, and `positions[T]`. Half of the rows skip
positions at random boundaries (PoSE, Zhu et al. 2023), so that short rows teach the long relative distances of the
final context.
"""

import dataclasses

import numpy as np
from tokenizers import Tokenizer

from kvjax.eval.tasks import corpus, needles


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Shares of the kinds of rows (the rest is plain text), and weights of the loss."""

    recall: float = 0.25
    needles: float = 0.5
    passkey: float = 0.1
    max_needles: int = 8
    made_needles: float = 0.0  # share of rows with needles whose words and template are made up
    answer_weight: float = 5.0
    text_weight: float = 0.3  # of text with needles in it
    noise_weight: float = 0.0


def encode_corpus(tokenizer: Tokenizer, held_out: bool) -> np.ndarray:
    """Returns the token stream of a split, documents joined by the end-of-text token."""
    eos = tokenizer.token_to_id("<|eos|>")
    pieces = []
    for text in corpus.stdlib_documents(held_out):
        pieces += [np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16), [eos]]
    return np.concatenate(pieces).astype(np.uint16)


_rows: "Rows | None" = None  # of a worker process


def start_drawing(rows: "Rows") -> None:
    """Initialises a worker process, so that rows are sent to it once."""
    global _rows
    _rows = rows


def draw(seed: tuple[int, ...], rows: int, length: int) -> dict[str, np.ndarray]:
    """Returns a batch, in a process initialised by `start_drawing`."""
    assert _rows is not None
    return _rows.batch(seed, rows, length)


class Rows:
    """Source of rows; the random numbers depend on the seed alone."""

    def __init__(self, tokenizer: Tokenizer, stream: np.ndarray, mixture: Mixture, max_position: int):
        self.tokenizer, self.stream, self.mixture = tokenizer, stream, mixture
        self.max_position = max_position
        self.bos = tokenizer.token_to_id("<|bos|>")
        self.vocab = tokenizer.get_vocab_size()
        (self.newline,) = needles.encode(tokenizer, "\n")

    def batch(self, seed: tuple[int, ...], rows: int, length: int) -> dict[str, np.ndarray]:
        """Draws `rows` rows of `length` tokens."""
        rng = np.random.default_rng(seed)
        drawn = [self._row(rng, length) for _ in range(rows)]
        return {
            "tokens": np.stack([tokens for tokens, _ in drawn]).astype(np.int32),
            "weights": np.stack([weights for _, weights in drawn]).astype(np.float32),
            "positions": np.stack([self._positions(rng, length) for _ in drawn]),
        }

    def _row(self, rng, length):
        kind, m = rng.random(), self.mixture
        if kind < m.recall:
            tokens, weights = self._recall(rng, length + 1)
        elif kind < m.recall + m.needles:
            tokens, weights = self._needles(rng, length + 1)
        elif kind < m.recall + m.needles + m.passkey:
            tokens, weights = self._passkey(rng, length + 1)
        else:
            tokens, weights = [self.bos, *needles.random_span(rng, self.stream, length)], np.ones(length + 1)
        return np.asarray(tokens), np.asarray(weights)[1:]

    def _positions(self, rng, length):
        gaps = np.zeros(length, np.int64)
        spare = self.max_position - length
        if spare > 0 and rng.random() < 0.5:
            cuts = rng.integers(1, length, size=int(rng.integers(1, 5)))
            np.add.at(gaps, cuts, (rng.dirichlet(np.ones(len(cuts))) * rng.integers(0, spare)).astype(np.int64))
        return (np.arange(length) + np.cumsum(gaps)).astype(np.int32)

    def _recall(self, rng, length):
        """Returns pairs over a small random pool, then every pair again in another order (MQAR, Zoology)."""
        gap = int(rng.choice([0, 0, 0, 1, 2]))  # fixed tokens between key and value
        alphabet = 600 if rng.random() < 0.75 else self.vocab  # few, frequent tokens teach the circuit first
        frame = rng.integers(300, self.vocab, size=gap)
        unit = 3 + gap  # separator, key, frame, value
        pairs = int(rng.integers(3, max(4, min(64, length // (3 * unit)))))
        pool = rng.choice(np.arange(4, alphabet), size=2 * pairs, replace=False)
        keys, values = pool[:pairs], pool[pairs:]
        width = np.full((pairs, 1), self.newline)
        block = np.concatenate([width, keys[:, None], np.tile(frame, (pairs, 1)), values[:, None]], axis=1)
        tokens, weights = [self.bos], [0.0]
        value_only = np.r_[np.zeros(unit - 1), 1.0]  # many per row: weighted like text, not like an answer
        tokens += block.ravel().tolist()
        weights += [self.mixture.noise_weight] * block.size
        while len(tokens) < length:
            order = rng.permutation(pairs)
            tokens += block[order].ravel().tolist()
            weights += np.tile(value_only, pairs).tolist()
        return tokens[:length], weights[:length]

    def _needles(self, rng, length):
        most = int(min(self.mixture.max_needles, max(2, length // 64)))
        count = 1 if rng.random() < 0.5 else int(rng.integers(1, most + 1))
        if self.mixture.made_needles and rng.random() < self.mixture.made_needles:
            facts = needles.made_needles(rng, self.tokenizer, self.stream, count)
        else:
            facts = needles.draw_needles(rng, count, held_out=False)
        while len(facts) > 1 and 3 * needles.needle_cost(self.tokenizer, facts) > length:  # stated and asked for
            facts.pop()
        asked = [facts[i] for i in rng.permutation(len(facts))]
        return self._ask(rng, length, facts, asked)

    def _passkey(self, rng, length):
        fact = needles.passkey(rng, held_out=False)
        return self._ask(rng, length, [fact], [fact])

    def _ask(self, rng, length, facts, asked):
        """Returns text with the facts in it, then each question with its answer, weighted."""
        tail, tail_weights = [], []
        for fact in asked:
            cue = needles.encode(self.tokenizer, "\n" + fact.cue)
            answer = needles.encode(self.tokenizer, f" {fact.value}.")
            tail += [*cue, *answer]
            tail_weights += [0.1] * len(cue) + [self.mixture.answer_weight] * len(answer)
        room = length - len(tail)
        text = needles.haystack(rng, self.tokenizer, self.stream, room, facts)
        return text + tail, np.r_[np.full(len(text), self.mixture.text_weight), tail_weights]
