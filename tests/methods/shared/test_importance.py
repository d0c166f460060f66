"""Importance of delimiters in a prompt, against Algorithm 1 written out over whole attention maps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from harness import GROUP, HEADS, METHODS, SIZE, Stream, plan_of

from kvjax.cache.types import Context
from kvjax.errors import ConfigError
from kvjax.methods.shared.importance import Importance, prompt_scores, prompt_weights

RULE = Importance(future=3, overlap=5, alpha=0.5)
TOKENS, PADDED = 45, 64
DELIMITER = np.asarray([3, 8, 9, 20], np.int32)


def context(queries, tokens=TOKENS, ids=None):
    """A prompt of `tokens` tokens, right-padded, with its last queries."""
    stream = Stream.draw(2)
    pos = np.maximum(tokens - queries + np.arange(queries), -1)
    query = stream.q[0, np.maximum(pos, 0)].reshape(queries, HEADS, GROUP, SIZE)
    at = np.arange(PADDED, dtype=np.int32)
    ids = np.zeros(PADDED, np.int32) if ids is None else ids
    arrays = (stream.k[0, :PADDED].swapaxes(0, 1), at, at < tokens, ids, query.transpose(1, 2, 0, 3), pos)
    return Context(*(jnp.asarray(array if array.dtype != np.int64 else array.astype(np.int32)) for array in arrays))


@functools.cache
def exact_scores(tokens=TOKENS, sink_logit=-np.inf):
    """Lines 2 to 10 of Algorithm 1 in float64, for all tokens with enough of a future."""
    stream = Stream.draw(2)
    q = stream.q[0, :tokens].reshape(tokens, HEADS, GROUP, SIZE)
    scores = np.einsum("qkgd,tkd->kgqt", q, stream.k[0, :tokens]) / np.sqrt(SIZE)
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf).astype(np.float64)
    shares = np.concatenate([scores, np.full((*scores.shape[:-1], 1), sink_logit)], axis=-1)
    maps = scipy.special.softmax(shares, axis=-1)[..., :-1]
    found = []
    for i in range(tokens - RULE.future):
        future = slice(i + 1, i + RULE.future + 1)
        kept, dropped = slice(max(0, i - RULE.overlap + 1), i + 1), slice(0, max(0, i - RULE.overlap + 1))
        of = (maps[:, :, future, keys].sum(-1).mean() for keys in (kept, dropped))
        found.append(next(of) - RULE.alpha * next(of))
    return np.asarray(found)


@pytest.mark.parametrize("sink_logit", [-np.inf, 2.0], ids=["", "sink_logits"])
@pytest.mark.parametrize("queries", [TOKENS, PADDED, 20, 3], ids=lambda count: f"{count} queries")
def test_scores_are_those_of_whole_maps(queries, sink_logit):
    spec, given = plan_of(METHODS["dynsplit"]).spec, context(queries)
    if np.isfinite(sink_logit):
        given = dataclasses.replace(given, sink_logits=jnp.full((HEADS, GROUP), sink_logit))
    score, boundary, known = jax.jit(lambda given: prompt_scores(spec, given, RULE))(given)
    score, boundary = np.asarray(score)[known], np.asarray(boundary)[known]
    np.testing.assert_allclose(score, exact_scores(sink_logit=sink_logit)[boundary], atol=2e-6)
    first = max(0, TOKENS - queries - 1)
    np.testing.assert_array_equal(boundary, np.arange(first, TOKENS - RULE.future))


def test_weights_are_mean_scores_stretched_and_rare_delimiters_have_the_mean():
    """Given three delimiters that are frequent enough, one that is not, and other tokens between them."""
    ids = np.random.default_rng(0).choice([3, 8, 9, 1, 2], PADDED).astype(np.int32)
    ids[5], ids[30] = 20, 20
    spec = plan_of(METHODS["dynsplit"]).spec
    found = prompt_weights(spec, context(PADDED, ids=ids), jnp.asarray(DELIMITER), RULE, rarest=3)
    exact = exact_scores()
    scores = [exact[ids[: len(exact)] == token] for token in DELIMITER]
    assert [len(one) >= 3 for one in scores] == [True, True, True, False]
    mean = [one.mean() for one in scores[:3]] + [np.concatenate(scores).mean()]
    np.testing.assert_allclose(found, (mean - np.min(mean)) / np.ptp(mean), atol=1e-4)
    assert np.ptp(mean) > 0.01


@pytest.mark.parametrize(("tokens", "queries"), [(2, PADDED), (TOKENS, 2), (TOKENS, TOKENS)])
def test_delimiters_weigh_the_same_where_nothing_tells_them_apart(tokens, queries):
    """Given a prompt without a future, too few queries, or no delimiter."""
    spec = plan_of(METHODS["dynsplit"]).spec
    found = prompt_weights(spec, context(queries, tokens), jnp.asarray(DELIMITER), RULE)
    np.testing.assert_array_equal(found, np.ones(4))


def test_unknown_queries_are_refused():
    with pytest.raises(ConfigError, match="last queries"):
        prompt_weights(plan_of(METHODS["dynsplit"]).spec, context(0), jnp.asarray(DELIMITER), RULE)
