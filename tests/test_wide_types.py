"""Under `jax_enable_x64` nothing is of 64 bits, and nothing changes; the methods by themselves: `test_laws`."""

from concurrent.futures import ThreadPoolExecutor

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import METHODS
from tiny import CONFIG, make_params, make_tokens

import kvjax
from kvjax.calibration.collect_moments import key_moments
from kvjax.calibration.fit_adapters import svd
from kvjax.calibration.refine_adapters import refine
from kvjax.eval.metrics import Probe
from kvjax.inference import prefill
from kvjax.methods.dci import draw_levels
from kvjax.models.transformer import Transformer
from kvjax.ops import topk

PROMPTS, MORE = [list(range(40, 0, -1)), [7, 3] * 11], [[5, 6, 7], [8]]


@pytest.fixture(scope="module")
def llm():
    return kvjax.LLM(CONFIG, make_params())


def assert_alike(one, other):
    """Arrays of the same types with the same bits."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def answers(llm, cache):
    """Tokens that are drawn and that are likely, by either driver, and scores of given ones."""
    drawn = llm.generate(MORE, cache, max_new_tokens=6, sampling=kvjax.Sampling(0.8, top_k=20, top_p=0.9), seed=3)
    likely = llm.generate(MORE, cache, max_new_tokens=6, driver="fused")
    return drawn.tokens, likely.tokens, [row.tolist() for row in llm.score(MORE, cache).logprobs]


@pytest.mark.parametrize(("name", "on_flash"), [("quest", True), ("h2o", False)])
def test_a_cache_is_read_saved_and_restored_as_without_it(llm, tmp_path, name, on_flash):
    found = []
    for wide in (False, True):
        directory = tmp_path / str(wide)
        directory.mkdir()
        with jax.enable_x64(wide):
            store = kvjax.FlashStore(file=directory / "blocks.kv") if on_flash else None
            cache = llm.prefill(PROMPTS, method=METHODS[name], store=store, capacity=96, chunk=16 if on_flash else None)
            said = answers(llm, cache)
            cache.save(directory)
            found.append((jax.device_get((cache.state.layers, cache.state.length, cache.logits)), said))
            assert {leaf.dtype for leaf in jax.tree.leaves(cache.state.ref)} == {np.dtype(np.int32)}
            cache.close()
    assert_alike(*[state for state, _ in found])
    assert found[0][1] == found[1][1]
    for wide in (False, True):  # what was saved with it is restored without, and the other way round
        with jax.enable_x64(not wide):
            cache = llm.restore(tmp_path / str(wide))
            assert answers(llm, cache) == found[0][1]
            cache.close()


def test_a_selection_is_measured_as_without_it(llm):
    found = []
    for wide in (False, True):
        with jax.enable_x64(wide):
            reading = llm.read(PROMPTS)
            cache = llm.prefill(reading, method=METHODS["quest"], capacity=96)
            probe = Probe(cache, reading, k=4)
            llm.score(MORE, cache, observer=probe)
            found.append(probe.quality)
    assert found[0] == found[1]


def test_adapters_are_fitted_and_refined_as_without_it(llm):
    found = []
    for wide in (False, True):
        with jax.enable_x64(wide):
            fitted = svd(key_moments(llm, [make_tokens()]), 2)
            found.append((fitted.layers, refine(llm, fitted, [make_tokens()]).layers))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.float32)}
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)  # Adam's own powers are then of 64 bits


@pytest.mark.parametrize("name", ["quest", "h2o", "dynsplit", "infllm"])
def test_arrays_of_64_bits_enter_a_cache_in_32(name):
    """Of the model of a user who computes in these."""
    def decoded(kind, number):
        stream, out = harness.Stream.draw(0), []
        q, k, v = (jnp.asarray(x, kind) for x in (stream.q, stream.k, stream.v))
        token, length = jnp.asarray(stream.token, number), jnp.asarray([40, 23], number)
        sizes = {"kv_heads": harness.HEADS, "group": harness.GROUP, "head_dim": harness.SIZE}
        cache = kvjax.init_cache(METHODS[name], batch=2, capacity=harness.CAPACITY, **sizes)
        cache = kvjax.prefill_cache(cache, k[:, :40], v[:, :40], length, q[:, :40], token[:, :40])
        for at in range(40, 50):
            attended, cache = kvjax.attend(cache, q[:, at], k[:, at], v[:, at], token[:, at])
            assert attended.dtype == kind
            out.append(np.asarray(attended, np.float32))
        return jax.device_get(cache.layer), np.stack(out)

    with jax.enable_x64(True):
        assert_alike(decoded(jnp.float64, jnp.int64), decoded(jnp.float32, jnp.int32))


def test_both_branches_of_a_kernel_give_what_is_declared():
    """Of operands of 64 bits, too."""
    with jax.enable_x64(True):
        vectors, q = jnp.linspace(0, 1, 15).reshape(1, 3, 5), jnp.ones((1, 1, 3))
        assert vectors.dtype == q.dtype == jnp.float64
        found = jax.jit(topk.vector_products)(vectors, q)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found[0, 0], np.linspace(0, 1, 15).reshape(3, 5).sum(0), rtol=1e-6)


def test_a_prompt_is_indexed_with_the_setting_of_the_thread_that_reads_it():
    with ThreadPoolExecutor(1) as indexer, jax.enable_x64(True):
        kind = indexer.submit(prefill._as_in_this_thread(lambda: jnp.arange(2).dtype)).result()
    assert kind == jnp.int64


def test_parameters_and_levels_are_drawn_as_without_it():
    found, token = [], jnp.zeros((1, 4), jnp.int32)
    for wide in (False, True):
        with jax.enable_x64(wide):
            drawn = Transformer(CONFIG).init(jax.random.key(1), token, token)
            found.append((drawn, draw_levels(jax.random.key(2), jnp.arange(4096, dtype=jnp.int32), 1 / 8, 5)))
    assert_alike(*found)
