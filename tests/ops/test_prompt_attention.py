"""Splash attention of whole prompts, in the interpreter, against the chunked attention in XLA operations."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from kvjax.inference import dense_prefill
from kvjax.ops import causal
from kvjax.ops.kernels import prompt_attention, tiles

HEADS = 2


def both(tokens=256, size=64, group=2, dtype=jnp.float32, window=None, cap=None, sinks=False):
    rng = np.random.default_rng(tokens + size + group)

    def drawn(*shape):
        return jnp.asarray(rng.normal(size=shape) * 1.5, dtype)

    q = drawn(tokens, HEADS, group, size)
    key, value = drawn(tokens, HEADS, size), drawn(tokens, HEADS, size)
    learned = jnp.asarray(rng.normal(size=(HEADS, group)), jnp.float32) if sinks else None
    found = jax.jit(prompt_attention.attend, static_argnums=(3, 4))(q, key, value, window, cap, learned)
    start, at_once = jnp.int32(0), 64
    assert found.dtype == dtype
    return found, causal.in_chunks(q, key, value, start, at_once, window, cap, learned)


def check(**case):
    found, expected = both(**case)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_any_head_size(size):
    check(size=size, tokens=128)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_any_group(group):
    check(group=group, tokens=128)


@pytest.mark.parametrize("window", [1, 100, 128, 1000])
def test_any_window(window):
    check(window=window)


def test_soft_cap_and_sink_logits():
    check(cap=2.0, sinks=True, window=70)


@pytest.mark.parametrize("tokens", [384, 1536])
def test_lengths_that_are_no_powers_of_two(tokens):
    check(tokens=tokens, group=1)


def test_bfloat16_agrees_within_its_rounding():
    found, expected = both(dtype=jnp.bfloat16, size=128)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, expected)), atol=3e-2)


@pytest.mark.parametrize(("tokens", "served"), [(64, False), (200, False), (128, True), (1536, True)])
def test_only_whole_tiles_are_taken(tokens, served, monkeypatch):
    monkeypatch.setattr(tiles, "wanted", lambda: True)
    q, key = jnp.ones((tokens, 1, 1, 8)), jnp.ones((tokens, 1, 8))
    found = jax.eval_shape(lambda: causal.at_once(q, key, key, None))
    assert (found is not None) == served


def test_other_platforms_take_the_chunks():
    assert causal.at_once(jnp.ones((128, 1, 1, 8)), *(jnp.ones((128, 1, 8)),) * 2, None) is None


def test_a_layer_reads_a_prompt_as_on_other_platforms(monkeypatch):
    config, params = tiny.CONFIG.layers[0], tiny.make_params(sharper=1)["layers_0"]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 128, config.hidden_size)), jnp.float32)
    expected = dense_prefill.read_layer(config, 32, params, x)
    monkeypatch.setattr(tiles, "wanted", lambda: True)
    found = jax.jit(dense_prefill.read_layer.__wrapped__, static_argnums=(0, 1))(config, 64, params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


# GPUs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 7, 1000])
def test_prompts_that_cudnn_reads(window, monkeypatch):
    """Lets XLA compute what cuDNN is asked for."""
    rng, asked, attend = np.random.default_rng(0), [], jax.nn.dot_product_attention
    q, *rows = (jnp.asarray(rng.normal(size=(64, 2, *shape)), jnp.bfloat16) for shape in ((3, 16), (16,), (16,)))
    expected = causal.in_chunks(q, *rows, jnp.int32(0), 16, window)

    def instead(*args, implementation, **options):
        asked.append(implementation)
        return attend(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    monkeypatch.setattr(causal, "_by_cudnn", lambda dtype, size: True)
    found = causal.at_once(q, *rows, window)
    assert asked == ["cudnn"] and found.dtype == q.dtype
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, expected)), atol=3e-2)
    for more in ({"cap": 2.0}, {"sink_logits": jnp.zeros((2, 3))}):
        assert causal.at_once(q, *rows, window, **more) is None


@pytest.mark.parametrize(("capability", "dtype", "size", "served"), [
    ("9.0", "bfloat16", 256, True), ("8.0", "bfloat16", 256, False), ("8.0", "float16", 128, True),
    ("7.5", "bfloat16", 64, False), ("10.0", "float32", 64, False), ("10.0", "bfloat16", 100, False),
    ("gfx942", "bfloat16", 64, False)])
def test_what_cudnn_computes(capability, dtype, size, served, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(compute_capability=capability)])
    assert causal._by_cudnn(dtype, size) == served
