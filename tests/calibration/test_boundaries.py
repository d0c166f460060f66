"""Algorithm 1 against its lines written out over whole attention maps."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from tiny import make_params

from kvjax.calibration.boundaries import Importance, boundary_scores
from kvjax.errors import PromptError
from kvjax.inference import blocks
from kvjax.models.config import ModelConfig

CONFIG = ModelConfig(
    family="llama", vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=64, windows=(None, 7),
)
TOKENS = np.random.default_rng(0).integers(0, 32, 29).astype(np.int32)
AT = np.arange(len(TOKENS), dtype=np.int32)


@pytest.fixture(scope="module")
def params():
    return make_params(CONFIG)


@pytest.fixture(scope="module")
def maps(params):
    """Attention maps `[L, H, T, T]` of the whole text."""
    x, found = blocks.embed(CONFIG, params, TOKENS), []
    for i, layer in enumerate(CONFIG.layers):
        mine = params[f"layers_{i}"]
        q, k, v = blocks.project(layer, mine, x, AT)
        k, v = np.repeat(k, CONFIG.group, axis=1), np.repeat(v, CONFIG.group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(CONFIG.head_dim)
        behind = AT[:, None] - AT
        seen = (behind >= 0) & (behind < (layer.window or len(TOKENS)))
        found.append(scipy.special.softmax(np.where(seen, scores, -np.inf), axis=-1))
        out = np.einsum("hqk,khd->qhd", found[-1], v)
        x = blocks.finish(layer, mine, x, jnp.asarray(out))
    return np.stack(found)


def brute_force(maps, rule):
    """Lines 2 to 10 of Algorithm 1, one token after the other."""
    scores = []
    for i in range(maps.shape[2] - rule.future):
        future = range(i + 1, i + rule.future + 1)
        overlap, dropped = range(max(0, i - rule.overlap + 1), i + 1), range(0, i - rule.overlap + 1)
        kept, lost = (np.mean([maps[:, :, q, list(keys)].sum(-1) for q in future]) for keys in (overlap, dropped))
        scores.append(kept - rule.alpha * lost)
    return np.asarray(scores)


@pytest.mark.parametrize("rule", [
    Importance(future=3, overlap=5, alpha=1.0, block=8), Importance(future=2, overlap=4, alpha=0.25, block=29),
    Importance(future=1, overlap=40, block=16),
], ids=str)
def test_scores_are_those_of_whole_maps(params, maps, rule):
    found = boundary_scores(CONFIG, params, TOKENS, rule)
    np.testing.assert_allclose(found, brute_force(maps, rule), atol=2e-6)


def test_padding_and_blocks_change_nothing(params):
    rule = Importance(future=3, overlap=5, alpha=1.0, block=8)  # whose scores are those of whole maps
    exact = boundary_scores(CONFIG, params, TOKENS, rule)
    padded = boundary_scores(CONFIG, params, TOKENS, dataclasses.replace(rule, block=64))
    np.testing.assert_allclose(exact, padded, atol=2e-6)
    assert len(exact) == len(TOKENS) - 3 and np.ptp(exact) > 0.1


def test_a_text_without_a_future_is_refused(params):
    with pytest.raises(PromptError, match="take a longer"):
        boundary_scores(CONFIG, params, TOKENS[:8])
