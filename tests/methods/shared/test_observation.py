"""Weights of a prompt's queries on the keys just before them, against whole rows of the attention map."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import GROUP, HEADS, METHODS, SIZE, plan_of

from kvjax.cache.types import Context
from kvjax.methods.shared.observation import near_weights, queries_in_parts, query_weights

REACH = 7


def prompt(tokens: int, padded: int) -> Context:
    """Returns a prompt with all its queries, right-padded."""
    rng = np.random.default_rng(tokens)
    at = jnp.arange(padded, dtype=jnp.int32)
    key, query = rng.normal(size=(HEADS, padded, SIZE)), rng.normal(size=(HEADS, GROUP, padded, SIZE))
    pos = jnp.maximum(at + tokens - padded, -1)
    return Context(jnp.asarray(key, jnp.float32), at, at < tokens, at, jnp.asarray(query, jnp.float32), pos)


@pytest.mark.parametrize("sliding", [None, 300, 40])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(("tokens", "padded", "together"), [(600, 600, 64), (530, 640, 64), (20, 64, 16), (3, 4, 32)])
def test_near_weights_are_those_of_whole_rows(tokens, padded, together, cap, sliding):
    """Prompts of several steps, the last of which is shorter, and of less than one."""
    spec = dataclasses.replace(plan_of(METHODS["dynsplit"]).spec, sliding=sliding, soft_cap=cap)
    given, seen = prompt(tokens, padded), 0
    near = jax.jit(lambda q, pos: near_weights(spec, given, q, pos, REACH))
    for q, pos in zip(*queries_in_parts(given, together), strict=True):
        whole = np.asarray(query_weights(spec, given, q, pos))
        weight, first = near(q, pos)
        part = whole[..., int(first) : int(first) + weight.shape[-1]]
        np.testing.assert_allclose(weight, part, atol=2e-6)
        for row, at in enumerate(np.asarray(pos)):
            wanted = np.arange(max(0, at - REACH + 1), at + 1)
            np.testing.assert_allclose(weight[:, :, row, wanted - int(first)], whole[:, :, row, wanted], atol=2e-6)
            seen += len(wanted)
    assert seen == sum(min(at + 1, REACH) for at in range(tokens))
