"""Keys that a bias makes large, in few bits: what is kept of them is what tells them apart."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import METHODS, Sim, Stream, either, plan_of
from tiny import CONFIG, make_params

import kvjax
from kvjax.cache.fill import empty_state
from kvjax.cache.smoothing import learn_smoothing
from kvjax.models.config import RopeConfig
from kvjax.ops import attention, quantize, rotary
from kvjax.ops.quantize import Packed, Smoothing, pack_keys

quantised = pytest.mark.parametrize("dtype", quantize.BITS)
TOKENS, SIZE, NORM = 1024, 64, 605.0  # the norm is that of the first layer of a Qwen2.5
ALLOWED = {"int8": 0.01, "int4": 0.15}  # error of scores over their deviation
ROPE = RopeConfig(theta=1e6)
learn = jax.jit(learn_smoothing, static_argnums=0)


def spec_of(model=None, capacity=8192):
    sizes = {"kv_heads": 1, "group": 4, "head_dim": SIZE, "capacity": capacity}
    return dataclasses.replace(kvjax.Full().spec(**sizes), rope=model)


def drawn(seed=0, tokens=TOKENS):
    """Queries `[1, 4, D]`, keys `[1, N, D]`, and a bias for them."""
    rng = np.random.default_rng(seed)
    q, key = (rng.normal(size=(1, count, SIZE)).astype(np.float32) for count in (4, tokens))
    bias = rng.normal(size=SIZE)
    return q, key, (NORM * bias / np.linalg.norm(bias)).astype(np.float32)


def error(q, key, kept: Packed) -> float:
    """How far scores of keys as they are kept are off, up to what softmax does not see, over the deviation of those of
    keys without a bias."""
    exact = np.einsum("kgd,knd->kgn", q.astype(np.float64), key.astype(np.float64))
    off = np.asarray(jax.jit(attention.products)((kept, jnp.asarray(q)))) - exact
    return float((off - off.mean(-1, keepdims=True)).std() / np.sqrt(np.square(q).sum(-1)).mean())


def kept_by(smoothing: Smoothing | None, key, dtype) -> Packed:
    return Packed(pack_keys(jnp.asarray(key), smoothing, dtype), dtype, smoothing)


@quantised
def test_scores_of_keys_with_a_bias_are_as_good_as_without(dtype):
    q, key, bias = drawn()
    smoothing = learn(spec_of(), key + bias, np.arange(TOKENS, dtype=np.int32), np.ones(TOKENS, bool))
    without = error(q, key, kept_by(None, key, dtype))
    assert error(q, key + bias, kept_by(smoothing, key + bias, dtype)) < min(1.1 * without, ALLOWED[dtype])
    assert error(q, key + bias, kept_by(None, key + bias, dtype)) > 10 * without


@quantised
@pytest.mark.parametrize("seen", [3, 64])
def test_a_short_prompt_tells_where_a_rotated_bias_will_be(dtype, seen):
    """A pair of dimensions that has hardly begun to turn in the prompt is on the other side later."""
    q, key, bias = drawn(1, 8192)
    fast = np.arange(SIZE) % (SIZE // 2) < 28  # most of it is where pairs turn slowly, as in models
    bias[fast] *= 0.05
    pos = np.arange(8192, dtype=np.int32)
    key = np.asarray(rotary.rotate(jnp.asarray(key + bias).swapaxes(0, 1), pos, rotary.inverse_frequencies(SIZE, ROPE)))
    key = key.swapaxes(0, 1)
    found, plain = (
        error(q, key, kept_by(learn(spec_of(model), key[:, :seen], pos[:seen], np.ones(seen, bool)), key, dtype))
        for model in (ROPE, None)
    )
    assert found < 0.7 * plain and found < 0.15 * error(q, key, kept_by(None, key, dtype))


def test_few_and_equal_tokens_leave_room_for_others():
    """Zeros too: what comes later is neither clipped nor infinite."""
    q, key, bias = drawn(2)
    pos = np.arange(8, dtype=np.int32)
    for first in (np.tile(bias, (1, 8, 1)), np.tile(key[:, :1] + bias, (1, 8, 1)), np.zeros((1, 8, SIZE), np.float32)):
        smoothing = learn(spec_of(), first, pos, np.ones(8, bool))
        offset = first[0, 0]
        assert error(q, key + offset, kept_by(smoothing, key + offset, "int8")) < 0.05
    nothing = learn(spec_of(), key[:, :8], pos, pos < 1)
    np.testing.assert_array_equal(nothing.scale, 0)


@quantised
def test_a_small_key_among_large_ones_is_kept_as_it_is(dtype):
    """Gives one token such a key, as one has that takes most of the attention."""
    q, key, bias = drawn(3)
    key = key + bias / 20
    key[:, 0] *= 0.05
    smoothing = learn(spec_of(), key, np.arange(TOKENS, dtype=np.int32), np.arange(TOKENS) > 0)
    kept = kept_by(smoothing, key, dtype)
    np.testing.assert_array_equal(kept.shifted[0], np.arange(TOKENS) > 0)
    off, alone = (np.abs(np.asarray(one.unpacked()) - key)[:, 0].max() for one in (kept, kept_by(None, key, dtype)))
    assert 0 < off < 2 * alone
    exact = attention.products((kept.unpacked(), jnp.asarray(q)))
    np.testing.assert_allclose(attention.products((kept, jnp.asarray(q))), exact, rtol=1e-4, atol=1e-3)


def biased(stream: Stream) -> Stream:
    """The stream with keys of a large bias, another one for each head."""
    bias = np.random.default_rng(9).normal(size=stream.k.shape[2:])
    bias *= NORM / np.linalg.norm(bias, axis=-1, keepdims=True)
    return dataclasses.replace(stream, k=(stream.k + bias).astype(np.float32))


@pytest.mark.parametrize("prompt", [[40, 25], [3, 1]], ids=["prompt", "from_scratch"])
@pytest.mark.parametrize(("name", "dtype"), either(
    ("full", "int8"), ("full", "int4"), ("quest", "int8"), ("dynakv_merge", "int4"), slow=(("dynakv", "int8"),),
))
def test_flash_and_memory_give_equal_bits_and_what_they_give_without_a_bias(name, dtype, prompt, tmp_path):
    stream = biased(Stream.draw(6))
    in_memory = Sim(METHODS[name], stream, prompt, dtype=dtype)
    kept = in_memory.run(30)
    store = kvjax.FlashStore(directory=tmp_path, staging_bytes=0)
    np.testing.assert_array_equal(kept, Sim(METHODS[name], stream, prompt, store=store, dtype=dtype).run(30))
    if name == "full":
        floats = Sim(METHODS["full"], stream, prompt).run(30)
        assert 0 < np.linalg.norm(kept - floats) / np.linalg.norm(floats) < (0.01 if dtype == "int8" else 0.15)


def test_floats_and_values_alone_are_not_smoothed():
    for name, dtype in (("full", "float32"), ("full", "bfloat16"), ("icecache", "int8"), ("rle", "int4")):
        assert empty_state(plan_of(METHODS[name]), 2, dtype).smoothing is None
    assert empty_state(plan_of(METHODS["full"]), 2, "int8").smoothing is not None


@pytest.fixture(scope="module")
def llm():
    """Keys of a bias that is some 40 times as large as what tells them apart, where pairs turn slowly."""
    config = dataclasses.replace(CONFIG, qkv_bias=True, rope=ROPE)
    params = make_params(config)
    for one in ("layers_0", "layers_1"):
        linear = params[one]["k_proj"]
        slow = np.arange(len(linear["bias"])) % 4 >= 2
        linear["bias"] = jnp.where(slow, 100.0, 1.0) * jax.random.normal(jax.random.key(5), linear["bias"].shape)
    return kvjax.LLM(config, params)


@pytest.mark.parametrize("chunk", [None, 16])
def test_a_model_with_biases_scores_as_with_floats(llm, chunk, tmp_path):
    """Read at once or in chunks, and after it was saved."""
    tokens = np.random.default_rng(0).integers(0, 64, 110).tolist()
    likely, caches = {}, {}
    for dtype in ("float32", "int8"):
        caches[dtype] = llm.prefill(tokens[:60], method=kvjax.Full(page=4), dtype=dtype, capacity=112, chunk=chunk)
        likely[dtype] = np.asarray(llm.score(tokens[60:], caches[dtype]).logprobs)
    assert np.abs(likely["int8"] - likely["float32"]).mean() < 0.15  # 0.06 without a bias, 1.3 if that were packed
    caches["int8"].save(tmp_path)
    again = llm.score(tokens[60:], llm.restore(tmp_path)).logprobs
    np.testing.assert_array_equal(again, likely["int8"])


@quantised
def test_a_bias_where_nothing_rotates_stays_where_it_is(dtype):
    """With partial rotation, of which a half of the bias knows nothing."""
    rope, (q, key, bias) = RopeConfig(theta=1e6, partial=0.5), drawn(4)
    bias[:28] = bias[32:60] = 0  # pairs of 16 would turn them fast; those after 32 do not rotate
    pos = np.arange(TOKENS, dtype=np.int32)
    turned = rotary.rotate(jnp.asarray(key + bias).swapaxes(0, 1), pos, rotary.inverse_frequencies(SIZE, rope))
    key = np.asarray(turned.swapaxes(0, 1))
    smoothing = learn(spec_of(rope), key[:, :64], pos[:64], np.ones(64, bool))
    np.testing.assert_allclose(smoothing.shift[0, 60:], bias[60:], atol=0.5)
    assert (np.asarray(smoothing.scale[0, 60:]) < 2).all()
    assert error(q, key, kept_by(smoothing, key, dtype)) < 0.3 * error(q, key, kept_by(None, key, dtype))
