"""The least that a token has to move through a device's memory, and the marks set for what its program does move."""

import dataclasses
import math

import jax

from kvjax.cache.layer import LayerPlan
from kvjax.cache.read import choose
from kvjax.cache.state import LayerState
from kvjax.inference.plan import Plan, State
from kvjax.methods.icecache import IceCache
from kvjax.ops import quantize
from kvjax.typing import PyTree

MIB = 2**20
# Most bytes a token may access, over the ideal, by kvjax's names of methods.
RATIO = {
    "full": 1.3, "streaming_llm": 1.3, "quest": 1.5, "kvswap": 1.5, "dynsplit": 1.5, "infinigen": 1.5, "pqcache": 1.5,
    "dynakv": 2.0, "icecache": 2.0,
}
TEMPORARIES = 0.05  # most temporary bytes, over those of the state
COPY = MIB  # a copy of an array is smaller
SHARE_OF_FULL = 1 / 5  # most bytes beyond weights that a method which selects accesses, over those of full, at LONG
LONG = 131_072


@dataclasses.dataclass(frozen=True)
class Ideal:
    """The bytes that a program cannot do without.

    Attributes:
      weights: every weight once; of an embedding that is not the unembedding, too, only the tokens' rows.
      index: what the method reads to select.
      attended: keys and values of the attended tokens, once, as the cache keeps them.
      written: the new token's key and value, and those of the token that leaves the window.
    """

    weights: int
    index: int
    attended: int
    written: int

    @property
    def total(self) -> int:
        return self.weights + self.index + self.attended + self.written


def of_token(plan: Plan, params: PyTree, state: State, layers: int | None = None) -> Ideal:
    """Returns the ideal of one token.

    Args:
      plan: static part of the cache, full up to its capacity.
      params: shapes of the weights that are used: of the model, or of the layer that is read.
      state: shapes of the cache.
      layers: number of layers that are read; None = all.

    Returns:
      Bytes of weights, index, attended and written rows.
    """
    count = len(plan.layers) if layers is None else layers
    index, attended, written = 0, 0, 0
    for layer, cache in list(zip(plan.layers, state.layers, strict=True))[:count]:
        index += index_bytes(layer, cache.state)
        attended += attended_bytes(layer, plan.dtype) * plan.batch
        written += (tail_row(layer) + block_row(layer, plan.dtype)) * layer.spec.kv_heads * plan.batch
    return Ideal(weight_bytes(params, plan.batch), index, attended, written)


def weight_bytes(params: PyTree, tokens: int) -> int:
    """Returns the bytes of the weights that `tokens` tokens go through together."""
    total = nbytes(params)
    if "lm_head" in params:
        table = params["embedding"]["embedding"]
        total -= nbytes(table) - tokens * table.shape[1] * table.dtype.itemsize
    return total


def nbytes(tree: PyTree) -> int:
    """Returns the bytes of all arrays of a tree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def tail_row(layer: LayerPlan) -> int:
    """Returns the bytes of a key and a value in the tail, for one KV head."""
    return 2 * layer.spec.head_dim * jax.numpy.dtype(layer.spec.key_type).itemsize


def block_row(layer: LayerPlan, dtype: str) -> int:
    """Returns the bytes of a key and a value in a block, for one KV head; a key that is in the index alone is f32."""
    spec = layer.spec
    row = quantize.width(dtype, spec.head_dim) * jax.numpy.dtype(quantize.array_type(dtype)).itemsize
    return row + (row if spec.keeps_keys else 4 * spec.head_dim)


def attended_bytes(layer: LayerPlan, dtype: str) -> int:
    """Returns the bytes of keys and values that one sequence's query attends in one layer, the new token aside.

    The newest tokens come from the tail. The others are `Spec.selected_rows`, or all that there are if the method
    attends everything; in a layer with a sliding window, no more than the window.
    """
    spec = layer.spec
    tail = min(spec.sinks + spec.ring, spec.capacity)
    rows = spec.capacity - tail if layer.dense else min(spec.selected_rows, spec.capacity - tail)
    if spec.sliding is not None:
        tail = min(tail, spec.sliding)
        rows = min(rows, max(0, spec.sliding - tail))
    return spec.kv_heads * (tail * tail_row(layer) + rows * block_row(layer, dtype))


def index_bytes(layer: LayerPlan, state: LayerState) -> int:
    """Returns the bytes of the index that the method reads to select for one token of every sequence.

    These are all arrays of the index that `Method.select` looks at, whole, as each of their numbers has a part in the
    scores. IceCache opens some pages of each level of its tree: there it is the keys in them.
    """
    batch, spec = state.refused.shape[0], layer.spec
    if isinstance(layer.method, IceCache):
        return batch * spec.kv_heads * _opened_rows(layer) * 4 * spec.head_dim
    leaves, tree = jax.tree.flatten(state.index)
    q = jax.ShapeDtypeStruct((batch, spec.kv_heads * spec.group, spec.head_dim), spec.key_type)

    def selects(leaves, others, q):
        return choose(layer, dataclasses.replace(others, index=jax.tree.unflatten(tree, leaves)), q)

    others = dataclasses.replace(state, index=())
    used = jax.export.export(jax.jit(selects), platforms=("tpu",))(leaves, others, q).module_kept_var_idx
    return nbytes([leaf for i, leaf in enumerate(leaves) if i in used])


def _opened_rows(layer: LayerPlan) -> int:
    """Returns the keys that IceCache compares with a query: on each level its pages, or all there are."""
    method, spec = layer.method, layer.spec
    assert isinstance(method, IceCache)
    shape, search = method.shape(spec), method.search(method.beam)
    there = (math.ceil(spec.capacity * method.ratio**level) for level in range(shape.levels))
    return sum(min(search.pages * spec.block_rows, count) for count in there)
