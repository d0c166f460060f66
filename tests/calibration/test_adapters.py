"""Adapters against NumPy's SVD of the stacked keys, their files, and what refining them is for."""

import dataclasses
import errno
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
from safetensors import safe_open
from safetensors.numpy import save_file
from tiny import make_params

import kvjax
from kvjax import _files
from kvjax.calibration import collect_moments, fit_adapters, refine_adapters
from kvjax.calibration.collect_moments import layers_of
from kvjax.calibration.refine_adapters import Objective
from kvjax.errors import ChecksumMismatch, ConfigError, FormatMismatch, PromptError, ReadFailed, WriteFailed
from kvjax.inference import blocks
from kvjax.methods.shared import adapters
from kvjax.models.config import ModelConfig

CONFIG = ModelConfig(
    family="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=128, windows=(None, 16),
)
ROWS = np.random.default_rng(0).integers(0, 64, (3, 2, 48)).astype(np.int32)  # three batches of two texts
RATIO = 4


def make_llm(seed):
    return kvjax.LLM(CONFIG, make_params(CONFIG, seed))


@pytest.fixture(scope="module")
def llm():
    return make_llm(1)


@pytest.fixture(scope="module")
def moments(llm):
    return collect_moments.key_moments(llm, ROWS)


@pytest.fixture(scope="module")
def stacked(llm):
    """f64[N, K, D] of each layer: the keys that a cache of the same texts holds."""
    texts = ROWS.reshape(-1, ROWS.shape[-1])
    layers = llm.read(texts.tolist()).layers
    return [np.concatenate(layer.key[:, : texts.shape[1]]).astype(np.float64) for layer in layers]


def best_possible(keys, rank):
    """Share of ||keys||^2 that the best approximation of this rank leaves out (Eckart and Young)."""
    energy = np.linalg.svd(keys, compute_uv=False) ** 2
    return energy[rank:].sum(), energy.sum()


def test_joint_adapters_are_numpys_right_singular_vectors_up_to_sign(moments, stacked):
    fitted = fit_adapters.svd(moments, RATIO)
    for basis, keys in zip(fitted.layers, stacked, strict=True):
        flat = keys.reshape(len(keys), -1)
        expected = np.linalg.svd(flat, full_matrices=False)[2][: flat.shape[1] // RATIO].T
        found = basis.reshape(expected.shape)
        np.testing.assert_allclose(np.abs(expected.T @ found), np.eye(fitted.ranks[0]), atol=1e-3)


def test_adapters_of_each_head_are_numpys_right_singular_vectors_up_to_sign(moments, stacked):
    fitted = fit_adapters.svd(moments, RATIO, joint=False)
    for basis, keys in zip(fitted.layers, stacked, strict=True):
        for head in range(CONFIG.num_kv_heads):
            expected = np.linalg.svd(keys[:, head], full_matrices=False)[2][: CONFIG.head_dim // RATIO].T
            np.testing.assert_allclose(np.abs(expected.T @ basis[head]), np.eye(fitted.ranks[0]), atol=1e-3)


@pytest.mark.parametrize("ratio", [2, 4, 8])
@pytest.mark.parametrize("joint", [True, False], ids=["joint", "per_head"])
def test_no_adapters_of_this_rank_reconstruct_keys_better(moments, stacked, joint, ratio):
    fitted = fit_adapters.svd(moments, ratio, joint)
    for error, keys in zip(fit_adapters.reconstruction_error(moments, fitted), stacked, strict=True):
        parts = [keys.reshape(len(keys), -1)] if joint else list(keys.swapaxes(0, 1))
        lost, total = np.sum([best_possible(part, fitted.ranks[0]) for part in parts], axis=0)
        assert abs(error - lost / total) < 1e-4


def test_the_error_of_any_other_adapters_is_that_of_the_reconstructed_keys(moments, stacked):
    """Given adapters that are neither optimal nor orthonormal."""
    rng = np.random.default_rng(1)
    for joint in (True, False):
        layers = [0.4 * rng.normal(size=(2, 8, 3)) for _ in stacked]
        other = adapters.Adapters(layers, joint, "")
        for basis, keys, error in zip(layers, stacked, fit_adapters.reconstruction_error(moments, other), strict=True):
            low = np.einsum("tkd,kdr->tkr", keys, basis)
            low = np.broadcast_to(low.sum(1, keepdims=True), low.shape) if joint else low
            back = np.einsum("tkr,kdr->tkd", low, basis)
            assert abs(error - np.sum((keys - back) ** 2) / np.sum(keys**2)) < 1e-4


def test_ratio_says_how_many_numbers_are_kept(moments):
    for joint in (True, False):
        assert fit_adapters.svd(moments, RATIO, joint).ratio == RATIO
    assert fit_adapters.svd(moments, 4).ranks == (4, 4) and fit_adapters.svd(moments, 4, joint=False).ranks == (2, 2)


@pytest.mark.parametrize("joint", [True, False], ids=["joint", "per_head"])
def test_layers_that_share_the_dimensions_lose_least_of_the_mean_energy(moments, joint):
    """Given that no other way to share them loses less, and that the total is the same."""
    shared = fit_adapters.svd(moments, RATIO, joint, by_layer=True)
    even = fit_adapters.svd(moments, RATIO, joint)
    assert sum(shared.ranks) == sum(even.ranks) and shared.has_ratio(RATIO) and shared.ratio == RATIO
    ways = {}
    for first in range(1, sum(even.ranks)):
        pair = first, sum(even.ranks) - first
        fits = [fit_adapters.svd(moments, 1, joint).layers[i][..., :rank] for i, rank in enumerate(pair)]
        ways[pair] = sum(fit_adapters.reconstruction_error(moments, adapters.Adapters(fits, joint, "")))
    assert ways[shared.ranks] == min(ways.values())


@pytest.mark.parametrize(("ratio", "joint"), [(0, True), (17, True), (9, False)])
def test_a_ratio_that_leaves_nothing_is_refused(moments, ratio, joint):
    with pytest.raises(ConfigError, match="ratio"):
        fit_adapters.svd(moments, ratio, joint)


def test_collecting_from_nothing_is_refused(llm):
    with pytest.raises(PromptError, match="batch"):
        collect_moments.key_moments(llm, [])


# refining -----------------------------------------------------------------------------------------


def losses(llm, fitted):
    """Mean score loss of each layer over all rows."""
    found = np.zeros(CONFIG.num_layers)
    for tokens in ROWS:
        for i, query, key in layers_of(llm, tokens):
            found[i] += _loss(jnp.asarray(fitted.layers[i]), fitted.joint, query, key) / len(ROWS)
    return found


@functools.partial(jax.jit, static_argnums=1)
def _loss(basis, joint, query, key):
    return refine_adapters.score_loss(basis, joint, *refine_adapters.sample(query, key))


OF_SCORES, OF_GROUPS = Objective("scores", ahead=False), Objective(sinks=2, window=4)


@pytest.mark.parametrize("joint", [True, False], ids=["joint", "per_head"])
def test_refining_lowers_the_score_loss_of_every_layer(llm, moments, joint):
    fitted, rows = fit_adapters.svd(moments, RATIO, joint), [batch for _ in range(10) for batch in ROWS]
    refined = refine_adapters.refine(llm, fitted, rows, learning_rate=1e-2, objective=OF_SCORES)
    assert (losses(llm, refined) < 0.97 * losses(llm, fitted)).all()
    assert (refined.joint, refined.fingerprint) == (fitted.joint, fitted.fingerprint)


def held_out_losses(llm, fitted, objective):
    start = refine_adapters.begin(fitted, optax.sgd(0.0))
    return refine_adapters.keep_best(llm, start, ROWS, fitted.joint, objective)[1]


@pytest.mark.parametrize("joint", [True, False], ids=["joint", "per_head"])
def test_refining_lowers_the_loss_of_groups_for_the_queries_of_the_layer_before(llm, moments, joint):
    fitted, rows = fit_adapters.svd(moments, RATIO, joint), [batch for _ in range(10) for batch in ROWS]
    refined = refine_adapters.refine(llm, fitted, rows, learning_rate=1e-2, objective=OF_GROUPS)
    assert (held_out_losses(llm, refined, OF_GROUPS) < 0.97 * held_out_losses(llm, fitted, OF_GROUPS)).all()


def test_queries_ahead_are_of_the_input_of_the_layer_before(llm):
    own, ahead = (dict((i, query) for i, query, _ in layers_of(llm, ROWS[0], early)) for early in (False, True))
    np.testing.assert_array_equal(own[0], ahead[0])
    assert not np.allclose(own[1], ahead[1])
    x = blocks.embed(CONFIG, llm.params, ROWS[0])
    at = np.broadcast_to(np.arange(48, dtype=np.int32), ROWS[0].shape)
    np.testing.assert_allclose(ahead[1], blocks.queries(CONFIG.layers[1], llm.params["layers_1"], x, at), atol=1e-5)


@pytest.mark.parametrize("group, sinks, window", [(1, 0, 0), (4, 0, 0), (4, 2, 5), (7, 3, 2)])
def test_the_loss_of_groups_is_that_of_their_summed_attention(group, sinks, window):
    rng = np.random.default_rng(1)
    key = rng.normal(size=(2, 18, 2, 8)).astype(np.float32)
    query = rng.normal(size=(2, 3, 2, 2, 8)).astype(np.float32)
    basis, at = rng.normal(size=(2, 8, 5)).astype(np.float32), np.array([9, 13, 17], np.int32)

    counts = (np.arange(18) >= sinks) & (np.arange(18) <= at[:, None] - window)

    def mass(scores, among):
        weight = scipy.special.softmax(np.where(among, np.asarray(scores, np.float64), -np.inf), axis=-1).mean((1, 2))
        weight = np.where(counts, weight, 0)
        return np.stack([weight[..., i : i + group].sum(-1) for i in range(0, 18, group)], axis=-1)

    true = mass(refine_adapters.exact_scores(query, key), np.arange(18) <= at[:, None])
    predicted = mass(refine_adapters.low_rank_scores(basis, False, query, key), counts)
    total = true.sum(-1)
    expected = (total * scipy.special.rel_entr(true / total[..., None], predicted).sum(-1)).mean()
    objective = Objective(group=group, sinks=sinks, window=window)
    found = refine_adapters.group_loss(jnp.asarray(basis), False, query, key, at, objective)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_each_layer_keeps_the_adapter_with_the_least_held_out_loss(llm, moments):
    """Layer 0 is best before a step that is far too long, layer 1 is given a better one."""
    fitted, objective = fit_adapters.svd(moments, RATIO), OF_GROUPS
    start = refine_adapters.begin(fitted, optax.sgd(0.0))
    start, first = refine_adapters.keep_best(llm, start, ROWS, True, objective)
    rows = [batch for _ in range(10) for batch in ROWS]
    good = refine_adapters.refine(llm, fitted, rows, 1e-2, objective).layers[1]
    moved = dataclasses.replace(start, basis=(-9 * start.basis[0] + 1, jnp.asarray(good)))
    moved, second = refine_adapters.keep_best(llm, moved, ROWS, True, objective)
    assert second[0] > first[0] and second[1] < first[1]
    np.testing.assert_array_equal(moved.best[0], fitted.layers[0])
    np.testing.assert_array_equal(moved.best[1], good)
    np.testing.assert_allclose(moved.least, [first[0], second[1]], rtol=1e-6)
    with pytest.raises(PromptError, match="held-out"):
        refine_adapters.keep_best(llm, moved, iter(()), True, objective)


@pytest.mark.parametrize("wrong", [{"loss": "tokens"}, {"group": 0}, {"sinks": -1}, {"window": -1}])
def test_another_objective_is_refused(unchecked, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Objective(**wrong)


def test_refining_on_nothing_is_refused(llm, moments):
    """Given rows that were read already, such as by what collects moments."""
    with pytest.raises(PromptError, match="no batch"):
        refine_adapters.refine(llm, fit_adapters.svd(moments, RATIO), iter(()))


@pytest.mark.parametrize("joint", [True, False], ids=["joint", "per_head"])
def test_adapters_that_keep_everything_lose_nothing(llm, moments, joint):
    assert np.abs(losses(llm, fit_adapters.svd(moments, 1, joint))).max() < 1e-4


# files --------------------------------------------------------------------------------------------


def test_what_is_loaded_is_what_was_saved(moments, tmp_path):
    fitted = fit_adapters.svd(moments, RATIO)
    fitted.save(tmp_path / "new" / "a")
    fitted.save(tmp_path / "a")
    found = adapters.load(tmp_path / "a")
    assert found == adapters.load(tmp_path / "new" / "a") == fitted and hash(found) == hash(fitted)
    assert found != fit_adapters.svd(moments, RATIO, joint=False)
    fit_adapters.svd(moments, 8).save(tmp_path / "a")
    assert adapters.load(tmp_path / "a").ranks == (2, 2) and {one.name for one in tmp_path.iterdir()} == {"a", "new"}


def test_what_is_there_is_not_lost(moments, tmp_path, monkeypatch):
    """Given a directory, a file of something else, tensors of something else, and a device that gives out while
    adapters are replaced."""
    fitted = fit_adapters.svd(moments, RATIO)
    (tmp_path / "fits").mkdir()
    fitted.save(tmp_path / "fits" / "a")
    (tmp_path / "file").write_text("mine")
    save_file({"layers.0": np.ones(3)}, tmp_path / "tensors")
    for taken in ("fits", "file", "tensors"):
        with pytest.raises(WriteFailed, match="choose another path"):
            fitted.save(tmp_path / taken)
    with monkeypatch.context() as patched:
        patched.setattr(_files.os, "replace", _refuse_the_new(_files.os.replace))
        with pytest.raises(WriteFailed, match="no room"):
            fit_adapters.svd(moments, 8).save(tmp_path / "fits" / "a")
    assert adapters.load(tmp_path / "fits" / "a") == fitted and (tmp_path / "file").read_text() == "mine"
    assert [one.name for one in (tmp_path / "fits").iterdir()] == ["a"]


def _refuse_the_new(replace):
    def replaced(old, new):
        if str(old).endswith(".tmp"):
            raise OSError(errno.ENOSPC, "no room")
        replace(old, new)

    return replaced


def test_nothing_there_is_a_typed_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    for name in ("nothing", "file", "."):
        with pytest.raises(ReadFailed, match=r"Adapters\.save"):
            adapters.load(tmp_path / name)


@pytest.mark.parametrize(("change", "error"), [
    ({"version": "99"}, FormatMismatch), ({"joint": "False"}, ChecksumMismatch),
    ({"fingerprint": "x"}, ChecksumMismatch),
])
def test_a_changed_file_is_a_typed_error(moments, tmp_path, change, error):
    fit_adapters.svd(moments, RATIO).save(tmp_path / "a")
    with safe_open(tmp_path / "a", "np") as saved:
        about, leaves = saved.metadata(), {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118
    save_file(leaves, tmp_path / "a", about | change)
    with pytest.raises(error):
        adapters.load(tmp_path / "a")


def test_adapters_of_another_model_are_refused(llm, moments):
    fit_adapters.svd(moments, RATIO).check_model(llm.identity)
    with pytest.raises(FormatMismatch, match="fit adapters to this one"):
        refine_adapters.refine(make_llm(2), fit_adapters.svd(moments, RATIO), ROWS)
