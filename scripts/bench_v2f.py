"""Time that one fixed shape for blocks of all lengths (V2F) saves, in selection and in reuse (DynSplit-KV, Figure 12).

    python scripts/bench_v2f.py [--tokens 32768] [--repeats 30]

Selection has the three steps of Appendix B.2: the tokens of the best blocks of 10 to 18 tokens are found, loaded, and
attended. With V2F a block is one vector, whatever its length; all blocks are scored, ranked and mapped to tokens at
once, and the tokens are loaded and attended at once, as in a step of decoding. Without it each block is scored and
attended by itself, in a compiled loop. It is scored by its own keys, or by V2F's vectors; with the latter both ways
attend the same tokens, and the difference is what the fixed shape saves. Heads are processed one after the other, as
their blocks differ in length, or side by side with each block padded to the longest, which is half of what V2F does.
The paper has 2.1x to 6.1x for the three steps.

Reuse finds the chosen blocks that are in memory already, and slots for the others: for all heads with one common
length, or head after head with the length of each. A fifth of the blocks is in memory.
"""

import argparse
import dataclasses
import functools
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import residency
from kvjax.cache import state as caching
from kvjax.cache.pool import find_rows
from kvjax.cache.types import Selection
from kvjax.methods import DynSplit
from kvjax.ops import attention
from kvjax.ops.attention import Part
from kvjax.ops.topk import top_blocks

HEADS, GROUP, SIZE = 8, 4, 64
TABLE = str(pathlib.Path(__file__).parents[1] / "kvjax" / "reference" / "delimiters.json")


def made_up(plan, tokens: int):
    """Returns a layer's state with blocks of 10 to 18 tokens of random keys, keys and values [K, NB, C, D], and a
    query."""
    method, spec = plan
    rng = np.random.default_rng(0)
    ends = np.cumsum(rng.integers(method.split.least, method.split.most + 1, spec.num_blocks))
    ends = ends[ends <= tokens]
    pos = np.full((spec.num_blocks, spec.block_rows), -1, np.int32)
    for block, (a, z) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        pos[block, : z - a] = np.arange(a, z)
    block, row = (jnp.asarray(x, jnp.int32) for x in np.nonzero(pos >= 0))
    layer = caching.empty_layer(spec, method.init(spec, method.weights(0)), jnp.float32)
    key = jnp.asarray(rng.normal(size=(HEADS, len(block), SIZE)), jnp.float32)
    vectors = layer.index.vectors.take(jnp.broadcast_to(block, (HEADS, len(block))), key)
    table = jnp.asarray(pos)[None]  # the same for all heads
    layer = dataclasses.replace(
        layer, index=dataclasses.replace(layer.index, vectors=vectors), positions=table,
        counts=jnp.sum(table >= 0, axis=-1, dtype=jnp.int32),
    )
    blocks = jnp.zeros((HEADS, *pos.shape, SIZE)).at[:, block, row].set(key)
    value = jnp.asarray(rng.normal(size=blocks.shape), jnp.float32)
    return layer, blocks, value, jnp.asarray(rng.normal(size=(HEADS, GROUP, SIZE)), jnp.float32)


def found_at_once(spec, layer, q):
    """Returns the best blocks and the tokens that fit the budget, from the scores of all blocks, as a step of decoding
    does."""
    score = jnp.max(layer.index.vectors.scores(q, layer.count), axis=1)
    chosen = top_blocks(score, layer.count > 0, spec.max_blocks)
    none = jnp.full(HEADS, spec.num_blocks, jnp.int32)
    return caching.needed_blocks(spec, layer, Selection(chosen, none))


@functools.partial(jax.jit, static_argnums=0)
def tokens_at_once(spec, layer, q):
    """Runs step 1."""
    return found_at_once(spec, layer, q)[1].pos


@functools.partial(jax.jit, static_argnums=0)
def attended_at_once(spec, layer, key, value, q):
    """Runs steps 1 to 3."""
    need, rows = found_at_once(spec, layer, q)
    block = jnp.take_along_axis(need, rows.rank, axis=-1)
    chosen = (find_rows(kept[None], "float32", jnp.int32(0), block, rows.row, len(kept), 1)[0] for kept in (key, value))
    return attention.normalise(attention.attend_part(q, *chosen, rows.valid), q.dtype)


def bounds_of(layer):
    """Returns bounds [K, NB, 2, D] of keys, block after block; the method stores them dimension after dimension."""
    vectors = layer.index.vectors
    return jnp.stack([vectors.low, vectors.high], axis=1).transpose(0, 3, 1, 2)


def found_by_vectors(spec, layer, bounds, q):
    """Returns the best blocks, each scored by itself."""
    def score(block):
        bound = jnp.max(q[:, :, None] * bounds[:, None, block], axis=2)
        return jnp.max(jnp.sum(bound, axis=-1) * SIZE**-0.5, axis=1)

    return _best(spec, layer, score)


def found_by_keys(spec, layer, key, q):
    """Returns the blocks with the best keys, each scored by itself."""
    def score(block):
        products = jnp.einsum("kgd,kcd->kgc", q, key[:, block])
        return jnp.max(jnp.where(layer.pos[:, block][:, None] >= 0, products, -jnp.inf), axis=(1, 2))

    return _best(spec, layer, score)


def _best(spec, layer, score):
    def one(block, scores):
        return scores.at[:, block].set(score(block))

    filled = jnp.max(jnp.sum(layer.count > 0, axis=-1))  # blocks without a key come last, and are skipped
    scores = jax.lax.fori_loop(0, filled, one, jnp.zeros((HEADS, spec.num_blocks)))
    return top_blocks(scores, layer.count > 0, spec.max_blocks)


@functools.partial(jax.jit, static_argnums=(0, 1))
def tokens_block_by_block(spec, find, layer, *args):
    """Runs step 1, each block by itself."""
    chosen = find(spec, layer, *args)
    return jax.vmap(functools.partial(_tokens_of, spec))(chosen, layer.pos, layer.count)


@functools.partial(jax.jit, static_argnums=(0, 1))
def attended_block_by_block(spec, heads, layer, key, value, bounds, q):
    """Runs steps 1 to 3, each block by itself."""
    chosen = found_by_vectors(spec, layer, bounds, q)
    return heads(lambda head: _attended(spec, *head), (chosen, layer.count, key, value, q))


def side_by_side(function, heads):
    """Maps a function over all heads at once; the counterpart of `lax.map`."""
    return jax.vmap(lambda *head: function(head))(*heads)


def _attended(spec, chosen, count, key, value, q):
    """Returns the attention over one head's best blocks, block after block until the budget is used up."""
    def add(rank, carry):
        part, used = carry
        block = jnp.minimum(chosen[rank], spec.num_blocks - 1)
        rows = jnp.where(chosen[rank] < spec.num_blocks, jnp.minimum(count[block], spec.selected_rows - used), 0)
        of_block = attention.attend_part(q, key[block], value[block], jnp.arange(spec.block_rows) < rows)
        return attention.merge(part, of_block), used + rows

    empty = Part(jnp.zeros(q.shape), jnp.full(q.shape[:1], attention.NEGATIVE), jnp.zeros(q.shape[:1]))
    return attention.normalise(jax.lax.fori_loop(0, spec.max_blocks, add, (empty, jnp.int32(0)))[0], q.dtype)


def _tokens_of(spec, chosen, pos, count):
    """Returns the tokens of one head's best blocks, appended block after block until the budget is used up."""
    def add(rank, carry):
        out, used = carry
        block = jnp.minimum(chosen[rank], spec.num_blocks - 1)
        rows = jnp.arange(spec.block_rows)
        place = jnp.where((rows < count[block]) & (chosen[rank] < spec.num_blocks), used + rows, spec.selected_rows)
        return out.at[place].set(pos[block], mode="drop"), used + count[block]

    empty = jnp.full(spec.selected_rows, -1, jnp.int32)
    return jax.lax.fori_loop(0, spec.max_blocks, add, (empty, jnp.int32(0)))[0]


def resident(spec, need):
    """Returns a table of slots that holds a fifth of the needed blocks."""
    other = (need + spec.num_blocks // 2) % spec.num_blocks
    before = jnp.where(jnp.arange(need.shape[-1]) % 5 == 0, need, other)
    count = jnp.ones((HEADS, spec.num_blocks), jnp.int32)
    return residency.plan(residency.empty(HEADS, 2 * need.shape[-1], spec.num_blocks), before, count, "lru").success


@jax.jit
def heads_at_once(table, need, count):
    """Plans all heads together, which reuse equally many blocks."""
    return residency.plan(table, need, count, "lru", even=True).slot


@jax.jit
def head_after_head(table, need, count):
    """Plans each head by itself."""
    def one(args):
        rows = jax.tree.map(lambda leaf: leaf[None], args)
        return residency.plan(dataclasses.replace(rows[0], step=table.step), *rows[1:], "lru", even=True).slot[0]

    per_head = dataclasses.replace(table, step=jnp.full(HEADS, table.step))
    return jax.lax.map(one, (per_head, need, count))


def seconds(function, *args, repeats: int) -> float:
    """Returns the median seconds of a call."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    method = DynSplit(budget=options.tokens // 10, table=TABLE, importance="table")
    spec = method.spec(kv_heads=HEADS, group=GROUP, head_dim=SIZE, capacity=options.tokens + 1024)
    layer, key, value, q = made_up((method, spec), options.tokens)
    report_selection(spec, layer, key, value, q, functools.partial(seconds, repeats=options.repeats))
    report_reuse(spec, layer, q, functools.partial(seconds, repeats=options.repeats))


def report_selection(spec, layer, key, value, q, timed) -> None:
    bounds, once = jax.jit(bounds_of)(layer), (layer, key, value, q)
    args = layer, key, value, bounds, q
    whole, out = timed(attended_at_once, spec, *once), attended_at_once(spec, *once)
    report("selection: find, load, attend with V2F", whole, whole)
    for name, heads in [("head after head", jax.lax.map), ("heads side by side", side_by_side)]:
        report(f"block by block, {name}, by V2F's vectors", timed(attended_block_by_block, spec, heads, *args), whole)
        apart = float(jnp.max(jnp.abs(out - attended_block_by_block(spec, heads, *args))))
        print(f"    largest difference of the outputs {apart:.1e}")
    first = timed(tokens_at_once, spec, layer, q)
    report("step 1 alone, find: V2F", first, first)
    ways = [("V2F's vectors", found_by_vectors, (bounds, q)), ("each block's keys", found_by_keys, (key, q))]
    for name, find, args in ways:
        report(f"block by block, by {name}", timed(tokens_block_by_block, spec, find, layer, *args), first)


def report_reuse(spec, layer, q, timed) -> None:
    score = jnp.max(layer.index.vectors.scores(q, layer.count), axis=1)
    need = top_blocks(score, layer.count > 0, spec.max_blocks)
    table = resident(spec, need)
    fixed = timed(heads_at_once, table, need, layer.count)
    report("reuse: V2F, all heads, one length", fixed, fixed)
    report("head after head", timed(head_after_head, table, need, layer.count), fixed)


def report(name: str, took: float, fixed: float) -> None:
    print(f"{name:60s} {1e3 * took:7.2f} ms  {took / fixed:4.1f}x")


if __name__ == "__main__":
    main()
