"""Weights of a prompt's queries on the keys just before them, against whole rows of the attention map."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import GROUP, HEADS, METHODS, SIZE, Stream, attention_weights, plan_of

from kvjax.cache.types import Context
from kvjax.methods.shared.observation import near_weights, queries_in_parts, query_weights

REACH = 7
SINKS = jnp.linspace(-1.0, 6.0, HEADS * GROUP).reshape(HEADS, GROUP)


def prompt(tokens: int, padded: int) -> Context:
    """Returns a prompt with all its queries, right-padded."""
    rng = np.random.default_rng(tokens)
    at = jnp.arange(padded, dtype=jnp.int32)
    key, query = rng.normal(size=(HEADS, padded, SIZE)), rng.normal(size=(HEADS, GROUP, padded, SIZE))
    pos = jnp.maximum(at + tokens - padded, -1)
    return Context(jnp.asarray(key, jnp.float32), at, at < tokens, at, jnp.asarray(query, jnp.float32), pos)


@pytest.mark.parametrize("sliding", [None, 300, 40])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("learned", [False, True], ids=["", "sink_logits"])
@pytest.mark.parametrize(("tokens", "padded", "together"), [(600, 600, 64), (530, 640, 64), (20, 64, 16), (3, 4, 32)])
def test_near_weights_are_those_of_whole_rows(tokens, padded, together, learned, cap, sliding):
    """Prompts of several steps, the last of which is shorter, and of less than one."""
    spec = dataclasses.replace(plan_of(METHODS["dynsplit"]).spec, sliding=sliding, soft_cap=cap)
    given, seen = dataclasses.replace(prompt(tokens, padded), sink_logits=SINKS if learned else None), 0
    near = jax.jit(lambda q, pos: near_weights(spec, given, q, pos, REACH))
    for q, pos in zip(*queries_in_parts(given, together), strict=True):
        whole = np.asarray(query_weights(spec, given, q, pos))
        weight, total, first = near(q, pos)
        part = whole[..., int(first) : int(first) + weight.shape[-1]]
        np.testing.assert_allclose(weight, part, atol=2e-6)
        assert (total is None) is not learned
        if total is not None:
            np.testing.assert_allclose(total[..., pos >= 0], whole.sum(-1)[..., pos >= 0], atol=2e-6)
        for row, at in enumerate(np.asarray(pos)):
            wanted = np.arange(max(0, at - REACH + 1), at + 1)
            np.testing.assert_allclose(weight[:, :, row, wanted - int(first)], whole[:, :, row, wanted], atol=2e-6)
            seen += len(wanted)
    assert seen == sum(min(at + 1, REACH) for at in range(tokens))


def test_sink_logits_take_their_share_of_each_query():
    """Compares with the attention of `tests/harness.py` in float64."""
    stream, tokens, sinks = Stream.draw(3), 40, np.asarray(SINKS)
    q = jnp.asarray(stream.q[0, :tokens].reshape(tokens, HEADS, GROUP, SIZE).transpose(1, 2, 0, 3))
    at = jnp.arange(tokens, dtype=jnp.int32)
    given = Context(jnp.asarray(stream.k[0, :tokens].swapaxes(0, 1)), at, at >= 0, at, q, at, SINKS)
    found = query_weights(plan_of(METHODS["dynsplit"]).spec, given, q, at)
    for row in range(tokens):
        expected = attention_weights(stream, 0, row, [range(row + 1)] * HEADS, sink_logits=sinks.reshape(-1))
        np.testing.assert_allclose(found[:, :, row, : row + 1], expected, atol=2e-6)
