"""DynSplit-KV (Ye et al., "Dynamic Semantic Splitting for KVCache Compression"): blocks that end at delimiters.

A block ends with the delimiter that matters most to the model near its ideal length (DD-Select,
`kvjax.methods.shared.segments`; Algorithm 1 gives the weights, `kvjax.calibration.boundaries`). Each block, of whatever
length, is one pair of vectors and one cache block of C + Delta rows (V2F, section 4.2). Blocks are scored by their
element-wise minima and maxima; a block's score is that of all its tokens, of which the machinery takes as many as the
budget holds (`kvjax.cache.state.needed_blocks`: rows of the best blocks in order, the last block in part). So every
shape is fixed, and no block is looked at by itself.

While decoding only the open block is undecided. The window has the tokens after the one that leaves it, so the end of a
block is known when its first possible last token is placed, and no row ever moves.

`splitting` replaces DD-Select by what the paper compares with, everything else being equal (Figures 1 and 11):

    dynamic     DD-Select
    fixed       every C tokens: without delimiters
    sentence    at the first pre-defined sentence end within C + Delta tokens, there if none is
    no_length   at the most important delimiter within C + Delta tokens, wherever it is: without length control
    no_weight   at the delimiter nearest to the ideal end: without weights

Choices the paper leaves open: alpha = 0.5 and Delta = 4 (C = 14 is its "window length parameter"); `sentence` and
`no_length` know no shortest block, so `shortest` bounds the number of blocks there; and a block is an array of C +
Delta rows, so that no splitting makes a longer one.

Resident: 2 D numbers per block, D with `vectors="mean"`. Cost per step: a score per block, then the selected blocks.
"""

import dataclasses
import os
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from kvjax.cache.method import Method, Placement, Selection, no_force
from kvjax.errors import ConfigError
from kvjax.methods.shared.delimiters import NO_DELIMITER, Delimiters
from kvjax.methods.shared.fitted import read_once
from kvjax.methods.shared.page_bounds import VECTORS, Bounds, Means
from kvjax.methods.shared.segments import Split, weights_of
from kvjax.ops.topk import aggregate, top_blocks
from kvjax.typing import Array, Float, Int32, pytree

SPLITTINGS = ("dynamic", "fixed", "sentence", "no_length", "no_weight")


@pytree
class DynSplitIndex:
    vectors: Bounds | Means
    delimiter: Int32[Array, "*B X"]  # token ids, rising
    weight: Float[Array, "*B X"]  # w of each
    block: Int32[Array, "*B"]  # the open block
    filled: Int32[Array, "*B"]  # its tokens
    length: Int32[Array, "*B"]  # its final length; not decided yet while filled < least


@dataclasses.dataclass(frozen=True)
class DynSplit(Method):
    """Blocks of variable length.

    Attributes:
      table: file of the model's delimiters (`kvjax.methods.shared.delimiters.Delimiters`); only `splitting="fixed"`
      needs none. splitting: how blocks are cut, one of SPLITTINGS.
      vectors: what stands for a block's keys: "minmax", or "mean" (Appendix A.2).
      chunk: C, ideal length of a block.
      deviation: Delta, by which a block may be shorter or longer.
      alpha: share of the delimiter's weight in the score of an end; of no meaning for other splittings than dynamic.
      shortest: shortest block where nothing else bounds it.
    """

    table: str | os.PathLike = ""
    splitting: str = "dynamic"
    vectors: str = "minmax"
    chunk: int = 14
    deviation: int = 4
    alpha: float = 0.5
    shortest: int = 4
    places_alike: ClassVar[bool] = True
    files: ClassVar[tuple[str, ...]] = ("table",)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "table", os.fspath(self.table))
        if self.splitting not in SPLITTINGS or self.vectors not in VECTORS:
            raise ConfigError(f"splitting={self.splitting!r} must be one of {', '.join(SPLITTINGS)}; "
                              f"vectors={self.vectors!r} one of {', '.join(VECTORS)}")
        if not 0 <= self.deviation < self.chunk or not 0 < self.shortest <= self.chunk or not 0 <= self.alpha <= 1:
            raise ConfigError(f"deviation={self.deviation} and shortest={self.shortest} must be smaller than "
                              f"chunk={self.chunk}, alpha={self.alpha} in [0, 1]")
        if self.window <= self.split.ends - 1:
            raise ConfigError(f"window={self.window} must be larger than the {self.split.ends - 1} tokens that decide "
                              "where a block ends; raise it or lower deviation")

    @property
    def name(self):
        changed = [value for value, usual in ((self.splitting, "dynamic"), (self.vectors, "minmax")) if value != usual]
        return "_".join([super().name, *changed])

    @property
    def reads_tokens(self) -> bool:  # type: ignore[override]  # of the class elsewhere, of its settings here
        """Whether blocks end at delimiters."""
        return self.splitting != "fixed"

    @property
    def split(self) -> Split:
        """The rule that cuts blocks."""
        chunk, most = self.chunk, self.chunk + self.deviation
        if self.splitting == "fixed":
            return Split(chunk, chunk, chunk, 0.0, chunk)
        if self.splitting == "sentence":
            return Split(chunk, self.shortest, most, 1.0, most)
        if self.splitting == "no_length":
            return Split(chunk, self.shortest, most, 1.0, chunk)
        alpha = 0.0 if self.splitting == "no_weight" else self.alpha
        return Split(chunk, chunk - self.deviation, most, alpha, chunk)

    def blocks(self, capacity, rows):
        split = self.split
        return -(-capacity // split.least) + 1, split.most, -(-rows // split.least) + 1, 0

    def check_model(self, fingerprint):
        if self.splitting != "fixed":
            delimiters_in(self.table).check_model(fingerprint)

    def weights(self, layer):
        """Delimiters and their weights, alike in all layers. ConfigError if there is no such file."""
        return delimiter_weights(self.table, self.splitting)

    def init(self, spec, weights):
        delimiter, weight = map(jnp.asarray, weights)
        zero = jnp.int32(0)
        return DynSplitIndex(VECTORS[self.vectors].empty(spec), delimiter, weight, zero, zero, zero)

    def build(self, spec, index, context):
        """Cuts the middle part; the tokens after it, which are in the window, decide its last blocks."""
        weight = weights_of(context.token, index.delimiter, index.weight)
        start, stored = jnp.argmax(context.valid).astype(jnp.int32), jnp.sum(context.valid, dtype=jnp.int32)
        begins = self.split.begins(weight, start, spec.num_blocks + 1)
        block = jnp.searchsorted(begins, context.pos, side="right").astype(jnp.int32) - 1
        row = context.pos - begins[jnp.maximum(block, 0)]
        placement = _alike(spec, jnp.where(context.valid, block, spec.num_blocks), jnp.where(context.valid, row, 0))
        index = dataclasses.replace(index, vectors=index.vectors.take(placement.block, context.key))
        opened = jnp.searchsorted(begins, start + stored, side="right").astype(jnp.int32) - 1
        filled, length = start + stored - begins[opened], begins[opened + 1] - begins[opened]
        return dataclasses.replace(index, block=opened, filled=filled, length=length), placement

    def select(self, spec, index, view, q):
        occupied = view.count > 0
        score = aggregate(index.vectors.scores(q, view.count), self.aggregation)
        return Selection(top_blocks(score, occupied, spec.max_blocks), no_force(spec))

    def append(self, spec, index, view, evicted):
        split, filled = self.split, index.filled + 1
        candidates = jnp.concatenate([evicted.token[None], evicted.ahead[: split.ends - 1]])
        decided = split.length(weights_of(candidates, index.delimiter, index.weight))
        length = jnp.where(filled == split.least, decided, index.length)
        placement = _alike(spec, jnp.where(evicted.valid, index.block, spec.num_blocks), index.filled)
        closed = (filled >= split.least) & (filled == length)
        moved = dataclasses.replace(
            index, vectors=index.vectors.take(placement.block[:, None], evicted.key[:, None]),
            block=index.block + closed, filled=jnp.where(closed, 0, filled), length=length,
        )
        keep = {name: jnp.where(evicted.valid, getattr(moved, name), getattr(index, name))
                for name in ("block", "filled", "length")}
        return dataclasses.replace(moved, **keep), placement


def _alike(spec, block, row) -> Placement:
    """A placement that is the same in all heads."""
    spread = (jnp.broadcast_to(x, (spec.kv_heads, *x.shape)).astype(jnp.int32) for x in (block, row))
    return Placement(*spread)


@read_once
def delimiters_in(path: str) -> Delimiters:
    """The table in a file. ConfigError where there is none."""
    if not path:
        raise ConfigError("cutting at delimiters needs table=, a file of the model's (configs/delimiters.py makes "
                          "one); only dynsplit(splitting='fixed') does without")
    return Delimiters.load(path)


@read_once
def delimiter_weights(path: str, splitting: str) -> tuple[np.ndarray, np.ndarray]:
    """int32[X] rising token ids and float32[X] weights, as a way of splitting wants them."""
    if splitting == "fixed":
        return np.full(1, -1, np.int32), np.full(1, NO_DELIMITER, np.float32)
    table = delimiters_in(path)
    weights = table.sentence_weights() if splitting == "sentence" else table.weights()
    token = np.flatnonzero(weights != NO_DELIMITER)
    if not len(token):
        raise ConfigError(f"{path} has no delimiter for splitting={splitting!r}; make it from other texts")
    weight = np.ones(len(token), np.float32) if splitting == "no_weight" else weights[token]
    return token.astype(np.int32), weight
