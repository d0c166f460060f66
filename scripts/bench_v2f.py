"""What one fixed shape for blocks of all lengths (V2F) saves, in selection and in reuse (DynSplit-KV, Figure 12).

    python scripts/bench_v2f.py [--tokens 32768] [--repeats 30]

Selection: the tokens of the best blocks of 10 to 18 tokens. With V2F a block is one vector, whatever its length, and
all are scored, ranked and mapped to tokens at once, as in a step of decoding. Without it each block is looked at by
itself, in a compiled loop: its own keys are scored, and the tokens of the best blocks appended block after block.
A third way has the vectors, but no fixed shape, and returns the same tokens as the first: what the shape alone saves.

Reuse: which of the chosen blocks are in memory already, and which slots the others take, for all heads with one common
length, or head after head with the length of each. A fifth of the blocks is in memory.
"""

import argparse
import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache as caching
from kvjax.method import Selection, top_blocks
from kvjax.methods import DynSplit
from kvjax.store import residency

HEADS, GROUP, SIZE = 8, 4, 64


def made_up(plan, tokens: int):
    """A layer's state with blocks of 10 to 18 tokens of random keys, those keys [K, NB, C, D], and a query."""
    method, spec = plan
    rng = np.random.default_rng(0)
    ends = np.cumsum(rng.integers(10, 19, spec.num_blocks))
    ends = ends[ends <= tokens]
    pos = np.full((spec.num_blocks, spec.block_rows), -1, np.int32)
    for block, (a, z) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        pos[block, : z - a] = np.arange(a, z)
    block, row = (jnp.asarray(x, jnp.int32) for x in np.nonzero(pos >= 0))
    layer = caching.empty_layer(spec, method.init(spec, method.weights(0)), jnp.float32)
    key = jnp.asarray(rng.normal(size=(HEADS, len(block), SIZE)), jnp.float32)
    vectors = layer.index.vectors.take(jnp.broadcast_to(block, (HEADS, len(block))), key)
    table = jnp.broadcast_to(jnp.asarray(pos), (HEADS, *pos.shape))
    layer = dataclasses.replace(layer, index=dataclasses.replace(layer.index, vectors=vectors), pos=table)
    layer = dataclasses.replace(layer, count=jnp.sum(table >= 0, axis=-1, dtype=jnp.int32))
    blocks = jnp.zeros((HEADS, *pos.shape, SIZE)).at[:, block, row].set(key)
    return layer, blocks, jnp.asarray(rng.normal(size=(HEADS, GROUP, SIZE)), jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def at_once(spec, layer, q):
    """Scores of all blocks, the best of them, and the tokens that fit: what a step of decoding does."""
    score = jnp.max(layer.index.vectors.scores(q, layer.count), axis=1)
    chosen = top_blocks(score, layer.count > 0, spec.max_blocks)
    none = jnp.full(HEADS, spec.num_blocks, jnp.int32)
    return caching.needed_blocks(spec, layer, Selection(chosen, none))[1].pos


@functools.partial(jax.jit, static_argnums=0)
def by_vectors(spec, layer, q):
    """The same tokens, each block by itself."""
    def score(block):
        one = jax.tree.map(lambda leaf: leaf[:, block][:, None], layer.index.vectors)
        return jnp.max(one.scores(q, layer.count[:, block][:, None])[..., 0], axis=1)

    return _block_after_block(spec, layer, score)


@functools.partial(jax.jit, static_argnums=0)
def by_keys(spec, layer, blocks, q):
    """The blocks with the best keys, each block by itself."""
    def score(block):
        found = jnp.einsum("kgd,kcd->kgc", q, blocks[:, block])
        return jnp.max(jnp.where(layer.pos[:, block][:, None] >= 0, found, -jnp.inf), axis=(1, 2))

    return _block_after_block(spec, layer, score)


def _block_after_block(spec, layer, score):
    scores = jax.lax.map(score, jnp.arange(spec.num_blocks)).T
    chosen = top_blocks(scores, layer.count > 0, spec.max_blocks)
    return jax.lax.map(lambda head: _tokens_of(spec, *head), (chosen, layer.pos, layer.count))


def _tokens_of(spec, chosen, pos, count):
    """Tokens of one head's best blocks, appended block after block until the budget is used up."""
    def add(rank, carry):
        out, used = carry
        block = jnp.minimum(chosen[rank], spec.num_blocks - 1)
        rows = jnp.arange(spec.block_rows)
        at = jnp.where((rows < count[block]) & (chosen[rank] < spec.num_blocks), used + rows, spec.selected_rows)
        return out.at[at].set(pos[block], mode="drop"), used + count[block]

    empty = jnp.full(spec.selected_rows, -1, jnp.int32)
    return jax.lax.fori_loop(0, spec.max_blocks, add, (empty, jnp.int32(0)))[0]


def resident(spec, need):
    """A table of slots in which a fifth of the needed blocks is."""
    other = (need + spec.num_blocks // 2) % spec.num_blocks
    before = jnp.where(jnp.arange(need.shape[-1]) % 5 == 0, need, other)
    count = jnp.ones((HEADS, spec.num_blocks), jnp.int32)
    return residency.plan(residency.empty(HEADS, 2 * need.shape[-1], spec.num_blocks), before, count, "lru").success


@jax.jit
def heads_at_once(table, need, count):
    """Plan of all heads, which reuse equally many blocks."""
    return residency.plan(table, need, count, "lru", even=True).slot


@jax.jit
def head_after_head(table, need, count):
    """Plan of each head by itself."""
    def one(args):
        rows = jax.tree.map(lambda leaf: leaf[None], args)
        return residency.plan(dataclasses.replace(rows[0], step=table.step), *rows[1:], "lru").slot[0]

    per_head = dataclasses.replace(table, step=jnp.full(HEADS, table.step))
    return jax.lax.map(one, (per_head, need, count))


def seconds(function, *args, repeats: int) -> float:
    """Median time of a call."""
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
    method = DynSplit(budget=options.tokens // 10, splitting="fixed", chunk=18)
    spec = method.spec(kv_heads=HEADS, group=GROUP, head_dim=SIZE, capacity=options.tokens * 2)
    layer, blocks, q = made_up((method, spec), options.tokens)
    timed = functools.partial(seconds, repeats=options.repeats)
    same = np.array_equal(at_once(spec, layer, q), by_vectors(spec, layer, q))
    fixed = timed(at_once, spec, layer, q)
    report("selection, V2F", fixed, fixed)
    report("selection, block by block, by each block's keys", timed(by_keys, spec, layer, blocks, q), fixed)
    report(f"selection, block by block, by vectors (same tokens: {same})", timed(by_vectors, spec, layer, q), fixed)
    score = jnp.max(layer.index.vectors.scores(q, layer.count), axis=1)
    need = top_blocks(score, layer.count > 0, spec.max_blocks)
    table = resident(spec, need)
    fixed = timed(heads_at_once, table, need, layer.count)
    report("reuse, V2F: all heads, one length", fixed, fixed)
    report("reuse, head after head", timed(head_after_head, table, need, layer.count), fixed)


def report(name: str, took: float, fixed: float) -> None:
    print(f"{name:60s} {1e3 * took:7.2f} ms  {took / fixed:4.1f}x")


if __name__ == "__main__":
    main()
