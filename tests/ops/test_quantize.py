"""Keys and values in 8 and 4 bits: the codes against NumPy, and the same cache whatever keeps them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import METHODS, Sim, Stream, check_runs_stored_once, either
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tiny import CONFIG, make_params

import kvjax
from kvjax.cache.pool import MemoryPool
from kvjax.errors import ConfigError
from kvjax.ops import quantize

pack, unpack = jax.jit(quantize.pack, static_argnums=1), jax.jit(quantize.unpack, static_argnums=1)
quantised = pytest.mark.parametrize("dtype", quantize.BITS)
VECTORS = arrays.arrays(np.float32, (3, 8), elements=st.floats(-1e4, 1e4, width=32))


@pytest.fixture(scope="module")
def llm():
    return kvjax.LLM(CONFIG, make_params())


def expected(x: np.ndarray, bits: int) -> np.ndarray:
    """Returns what is left of x[N, D], in NumPy."""
    low = x.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
    step = ((x.max(-1, keepdims=True) - low) / np.float32(2**bits - 1)).astype(np.float16).astype(np.float32)
    code = np.clip(np.round((x - low) / np.where(step > 0, step, np.inf)), 0, 2**bits - 1)
    return low + step * code


@quantised
def test_codes_are_those_of_numpy_and_take_the_bytes_they_say(dtype):
    x = np.random.default_rng(0).normal(size=(50, 2, 64)).astype(np.float32) * 3
    kept = pack(jnp.asarray(x), dtype)
    bits = quantize.BITS[dtype]
    assert kept.dtype == np.int8 and kept.shape == (50, 2, quantize.width(dtype, 64)) == (50, 2, 8 * bits + 4)
    off = np.abs(np.asarray(unpack(kept, dtype)) - expected(x, bits))
    # Where XLA's quotient lies just on the other side of a rounding of f16, a vector has the next step.
    assert np.mean(off < 1e-5) > 0.98 and off.max() <= 1.01 * np.ptp(x, axis=-1).max() / (2**bits - 1)


@quantised
@settings(max_examples=60)
@given(VECTORS)
@example(np.tile(np.float32([6207.0] + [5698.0] * 7), (3, 1)))
def test_a_number_is_off_by_half_a_step_and_packing_again_changes_no_byte(dtype, x):
    kept = pack(jnp.asarray(x), dtype)
    again = np.asarray(unpack(kept, dtype))
    low, spread = np.abs(x).max(-1, keepdims=True), np.ptp(x, axis=-1, keepdims=True)
    f16 = 2.0**-11
    allowed = 0.5 * spread / (2 ** quantize.BITS[dtype] - 1) + 2 * f16 * (low + spread) + 2.0**-24 * 256
    assert (np.abs(again - x) <= allowed).all()
    np.testing.assert_array_equal(unpack(pack(jnp.asarray(again), dtype), dtype), again)


@quantised
def test_packing_again_changes_no_byte_whatever_the_spread(dtype):
    """Also where all numbers are alike but for what f16 can hardly tell: their steps are few of its smallest."""
    rng, again = np.random.default_rng(0), jax.jit(lambda x: unpack(pack(x, dtype), dtype))
    for size in (1e-4, 1e-2, 1.0, 50.0, 1e4):
        for spread in (1e-5, 1e-3, 1e-1):
            x = size * (rng.normal(size=(2000, 1)) + spread * rng.normal(size=(2000, 8)))
            once = again(jnp.asarray(x.clip(-6e4, 6e4), jnp.float32))
            np.testing.assert_array_equal(again(once), once)


@quantised
def test_equal_numbers_zeros_and_what_f16_cannot_hold(dtype):
    x = jnp.asarray([[0.0] * 8, [3.5] * 8, [1e6] + [0.0] * 7, [1e-9] * 4 + [-1e-9] * 4])
    back = np.asarray(unpack(pack(x, dtype), dtype))
    np.testing.assert_array_equal(back[:2], x[:2])
    np.testing.assert_allclose(back[2], [65504] + [0] * 7, rtol=1e-3)
    np.testing.assert_allclose(back[3], 0, atol=1e-7)


@pytest.mark.parametrize("dtype", [*quantize.FLOATS, *quantize.BITS])
def test_writing_a_row_makes_no_copy_of_the_blocks(dtype):
    kept = jnp.zeros((1, 2, 64, 16, quantize.width(dtype, 8)), quantize.array_type(dtype))
    place, row = jnp.ones((1, 2), jnp.int32), pack(jnp.full((1, 2, 8), 3.0), dtype)

    def put(key, value):
        return jax.tree.leaves(MemoryPool(key, value, dtype).put_row(place, place, row, row, 0, None))

    program = jax.jit(put, donate_argnums=(0, 1)).lower(kept, kept).compile()
    assert program.memory_analysis().temp_size_in_bytes < kept.nbytes / 4
    key, _ = MemoryPool(*program(kept, kept + 0), dtype).block(place)
    np.testing.assert_array_equal(np.asarray(key.unpacked()[0, :, 1], np.float32), 3)


@pytest.mark.parametrize(("name", "dtype"), either(
    *((name, "int8") for name in ("full", "quest", "kvswap")), ("full", "int4"), ("dynakv_merge", "int4"),
    slow=(("dynakv", "int8"),),
))
def test_flash_and_memory_give_equal_bits_near_those_of_floats(name, dtype, tmp_path):
    stream = Stream.draw(6)
    floats = Sim(METHODS["full"], stream, [40, 25]).run(30)
    in_memory = Sim(METHODS[name], stream, [40, 25], dtype=dtype)
    kept = in_memory.run(30)
    store = kvjax.FlashStore(directory=tmp_path, staging_bytes=0)
    np.testing.assert_array_equal(kept, Sim(METHODS[name], stream, [40, 25], store=store, dtype=dtype).run(30))
    assert in_memory.cache.pool.key.dtype == np.int8 and in_memory.cache.state.tail.key.dtype == np.float32
    if name == "full":
        error = np.linalg.norm(kept - floats) / np.linalg.norm(floats)
        assert 0 < error < (0.01 if dtype == "int8" else 0.15)


@pytest.mark.parametrize("name", ["quest", "dynakv"])
def test_blocks_with_runs_stored_once_give_equal_bits(name, small_pages, tmp_path):
    check_runs_stored_once(METHODS[name], tmp_path, "int8")


@quantised
def test_a_model_decodes_saves_and_restores(llm, dtype, tmp_path):
    prompt = list(range(1, 40))
    method = METHODS["quest"]  # what splits do to packed rows is compared above
    store = kvjax.FlashStore(directory=tmp_path / "run")
    caches = [llm.prefill(prompt, method=method, store=one, dtype=dtype, capacity=80) for one in (None, store)]
    answers = [llm.generate([5, 6], cache, max_new_tokens=6) for cache in caches]
    assert answers[0].tokens == answers[1].tokens
    np.testing.assert_array_equal(answers[0].cache.logits, answers[1].cache.logits)
    floats = llm.prefill(prompt, method=method, capacity=80)
    assert caches[0].resident_bytes < floats.resident_bytes
    answers[1].cache.save(tmp_path / "saved")
    restored = llm.restore(tmp_path / "saved")
    assert restored.plan.dtype == dtype
    after = [llm.generate([7], cache, max_new_tokens=3).cache.logits for cache in (answers[1].cache, restored)]
    np.testing.assert_array_equal(*after)


def test_a_host_tier_keeps_them_too(llm):
    prompt = list(range(1, 60))
    method, logits = METHODS["quest"], []
    for slots in (kvjax.Slots(), kvjax.Slots(host=14)):
        cache = llm.prefill(prompt, method=method, store=kvjax.HostStore(), dtype="int8", capacity=80, slots=slots)
        logits.append(llm.generate([5, 6], cache, max_new_tokens=8).cache.logits)
    np.testing.assert_array_equal(*logits)


def test_wrong_types_are_refused_before_anything_is_made(llm):
    with pytest.raises(ConfigError, match="cannot be kept as 'int5'"):
        llm.prefill([1, 2, 3], dtype="int5")
    with pytest.raises(ConfigError, match="two numbers into a byte"):
        kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, group=1, head_dim=7, capacity=8, dtype="int4")


def test_one_layer_api_takes_them():
    rng = np.random.default_rng(0)
    key, value = (jnp.asarray(rng.normal(size=(1, 20, 2, 8)), jnp.float32) for _ in range(2))
    outs = []
    for dtype in ("float32", "int8"):
        cache = kvjax.init_cache(
            kvjax.Full(page=4), batch=1, kv_heads=2, group=2, head_dim=8, capacity=32, dtype=dtype
        )
        cache = kvjax.prefill_cache(cache, key, value, jnp.asarray([20]))
        out, cache = jax.jit(kvjax.attend)(cache, jnp.ones((1, 4, 8)), key[:, 0], value[:, 0])
        outs.append(np.asarray(out))
    assert 0 < np.abs(outs[0] - outs[1]).max() < 0.05
