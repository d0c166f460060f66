"""The pool of TPUs, on CPU: its kernels in the interpreter, against the pool that CPUs have."""

import dataclasses

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from harness import CAPACITY, METHODS, Sim, Stream, either

from kvjax.attend import attend, init_cache, prefill_cache
from kvjax.cache.layer import LayerCache
from kvjax.cache.pool import MemoryPool, Pool, StoreRef
from kvjax.cache.tiled_pool import TiledPool
from kvjax.inference.plan import Slots, State, make_plan, outline
from kvjax.inference.saves import state_file
from kvjax.methods import Full, Quest
from kvjax.ops import quantize
from kvjax.ops.kernels import tiles

BATCH, HEADS, BLOCKS, SIZE = 2, 2, 5, 8
REF = StoreRef(jnp.int32(-1), jnp.int32(0))


def drawn(dtype: str, rows: int, keeps_keys: bool = True) -> MemoryPool:
    rng = np.random.default_rng(0)
    shape = BATCH, HEADS, BLOCKS, rows, SIZE
    key, value = (quantize.pack(jnp.asarray(rng.normal(size=shape), jnp.float32), dtype) for _ in range(2))
    return MemoryPool(key if keeps_keys else None, value, dtype)


def tiled(sim: Sim) -> Sim:
    """The same simulation with its blocks in rows of whole tiles."""
    sim.cache = LayerCache(sim.cache.state, TiledPool.of(sim.cache.pool))
    return sim


def same(found: Pool, expected: MemoryPool):
    jax.tree.map(np.testing.assert_array_equal, found.apart(), expected)


def both(pool: MemoryPool) -> tuple[MemoryPool, TiledPool]:
    return pool, TiledPool.of(pool)


# The pool alone -----------------------------------------------------------------------------------

kinds = pytest.mark.parametrize(("dtype", "rows"), [
    ("float32", 1), ("float32", 4), ("bfloat16", 16), ("bfloat16", 24), ("bfloat16", 18), ("int8", 6), ("int8", 4),
    ("int4", 64), ("float16", 3),
])


@kinds
def test_keys_and_values_come_back(dtype, rows):
    pool = drawn(dtype, rows)
    found = TiledPool.of(pool)
    assert found.rows.shape[-1] % 128 == 0
    same(found, pool)


@kinds
def test_rows_and_blocks_are_those_of_the_other_pool(dtype, rows):
    pools, rng = both(drawn(dtype, rows)), np.random.default_rng(1)
    slot = jnp.asarray(rng.integers(0, BLOCKS + 1, (HEADS, 9)), jnp.int32)  # the last one stands for none
    row = jnp.asarray(rng.integers(0, rows, (HEADS, 9)), jnp.int32)
    for b in range(BATCH):
        expected, found = (jax.tree.map(quantize.all_of, pool.rows_at(jnp.int32(b), slot, row), is_leaf=_rows)
                           for pool in pools)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    block = jnp.asarray([[0, BLOCKS], [BLOCKS - 1, 2]], jnp.int32)
    all_slots = jnp.broadcast_to(jnp.arange(BLOCKS, dtype=jnp.int32), (BATCH, HEADS, BLOCKS))
    for taken in (lambda pool: pool.block(block), lambda pool: pool.everything(all_slots)):
        expected, found = map(taken, pools)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def _rows(x) -> bool:
    return isinstance(x, quantize.Packed | quantize.Scattered)


@kinds
def test_rows_and_blocks_are_written_in_their_place(dtype, rows):
    """And nothing where there is no block."""
    other, pools = drawn(dtype, rows), both(drawn(dtype, rows))
    block = jnp.asarray([[1, BLOCKS], [BLOCKS - 1, 0]], jnp.int32)
    row = jnp.asarray([[rows - 1, 0], [0, rows // 2]], jnp.int32)
    key, value = other.key[:, :, 0, 0], other.value[:, :, 0, 0]
    expected, found = (pool.put_row(block, row, key, value, jnp.int32(0), REF) for pool in pools)
    same(found, expected)
    several = jnp.stack([block, jnp.full_like(block, BLOCKS), block + jnp.asarray([[1, 0], [-1, 1]])], axis=-1)
    key, value = other.key[:, :, :3], other.value[:, :, :3]
    expected, found = (pool.put_blocks(several, key, value, jnp.int32(0), REF) for pool in (expected, found))
    same(found, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", *quantize.BITS])
def test_single_rows_are_written_as_rows_of_larger_blocks(dtype):
    """The first of all, the last, and none, as no block or no row; the others stay as they are."""
    rng, blocks = np.random.default_rng(3), 64
    drawn = jnp.asarray(rng.normal(size=(4, BATCH, HEADS, blocks, 1, SIZE)), jnp.float32)
    packed = [quantize.pack(x, dtype) for x in drawn]
    made = MemoryPool(*packed[:2], dtype), MemoryPool(*packed[2:], dtype)
    pools, other = both(made[0]), made[1]
    assert pools[1]._single
    block = jnp.asarray([[0, blocks], [blocks - 1, 33]], jnp.int32)
    key, value = other.key[:, :, 0, 0], other.value[:, :, 0, 0]
    row = jnp.asarray([[0, 0], [0, 1]], jnp.int32)
    expected, found = (pool.put_row(block, row, key, value, jnp.int32(0), REF) for pool in pools)
    same(found, expected)


def test_values_alone():
    pools = both(drawn("float32", 4, keeps_keys=False))
    block = jnp.zeros((BATCH, HEADS), jnp.int32)
    value = drawn("float32", 4).key[:, :, 0, 0]
    expected, found = (pool.put_row(block, block, None, value, jnp.int32(0), REF) for pool in pools)
    same(found, expected)
    assert found.lying(block[..., None]) is None


def test_more_rows_than_are_written_at_once():
    """One row in each of 80 heads."""
    pool = MemoryPool(*(jnp.zeros((40, HEADS, 2, 8, SIZE), jnp.uint16) for _ in range(2)), "bfloat16")
    rng = np.random.default_rng(2)
    key, value = (jnp.asarray(rng.integers(0, 2**16, (40, HEADS, SIZE)), jnp.uint16) for _ in range(2))
    block, row = (jnp.asarray(rng.integers(0, most, (40, HEADS)), jnp.int32) for most in (3, 8))
    expected, found = (pool.put_row(block, row, key, value, jnp.int32(0), REF) for pool in both(pool))
    same(found, expected)


# Decoding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", either("full", "dynakv", "dynsplit", "h2o", "rle",
                                        slow=("quest", "kvswap", "magicpig", "shadowkv")))
def test_methods_decode_as_with_the_other_pool(name):
    """Attention by the kernel, and gathered rows where a method weighs, observes or rebuilds single rows."""
    stream, method = Stream.draw(1), METHODS[name]
    sims = Sim(method, stream, [50, 20]), tiled(Sim(method, stream, [50, 20]))
    for _ in range(12):
        (expected, told), (found, report) = (sim.step() for sim in sims)
        np.testing.assert_allclose(found, expected, atol=2e-5, rtol=0)
        np.testing.assert_array_equal(report.selected, told.selected)
        np.testing.assert_array_equal(report.attended, told.attended)
    harness.check_every_token_has_one_place(sims[1])


@pytest.mark.parametrize("name", either(
    "dynakv_merge", "icecache", "kvswap", "pqcache",
    slow=("quest", "dynakv", "dynsplit", "infinigen", "arkvale", "shadowkv", "magicpig", "sentencekv", "h2o")))
def test_indexes_and_tables_are_kept_as_on_other_platforms(name, monkeypatch):
    """With every kernel that a TPU has, interpreted: blocks of these small methods are more than they need, by numbers
    that differ so that neither simulation takes programs of the other."""
    stream, sims = Stream.draw(2), []
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(tiles, "wanted", lambda platform=platform: platform == "tpu")
        more = {} if METHODS[name].attends_all else {"max_blocks": 1000 + len(platform + name) + (platform == "tpu")}
        sims.append(Sim(dataclasses.replace(METHODS[name], **more), stream, [50, 20]))
        sims[-1].seen = [sims[-1].step() for _ in range(12)]
    assert isinstance(sims[1].cache.pool, TiledPool)
    for (expected, told), (found, report) in zip(*(sim.seen for sim in sims), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5, rtol=0)
        np.testing.assert_array_equal(report.selected, told.selected)
    for found, expected in zip(*(jax.tree.leaves(sim.cache.state) for sim in sims[::-1]), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    harness.check_every_token_has_one_place(sims[1])


@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 2e-5), ("int8", 2e-4), ("int4", 2e-4)])
def test_stored_types_decode_as_with_the_other_pool(dtype, atol):
    stream, method = Stream.draw(1), METHODS["quest"]
    made = [Sim(method, stream, [50, 3], dtype=dtype) for _ in range(2)]
    np.testing.assert_allclose(tiled(made[1]).run(8), made[0].run(8), atol=atol, rtol=0)


@pytest.mark.parametrize("name", ["quest", "dynakv"])
def test_a_budget_that_covers_everything_gives_full_attention(name):
    stream, method = Stream.draw(0), METHODS[name]
    sim = tiled(Sim(dataclasses.replace(method, budget=CAPACITY, max_blocks=10_000), stream, [40, 3]))
    for _ in range(6):
        at = sim.at.copy()
        out, _ = sim.step()
        for b in range(2):
            np.testing.assert_allclose(out[b], harness.dense_attention(stream, b, at[b]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("method", [Full(page=4), Quest(budget=24, sinks=2, window=4, page=4)], ids=["full", "quest"])
def test_a_sliding_window_that_cuts_blocks_and_a_soft_cap(method):
    """The layer's own window is 18 tokens, and ends inside a block of 4."""
    stream = Stream.draw(3)
    cache = init_cache(method, batch=2, kv_heads=harness.HEADS, group=harness.GROUP, head_dim=harness.SIZE,
                       capacity=CAPACITY, soft_cap=2.0, sliding=18)
    k, v, q = (jnp.asarray(x[:, :45]) for x in (stream.k, stream.v, stream.q))
    cache = prefill_cache(cache, k, v, np.asarray([45, 30], np.int32), q)
    caches = [cache, dataclasses.replace(
        cache, layer=LayerCache(cache.layer.state, TiledPool.of(cache.layer.pool)))]
    for step in range(6):
        b, at = np.arange(2), np.asarray([45, 30]) + step
        newest = [jnp.asarray(x[b, at]) for x in (stream.q, stream.k, stream.v)]
        out, caches = zip(*(attend(one, *newest) for one in caches), strict=True)
        np.testing.assert_allclose(out[1], out[0], atol=2e-5, rtol=0)


# Saving -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_saved_in_one_layout_and_restored_in_the_other(tmp_path, monkeypatch, dtype):
    """Both ways; the file is the same to the byte."""
    rng, plan = np.random.default_rng(0), make_plan(tiny.CONFIG, METHODS["quest"], 2, CAPACITY, dtype)
    layers = [tiny.drawn(outline(plan, i, False, Slots()), rng) for i in range(len(plan.layers))]
    length, logits = jnp.zeros(2, jnp.int32), jnp.zeros((2, tiny.CONFIG.vocab_size), jnp.float32)
    checksums = set()
    for name, form in (("apart", lambda pool: pool), ("tiled", TiledPool.of)):
        state = State(tuple(LayerCache(layer.state, form(layer.pool)) for layer in layers), length, REF)
        checksums.add(state_file.save(tmp_path / name, state, logits))
    assert (tmp_path / "apart").read_bytes() == (tmp_path / "tiled").read_bytes()
    for name, kind in (("apart", TiledPool), ("tiled", MemoryPool)):
        monkeypatch.setattr(tiles, "wanted", lambda kind=kind: kind is TiledPool)
        restored, _ = state_file.load(tmp_path / name, *checksums, plan, Slots(), None)
        for layer, written in zip(restored.layers, layers, strict=True):
            assert isinstance(layer.pool, kind)
            same(layer.pool, written.pool)
