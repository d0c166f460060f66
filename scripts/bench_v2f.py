"""Choosing tokens by block scores: all blocks in one fixed shape (V2F) against block by block (DynSplit-KV, Figure 12).

    python scripts/bench_v2f.py [--tokens 32768] [--repeats 30]

Both score the same blocks of 10 to 18 tokens with the same vectors and return the same tokens. "One by one" looks at
each block by itself, as one has to with blocks of different lengths and no fixed shape: a compiled loop over blocks for
the scores, then the tokens of the best blocks, one block after the other.
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

HEADS, GROUP, SIZE = 8, 4, 64


def made_up(plan, tokens: int):
    """A layer's state with blocks of 10 to 18 tokens of random keys, and a query."""
    method, spec = plan
    rng = np.random.default_rng(0)
    ends = np.cumsum(rng.integers(10, 19, spec.num_blocks))
    ends = ends[ends <= tokens]
    pos = np.full((spec.num_blocks, spec.block_rows), -1, np.int32)
    for block, (a, z) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        pos[block, : z - a] = np.arange(a, z)
    block = jnp.asarray(np.nonzero(pos >= 0)[0], jnp.int32)
    layer = caching.empty_layer(spec, method.init(spec, method.weights(0)), jnp.float32)
    keys = jnp.asarray(rng.normal(size=(HEADS, len(block), SIZE)), jnp.float32)
    vectors = layer.index.vectors.take(jnp.broadcast_to(block, (HEADS, len(block))), keys)
    table = jnp.broadcast_to(jnp.asarray(pos), (HEADS, *pos.shape))
    count = jnp.sum(table >= 0, axis=-1, dtype=jnp.int32)
    return layer, vectors, table, count, jnp.asarray(rng.normal(size=(HEADS, GROUP, SIZE)), jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def at_once(spec, layer, vectors, q):
    """Scores of all blocks, the best of them, and the tokens that fit: what a step of decoding does."""
    score = jnp.max(vectors.scores(q, layer.count), axis=1)
    chosen = top_blocks(score, layer.count > 0, spec.max_blocks)
    none = jnp.full(HEADS, spec.num_blocks, jnp.int32)
    return caching.needed_blocks(spec, layer, Selection(chosen, none))[1].pos


@functools.partial(jax.jit, static_argnums=0)
def one_by_one(spec, layer, vectors, q):
    """The same tokens, each block by itself."""
    def score(block):
        one = jax.tree.map(lambda leaf: leaf[:, block][:, None], vectors)
        return jnp.max(one.scores(q, layer.count[:, block][:, None])[..., 0], axis=1)

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
    layer, vectors, pos, count, q = made_up((method, spec), options.tokens)
    layer = dataclasses.replace(layer, pos=pos, count=count)
    same = np.array_equal(at_once(spec, layer, vectors, q), one_by_one(spec, layer, vectors, q))
    fast = seconds(at_once, spec, layer, vectors, q, repeats=options.repeats)
    slow = seconds(one_by_one, spec, layer, vectors, q, repeats=options.repeats)
    print(f"same tokens: {same}  at once {1e3 * fast:.2f} ms  one by one {1e3 * slow:.2f} ms  ratio {slow / fast:.1f}")


if __name__ == "__main__":
    main()
