"""Products of matrices say how exact they are, as the default of a TPU or a GPU is less than f32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import source_info_util

from kvjax.cache import fill
from kvjax.cache.pool import StoreRef
from kvjax.inference import decode, dense_prefill, prefill
from kvjax.inference.cache import State
from kvjax.inference.plan import Slots, make_plan
from kvjax.models.transformer import Transformer
from tests.harness import METHODS
from tests.tiny import CAPACITY, CONFIG, make_params

TOKENS = 48


def products(jaxpr):
    """Yields the matrix products of a program and of all programs in it, Pallas kernels included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
            yield eqn
        for value in eqn.params.values():
            for inner in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from products(inner)


def inexact(jaxpr):
    """Returns where a program leaves what it multiplies or sums in a product to the device."""
    found = set()
    for eqn in products(jaxpr):
        kinds, precision = {x.aval.dtype for x in eqn.invars}, eqn.params["precision"]
        exact = isinstance(precision, tuple) and set(precision) == {jax.lax.Precision.HIGHEST}
        if eqn.params["preferred_element_type"] != jnp.float32 or not (exact or kinds == {jnp.dtype(jnp.bfloat16)}):
            found.add(source_info_util.summarize(eqn.source_info))
    return found


def state_of(plan, params):
    """The cache's state after a prompt, and the programs that fill it and take a token, unrun."""

    def filled(params, tokens, length):
        caches, leader = [], None
        for i, read in enumerate(dense_prefill.read(plan.config, params, tokens)):
            layer = plan.layers[i]
            queries = prefill._last_queries(plan.config.layers[i], layer, params[f"layers_{i}"], read.x, length)
            prompts = fill.Prompts(read.key, read.value, length, tokens, queries)
            caches.append(prefill.fill(plan, i, prompts, leader if layer.follows else None, None, Slots()))
            leader = caches[-1].state
        return State(tuple(caches), length, StoreRef(jnp.int32(-1), jnp.int32(0)))

    given = params, jnp.zeros((2, TOKENS), jnp.int32), jnp.full(2, TOKENS, jnp.int32)
    program, state = jax.make_jaxpr(filled, return_shape=True)(*given)
    token = jax.make_jaxpr(functools.partial(decode.fused_token, plan))(
        params, state, jnp.zeros(2, jnp.int32), jnp.ones(2, bool))
    return program.jaxpr, token.jaxpr


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, "float32") for name in METHODS),
    *((name, "bfloat16") for name in ("full", "dynakv", "icecache", "kvswap")),
])
def test_no_product_is_left_to_the_device(params, name, dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    for program in state_of(make_plan(CONFIG, METHODS[name], 2, CAPACITY), params):
        assert list(products(program))
        assert inexact(program) == set()


def test_a_layer_in_bfloat16_rounds_what_it_returns_alone():
    """Within half a unit in the last place of the same layer in f32, which roundings between would exceed."""
    config, size = CONFIG.layers[0], 16
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), make_params(sharper=1)["layers_0"])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 32, config.hidden_size)), jnp.bfloat16)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (params, x))
    exact_layer = dense_prefill.read_layer(config, size, *wide)
    for found, expected in zip(dense_prefill.read_layer(config, size, params, x), exact_layer, strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=2**-8, atol=1e-6)


def test_a_model_in_float16_reads_a_text_on_every_device():
    """Compares with the same weights widened, but for rounding."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), make_params(sharper=1))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 16)), jnp.int32)
    given = tokens, jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), tokens.shape)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    found, expected = (Transformer(CONFIG).apply({"params": weights}, *given) for weights in (params, wide))
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=0.02)
