"""The distribution-shift experiment: caches in token order, its measures against brute force, its texts."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import CAPACITY, HEADS, METHODS, Sim, Stream

from configs import shift as configuration
from experiments import common
from experiments import texts as shift_texts
from experiments.shift import decoding, measures, pictures, study
from kvjax.errors import ConfigError
from kvjax.inference import prefill
from kvjax.inference.blocks import unembed

config = configuration.get_config("smoke")


@pytest.mark.parametrize("name", ["dynakv", "dynakv_static", "dynakv_local"])
def test_token_order_undoes_the_clusters(name):
    stream = Stream.draw(0)
    sim = Sim(METHODS[name], stream, [40, 20])
    sim.run(30)
    key, value, cluster = decoding.in_token_order(sim.plan, sim.cache, CAPACITY)
    for b, length in enumerate(sim.at):
        np.testing.assert_array_equal(key[b, :length], stream.k[b, :length])
        np.testing.assert_array_equal(value[b, :length], stream.v[b, :length])
        assert not np.any(key[b, length:])
        for head in range(HEADS):
            inside = np.asarray(cluster[b, :, head]) < sim.plan.spec.num_blocks
            assert set(np.flatnonzero(inside)) == set(sim.places(b, head)["blocks"])


def test_reclustering_is_a_prefill_of_everything_decoded():
    sim = Sim(METHODS["dynakv"], Stream.draw(1), [40, 30])
    sim.run(20)
    fresh = Sim(METHODS["dynakv"], Stream.draw(1), [60, 50])
    again = decoding._refitted(sim.plan, sim.cache, jnp.asarray(sim.at), (), CAPACITY)
    np.testing.assert_array_equal(again.state.pos, fresh.cache.state.pos)
    np.testing.assert_array_equal(again.pool.key, fresh.cache.pool.key)


def test_variance_and_drift_of_a_partition():
    """Two clusters of the prompt at 0 and 10; later one of them holds three keys at 13."""
    count0, centroid0 = np.array([[2.0, 2.0, 0.0]]), np.array([[[0.0], [10.0], [99.0]]])
    variance0 = np.array([[1.0, 3.0, 50.0]])
    found = measures.partition_figures(
        np.array([[2.0, 0.0, 3.0]]), np.array([[[0.0], [7.0], [13.0]]]), np.array([[1.0, 9.0, 6.0]]),
        count0, centroid0, variance0,
    )
    assert found["clusters"] == 2 and found["cluster_size"] == 2.5 and found["largest_cluster"] == 3
    assert found["variance"] == pytest.approx((2 * 1 + 3 * 6) / 5)
    assert found["centroid_drift"] == pytest.approx((3 * 9 / 5) / 2)


def test_probability_that_updated_clusters_are_retrieved_soon():
    rng = np.random.default_rng(0)
    steps, heads, blocks = 20, 2, 6
    retrieved = np.stack([[rng.permutation(blocks + 1)[:2] for _ in range(heads)] for _ in range(steps)])
    counts = np.cumsum(rng.random((steps + 1, heads, blocks)) < 0.3, axis=0)
    found = measures.updated_retrieved(retrieved, counts)
    for t in (1, 4, 16):
        hits = [
            any(j in retrieved[s + 1 + ahead, h] for ahead in range(t))
            for s in range(steps - t) for h in range(heads) for j in range(blocks)
            if counts[s + 1, h, j] > counts[s, h, j]
        ]
        assert found[f"retrieved_{t}"] == pytest.approx(np.mean(hits))
    assert found["retrieved_1"] <= found["retrieved_4"] <= 1


def test_co_retrieval_is_the_share_of_each_pair():
    pairs = measures.co_retrieval(np.array([[0, 1], [0, 1], [2, 3], [4, 1]]), 4)  # 4 = none
    expected = np.zeros((4, 4))
    expected[0, 1] = expected[1, 0] = 2 / 6
    expected[2, 3] = expected[3, 2] = 1 / 6
    np.testing.assert_allclose(pairs, expected)


def test_principal_axes_are_those_of_the_covariance():
    keys = np.random.default_rng(0).normal(size=(200, 5)) * [1, 5, 1, 3, 0.1]
    mean, axes = pictures.principal_axes(keys)
    values, vectors = np.linalg.eigh(np.cov((keys - mean).T))
    np.testing.assert_allclose(np.abs(axes @ vectors[:, [-1, -2]]), np.eye(2), atol=1e-8)
    np.testing.assert_allclose(np.var((keys - mean) @ axes.T, axis=0, ddof=1), values[[-1, -2]])


@pytest.mark.parametrize("kind", shift_texts.KINDS)
def test_texts_have_the_asked_length_and_depend_on_the_number_alone(kind, texts):
    first = texts.draw(kind, 0, 64, 256)
    assert len(first) == 256 and first == texts.draw(kind, 0, 64, 256) != texts.draw(kind, 1, 64, 256)


@pytest.fixture(scope="module")
def texts():
    return shift_texts.Texts(common.load_model(""), seed=0)


def test_a_mixed_text_changes_its_kind_after_every_prompt_length(texts):
    tokens = texts.draw("mixed", 0, 64, 256)
    prose, code = (" " + " ".join(map(str, stream)) + " " for stream in (texts.prose, texts.code))
    assert f" {' '.join(map(str, tokens[1:64]))} " in prose
    assert f" {' '.join(map(str, tokens[65:128]))} " in code


def test_windows_end_at_their_checkpoints():
    assert decoding.window_starts(config) == [0, 2 * config.prompt - config.steps]


@pytest.mark.parametrize(("change", "words"), [
    ({"strategies": ("adaptive", "none")}, "none"), ({"kinds": ()}, "kinds"), ({"checkpoints": (1, 2)}, "start with 0"),
    ({"steps": 200}, "steps=200"), ({"pca": {"kind": "prose"}}, "pca.kind=prose"),
    ({"checkpoints": (0,)}, "at least two"), ({"checkpoints": ()}, "checkpoints is empty"),
    ({"texts": 0}, "texts=0"), ({"steps": 1}, "steps=1"), ({"batch": 0}, "batch=0"),
    ({"method": {"beam": 3}}, "method.beam"), ({"fit": {"kinds": ("verse",)}}, "verse"),
])
def test_settings_that_make_no_experiment_are_refused(change, words):
    wrong = configuration.get_config("smoke")
    wrong.update(change)
    with pytest.raises(ConfigError, match=words):
        study.check(wrong)


@pytest.mark.parametrize(("change", "words"), [
    ({"prompt": 16, "steps": 8}, "prompt=16 leaves nothing"), ({"pca": {"layer": 4}}, "pca.layer=4"),
    ({"pca": {"head": 2}}, "pca.head=2"), ({"method": {"budget": 64}, "strategies": ("adaptive", "local")}, "budget"),
])
def test_settings_that_do_not_fit_the_model_are_refused(change, words, texts):
    wrong = configuration.get_config("smoke")
    wrong.update(change)
    study.check(wrong)
    with pytest.raises(ConfigError, match=words):
        study.check_fit(texts.llm.config, wrong)


def test_layers_without_clusters_have_no_part_in_figures_of_clusters(texts):
    """Given a dense layer before those of a method, all strategies have it, and the others' clusters are measured."""
    dense = configuration.get_config("smoke")
    dense.method.dense_layers = 1
    assert decoding.settings_of("no_cluster", dense)["dense_layers"] == 1
    tokens = np.asarray([texts.draw("mixed", 0, dense.prompt, 3 * dense.prompt)], np.int32)
    rows = study.run_strategy(
        texts.llm, "adaptive", "teacher", [("mixed", 0)], tokens, dense, lambda window, plan: None
    )
    assert [row["decoded"] for row in rows] == [0, 128] and {row["task"] for row in rows} == {"teacher/mixed"}
    assert [row["clusters"] > 1 and 0 < row["variance"] < np.inf for row in rows] == [True, True]


def test_sampled_texts_are_what_the_model_says_with_its_full_cache(texts):
    """At a temperature of 0, the likeliest token after all that is before it."""
    greedy, llm = configuration.get_config("smoke"), texts.llm
    greedy.temperature, greedy.prompt = 0.0, 24
    given = np.asarray([texts.draw(kind, 0, 24, 40) for kind in ("code", "prose")], np.int32)
    tokens = decoding.continued(llm, given, greedy)
    np.testing.assert_array_equal(tokens[:, :24], given[:, :24])
    greedy.prompt, greedy.steps = 23, 16
    hidden = measures.dense_outputs(llm, tokens, [0], greedy)[:, 0]
    np.testing.assert_array_equal(np.argmax(unembed(llm.config, llm.params, hidden), axis=-1), tokens[:, 24:])


def test_strategies_share_the_settings_that_they_have():
    made = {name: common.make_method(decoding.settings_of(name, config)) for name in config.structures}
    assert made["global"] == made["static"]
    assert {name: made[name].update for name in ("adaptive", "static", "local")} == {
        name: name for name in ("adaptive", "static", "local")
    }
    assert dataclasses.replace(made["static"], update="adaptive") == made["adaptive"]
    assert {(method.budget, method.window) for method in made.values()} == {(128, 16)}
    assert made["clusterkv"].cluster == 16 and not hasattr(made["pqcache 2x6"], "cluster")


@pytest.mark.parametrize(("structure", "moves"), [("pqcache 2x6", True), ("kvswap prompt", True), ("quest", False)])
def test_what_is_fitted_anew_is_that_of_a_prompt_with_all_tokens(structure, moves, texts):
    """Given the first layer, whose keys no selection changes. Pages need no fitting: they are the same as before."""
    tokens = np.asarray([texts.draw("code", 0, 64, 96)], np.int32)
    given = configuration.get_config("smoke")
    decoded = decoding.Decoding(texts.llm, structure, tokens, "teacher", given)
    decoded.texts()
    plan = decoded.plan
    whole, _ = prefill.prefill(plan, texts.llm.params, tokens, jnp.asarray([96]))
    before, anew, expected = (
        jax.tree.leaves(state.layers[0].state.index)[0]
        for state in (decoded.state, decoding.refit(plan, decoded.state), whole)
    )
    np.testing.assert_allclose(anew, expected, atol=1e-3)
    assert np.allclose(before, expected, atol=1e-3) != moves


def test_a_run_measures_every_text_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """Given codebooks and adapters, which are fitted once."""
    given = configuration.get_config("smoke")
    given.update(kinds=("code",), pca={"kind": "code"}, prompt=48, steps=8, strategies=("pqcache 2x6", "kvswap fitted"))
    study.run(given, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    heads = {(row["method"], row["text"], row["decoded"]) for row in lines}
    assert len(lines) == 8 and heads == {
        (name, text, decoded) for name in given.strategies for text in (0, 1) for decoded in (0, 96)
    }
    summary = {(row["task"], row["method"], row["decoded"]): row
               for row in json.loads((tmp_path / "summary.json").read_text())["rows"]}
    late = summary["teacher/all", "pqcache 2x6", 96]
    recalls = [row["recall"] for row in lines if row["method"] == "pqcache 2x6" and row["decoded"] == 96]
    assert late["texts"] == 2 and late["recall"] == pytest.approx(np.mean(recalls))
    assert late["recall_interval"][0] < late["recall"] < late["recall_interval"][1]
    early = summary["teacher/code", "pqcache 2x6", 0]
    assert late["recall_change"] == pytest.approx(late["recall"] - early["recall"])
    assert late["recall_change_interval"][0] <= late["recall_change"] <= late["recall_change_interval"][1]
    assert (tmp_path / "shift_teacher.png").exists() and (tmp_path / "kinds_teacher.png").exists()
    monkeypatch.setattr(study, "run_strategy", lambda *_: pytest.fail("measured again"))
    study.run(given, tmp_path)
