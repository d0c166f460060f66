"""The feed-forward network with experts against NumPy, which takes one token after another through its experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit, softmax

from kvjax.models.config import Experts, ModelConfig
from kvjax.models.transformer import SparseMLP

SIZES = ModelConfig(
    family="qwen3_moe", vocab_size=20, hidden_size=12, intermediate_size=16, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=4,
)
MIXTURES = {
    "swiglu": Experts(7, 3, 10), "shares": Experts(7, 3, 10, normalise=False),
    "shared": Experts(7, 3, 10, shared_size=5),
    "biased": Experts(7, 3, 10, bias=True), "gpt_oss": Experts(7, 3, 10, bias=True, limit=1.5),
}
every_mixture = pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES)


def random_params(module):
    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, SIZES.hidden_size)))["params"]
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


def swiglu(gate, up):
    return gate * expit(gate) * up


def clamped(gate, up, limit):
    gate = min(gate, limit)
    return (max(-limit, min(up, limit)) + 1) * gate * expit(1.702 * gate)


def exactly(params, x, mixture):
    """The output for one token, in float64."""
    p = jax.tree.map(np.float64, params)
    scores = p["router"]["weight"] @ x + p["router"].get("bias", 0)
    best = np.argsort(-scores, kind="stable")[: mixture.per_token]
    # GPT-OSS's softmax is of the chosen scores alone, which is the same as weights that sum to 1.
    weight = softmax(scores[best]) if mixture.normalise else softmax(scores)[best]
    out = np.zeros(len(x))
    for e, share in zip(best, weight, strict=True):
        gate, up = (p[name][e] @ x + p.get(f"{name}_bias", np.zeros((7, 1)))[e] for name in ("gate_proj", "up_proj"))
        if mixture.limit is None:
            inner = swiglu(gate, up)
        else:
            inner = np.array([clamped(*pair, mixture.limit) for pair in zip(gate, up, strict=True)])
        out += share * (p["down_proj"][e] @ inner + p.get("down_proj_bias", np.zeros((7, 1)))[e])
    if mixture.shared_size:
        gate, up, down = (p["shared"][name]["weight"] for name in ("gate_proj", "up_proj", "down_proj"))
        out += expit(p["shared_gate"]["weight"] @ x) * (down @ swiglu(gate @ x, up @ x))
    return out


@every_mixture
@pytest.mark.parametrize("shape", [(1,), (3, 5), (70,)])
def test_each_token_goes_through_its_experts(mixture, shape):
    module = SparseMLP(dataclasses.replace(SIZES, experts=mixture))
    params = random_params(module)
    x = np.random.default_rng(1).normal(size=(*shape, SIZES.hidden_size)).astype(np.float32)
    expected = np.apply_along_axis(lambda row: exactly(params, row, mixture), -1, np.float64(x))
    np.testing.assert_allclose(jax.jit(module.apply)({"params": params}, x), expected, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("change", [{"limit": None}, {"limit": 9.0}, {"normalise": False}, {"per_token": 2}])
def test_every_setting_changes_the_output(change):
    x = np.random.default_rng(1).normal(size=SIZES.hidden_size).astype(np.float32)
    module, other = (SparseMLP(dataclasses.replace(SIZES, experts=mixture)) for mixture in (
        MIXTURES["gpt_oss"], dataclasses.replace(MIXTURES["gpt_oss"], **change)))
    params = random_params(module)
    assert np.abs(module.apply({"params": params}, x) - other.apply({"params": params}, x)).max() > 1e-3
