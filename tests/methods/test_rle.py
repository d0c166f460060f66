"""Full attention over runs of equal keys: what is stored, when it grows, and when the codec turns itself off."""

import dataclasses
import logging

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import HEADS, Sim, Stream
from tiny import CONFIG, make_params

import kvjax
from kvjax.errors import ConfigError, PromptError
from kvjax.methods import RLE, Full
from kvjax.models.config import RopeConfig
from kvjax.ops import attention, rotary
from kvjax.ops.runs import decode

METHOD = RLE(page=4, slots=40)
SAME = [5] * 200  # a text of one token: every layer's keys are alike before rotation, and differ after it
TOLERANT = {"before_rotation": True, "tolerance": 1e-4}


def in_threes(seed: int) -> Stream:
    """A stream in which each key comes three times in a row."""
    stream = Stream.draw(seed)
    return dataclasses.replace(stream, k=np.repeat(stream.k[:, ::3], 3, axis=1))


@pytest.fixture(scope="module")
def llm():
    return kvjax.LLM(CONFIG, make_params())


def test_runs_are_stored_once_and_every_token_is_attended():
    stream = in_threes(0)
    sim = Sim(METHOD, stream, [60, 31])
    for _ in range(30):
        at = sim.at.copy()
        out, _ = sim.step()
        for b in range(2):
            np.testing.assert_allclose(out[b], harness.dense_attention(stream, b, at[b]), atol=2e-5, rtol=0)
    runs = sim.state().index.runs
    stored = sim.at - sim.plan.spec.ring
    np.testing.assert_array_equal(runs.tokens, np.repeat(stored[:, None], HEADS, axis=1))
    np.testing.assert_array_equal(runs.runs, np.repeat(-(-stored[:, None] // 3), HEADS, axis=1))
    assert not runs.refused.any()


def test_decoded_tokens_make_the_runs_of_a_prompt():
    stream = in_threes(1)
    decoded, prompt = Sim(METHOD, stream, [40, 1]), Sim(METHOD, stream, [65, 26])
    decoded.run(25)
    for one, other in zip(*(jax.tree.leaves(sim.state().index) for sim in (decoded, prompt)), strict=True):
        np.testing.assert_array_equal(one, other)


def attended(method, q, key, value, prompt: int, rope=None) -> np.ndarray:
    """What the tokens after a prompt attend to, `[N, H, D]`."""
    cache = kvjax.init_cache(method, batch=1, kv_heads=2, group=2, head_dim=64, capacity=key.shape[1], rope=rope)
    cache, out = kvjax.prefill_cache(cache, key[:, :prompt], value[:, :prompt], jnp.asarray([prompt])), []
    for at in range(prompt, key.shape[1]):
        one, cache = kvjax.attend(cache, q[:, at], key[:, at], value[:, at])
        out.append(one[0])
    return np.stack(out)


def heads(run: int):
    """Queries, keys in runs, and values, `[1, T, heads, D]`, of heads as models have them."""
    rng = np.random.default_rng(0)
    key = np.repeat(rng.normal(size=(1, 260 // run, 2, 64)), run, axis=1)
    q, value = rng.normal(size=(1, 260, 4, 64)), rng.normal(size=key.shape)
    return tuple(jnp.asarray(array, jnp.float32) for array in (q, key, value))


@pytest.fixture
def gathered(monkeypatch):
    """Full attention sums in the same order as where the method has the scores: not by the kernel that makes them."""
    monkeypatch.setattr(attention, "reads_in_place", lambda dtype, cap=None: False)


def test_without_a_tolerance_no_bit_differs_from_full_attention(gathered):
    q, key, value = heads(4)
    expected = attended(Full(page=4), q, key, value, 248)
    np.testing.assert_array_equal(attended(RLE(page=4, slots=70), q, key, value, 248), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_no_bit_differs_and_runs_are_those_of_a_prompt(dtype, gathered):
    """Given float32 keys that are alike in 16 bits only."""
    q, key, value = heads(4)
    noise = jnp.asarray(np.random.default_rng(1).normal(size=key.shape), jnp.float32)
    key = key.astype(dtype).astype(jnp.float32) * (1 + 1e-5 * noise)
    made = {
        method: kvjax.init_cache(method, batch=1, kv_heads=2, group=2, head_dim=64, capacity=260, dtype=dtype)
        for method in (RLE(page=4), Full(page=4))
    }
    runs = []
    for prompt in (40, 248):
        caches = [kvjax.prefill_cache(one, key[:, :prompt], value[:, :prompt], jnp.asarray([prompt]))
                  for one in made.values()]
        for at in range(prompt, 260):
            (one, other), caches = zip(
                *(kvjax.attend(cache, q[:, at], key[:, at], value[:, at]) for cache in caches), strict=True)
            np.testing.assert_array_equal(one, other)
        runs.append(caches[0].layer.state.index.runs)
    assert runs[0].key.dtype == dtype and int(runs[0].runs.max()) < 130
    for one, other in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_array_equal(one, other)


def test_keys_before_rotation_are_attended_as_rotated_ones():
    """From a third as many slots, as equal contents are equal keys before rotation only."""
    q, key, value = heads(4)
    model, at = RopeConfig(), jnp.arange(key.shape[1], dtype=jnp.int32)
    rotated = rotary.rotate(key, at[None], rotary.inverse_frequencies(64, model))
    method = RLE(page=4, slots=90, before_rotation=True, tolerance=1e-4, sinks=2, window=6)
    found = attended(method, q, rotated, value, 248, model)
    np.testing.assert_allclose(found, attended(Full(page=4), q, rotated, value, 248), atol=2e-4, rtol=0)
    after = dataclasses.replace(method, before_rotation=False)
    assert np.isnan(attended(after, q, rotated, value, 248)).all()  # so few slots are not enough


@pytest.mark.parametrize("before", [False, True])
def test_keys_in_8_bits_are_runs_of_codes(before):
    """Noise of less than half a step does not end a run."""
    q, key, value = heads(4)
    key += 1e-3 * jnp.asarray(np.random.default_rng(1).normal(size=key.shape), jnp.float32)
    model, at = RopeConfig(), jnp.arange(key.shape[1], dtype=jnp.int32)
    rotated = rotary.rotate(key, at[None], rotary.inverse_frequencies(64, model)) if before else key
    method = RLE(page=4, int8=True, before_rotation=before, tolerance=1.0)
    cache = kvjax.init_cache(method, batch=1, kv_heads=2, group=2, head_dim=64, capacity=260, rope=model)
    runs = kvjax.prefill_cache(cache, rotated, value, jnp.asarray([260])).layer.state.index.runs
    assert runs.key.dtype == jnp.int8 and (np.asarray(runs.runs) == 65).all()
    expected = attended(Full(page=4), q, rotated, value, 248)
    np.testing.assert_allclose(attended(method, q, rotated, value, 248, model), expected, atol=0.1)


@pytest.mark.parametrize("before", [False, True])
def test_keys_in_8_bits_with_a_bias_are_attended_as_without(before):
    """The bias is 605 long, and takes none of the codes."""
    q, key, value = heads(4)
    bias = np.random.default_rng(2).normal(size=(2, 64))
    model, at = RopeConfig(), jnp.arange(key.shape[1], dtype=jnp.int32)

    def off(bias):
        moved = key + jnp.asarray(bias, jnp.float32)
        moved = rotary.rotate(moved, at[None], rotary.inverse_frequencies(64, model)) if before else moved
        coded = attended(RLE(page=4, int8=True, before_rotation=before), q, moved, value, 248, model)
        expected = attended(Full(page=4), q, moved, value, 248)
        return np.linalg.norm(coded - expected) / np.linalg.norm(expected)

    assert off(605 * bias / np.linalg.norm(bias, axis=-1, keepdims=True)) < 1.1 * off(0 * bias) < 0.015


def test_with_a_tolerance_keys_are_off_by_no_more():
    _, key, value = heads(10)
    drift = key + 0.004 * (jnp.arange(260) % 10)[:, None, None]
    cache = kvjax.init_cache(RLE(page=4, tolerance=0.01), batch=1, kv_heads=2, group=2, head_dim=64, capacity=260)
    runs = kvjax.prefill_cache(cache, drift, value, jnp.asarray([260])).layer.state.index.runs
    back = jax.vmap(jax.vmap(decode))(runs)[0, :, :259].swapaxes(0, 1)
    assert 0.007 < float(jnp.abs(back - drift[0, :259]).max()) <= 0.01 and int(runs.runs[0, 0]) < 130


def logits_of(llm, method, context, more, **prefill):
    """Logits after each of some more tokens, and the cache."""
    cache, seen = llm.prefill(context, method=method, capacity=len(context) + len(more) + 1, **prefill), []
    result = llm.generate(more, cache, max_new_tokens=1, observer=lambda step, _: seen.append(np.asarray(step.logits)))
    assert result.usage.steps == len(more)
    return np.concatenate(seen), cache


@pytest.mark.parametrize("sinks", [0, 3])
def test_equal_tokens_are_one_run_before_rotation(llm, sinks):
    """And what follows them is attended at its true position."""
    more = list(range(10, 26))
    expected, full = logits_of(llm, Full(), SAME, more)
    got, cache = logits_of(llm, RLE(**TOLERANT, sinks=sinks, window=5), SAME, more)
    np.testing.assert_allclose(got, expected, atol=2e-3)
    layers = [one.state.index.runs for one in cache.state.layers]
    assert all((np.asarray(runs.runs) == 1).all() for runs in layers)
    assert cache.resident_bytes < 0.7 * full.resident_bytes
    assert cache.plan.layers[0].method.slots == 1 + 217 - 200  # the run, and whatever may follow


def test_where_runs_do_not_pay_the_codec_turns_itself_off(llm, caplog):
    context, more = np.random.default_rng(0).integers(0, 64, 90).tolist(), [1, 2, 3]
    with caplog.at_level(logging.WARNING):
        got, cache = logits_of(llm, RLE(page=2), context, more)
    assert isinstance(cache.plan.layers[0].method, Full) and "using `full` instead" in caplog.text
    np.testing.assert_array_equal(got, logits_of(llm, Full(page=2), context, more)[0])


@pytest.mark.parametrize("capacity", [113, 128])
def test_rows_that_no_token_can_fill_do_not_speak_for_runs(llm, capacity):
    """Without runs the codec is off, however far blocks are padded."""
    context = np.random.default_rng(0).integers(0, 64, 90).tolist()
    assert isinstance(llm.prefill(context, method=RLE(page=64), capacity=capacity).plan.layers[0].method, Full)


def test_in_8_bits_short_prompts_are_refused(llm):
    with pytest.raises(PromptError, match="needs 65 tokens of it where there are 60"):
        llm.prefill(SAME[:60], method=RLE(int8=True), capacity=230)
    with pytest.raises(PromptError, match="there are 50"):
        llm.prefill(SAME, method=RLE(int8=True), capacity=230, chunk=50)
    llm.prefill(SAME[:70], method=RLE(int8=True), capacity=230)


def test_it_does_not_pay_against_keys_of_few_bits(llm):
    """Here a key takes 12 bytes, a token's number of its run 2, and a run 34."""
    context = SAME[:110]
    assert isinstance(logits_of(llm, RLE(**TOLERANT), context, [1] * 60)[1].plan.layers[0].method, RLE)
    assert isinstance(logits_of(llm, RLE(**TOLERANT), context, [1] * 60, dtype="int8")[1].plan.layers[0].method, Full)


def test_a_saved_cache_answers_as_before(llm, tmp_path):
    cache = llm.prefill(SAME, method=RLE(**TOLERANT), capacity=230)
    cache.save(tmp_path)
    answers = [llm.generate([7, 8, 9], one, max_new_tokens=8).tokens for one in (cache, llm.restore(tmp_path))]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("method", [RLE(sinks=20, page=2), RLE(dense_layers=CONFIG.num_layers, page=2)])
def test_a_prompt_without_a_key_to_encode_is_read(llm, method):
    """It is all sinks, or all layers are dense."""
    cache = llm.prefill([3, 1, 2], method=method, capacity=30)
    expected = llm.generate([5], llm.prefill([3, 1, 2], capacity=30), max_new_tokens=6).tokens
    assert llm.generate([5], cache, max_new_tokens=6).tokens == expected


def test_of_prompts_in_chunks_nothing_is_known_yet(llm):
    cache = llm.prefill(SAME, method=RLE(**TOLERANT, page=2), capacity=230, chunk=50)
    assert isinstance(cache.plan.layers[0].method, Full)
    with pytest.raises(ConfigError, match="slots=50 of rle cannot hold"):
        llm.prefill(SAME, method=RLE(**TOLERANT, slots=50), capacity=230, chunk=50)


def test_too_few_slots_and_bad_settings_are_refused(llm):
    with pytest.raises(ConfigError, match="slots=3 of rle cannot hold"):
        llm.prefill(SAME, method=RLE(**TOLERANT, slots=3), capacity=230)
    for bad in ({"tolerance": -1.0}, {"relative": -0.1}, {"slots": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(bad))}="):
            RLE(**bad)
    with pytest.raises(ConfigError, match="budget=64"):
        llm.prefill(SAME, method=RLE(budget=64))
    with pytest.raises(ConfigError, match="before_rotation"):
        Sim(RLE(page=4, before_rotation=True), Stream.draw(0), [20, 10])
