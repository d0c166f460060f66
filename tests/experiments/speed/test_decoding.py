"""Figures of a decode of text, against the store's own totals."""

import numpy as np
import pytest
from tiny import CONFIG, make_params

import kvjax
from configs.decoding import get_config
from experiments import common
from experiments.speed import decoding
from kvjax.errors import ConfigError, KvjaxError

CONTEXT, WARM_UP, STEPS = 40, 4, 16
TOKENS = np.random.default_rng(0).integers(0, 64, (2, CONTEXT + WARM_UP + STEPS)).astype(np.int32)
METHOD = {"name": "quest", "budget": 24, "sinks": 2, "window": 4, "page": 4}


@pytest.fixture(scope="module")
def llm():
    return kvjax.LLM(CONFIG, make_params())


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setattr(common, "held_out_rows", lambda llm, count, tokens: TOKENS[:count, :tokens])
    found = get_config("smoke")
    found.update(context=CONTEXT, warm_up=WARM_UP, steps=STEPS, batch=2)
    return found


def measure(llm, config, directory, store="flash", **settings):
    return decoding.measure(llm, {**METHOD, **settings}, store, config, directory, bandwidth=1e9)


def test_slots_that_keep_blocks_read_fewer_of_the_same_blocks(llm, config, tmp_path):
    kept, read_once = (measure(llm, config, tmp_path, slots=slots) for slots in ({"count": 10}, {"keep": False}))
    assert kept["blocks_needed"] == read_once["blocks_needed"]
    assert 0 < kept["blocks_read"] < read_once["blocks_read"] <= read_once["blocks_needed"]


def test_what_is_beyond_the_device_is_left_out_where_blocks_are_read_ahead(llm, config, tmp_path):
    row = measure(llm, config, tmp_path)
    assert row["beyond_us"] == pytest.approx(row["store_us"] - row["device_us"]) and row["device_us"] > 0
    assert "beyond_us" not in measure(llm, config, tmp_path, slots={"prefetch": "layer"})


def test_memory_has_no_figures_of_a_store(llm, config, tmp_path):
    row = measure(llm, config, tmp_path, store="memory")
    assert "blocks_read" not in row and 0 < row["attended_tokens"] <= METHOD["budget"] + METHOD["page"]


@pytest.mark.parametrize(("change", "words"), [
    ({"methods": ({**METHOD, "budget": 8},)}, "budget=8"), ({"methods": ({**METHOD, "dtype": "int3"},)}, "int3"),
    ({"methods": ({**METHOD, "slots": {"count": 1}},)}, "slots=1"),
    ({"methods": ({"name": "kvswap", "budget": 64, "bits": 4},), "chunk": 8}, "learns from the prompt"),
])
def test_what_does_not_fit_is_found_before_anything_is_written(llm, config, tmp_path, monkeypatch, change, words):
    monkeypatch.setattr(common, "load_model", lambda path, dtype: llm)
    config.update(change)
    with pytest.raises(KvjaxError, match=words):
        decoding.run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", [
    {"steps": 0}, {"methods": ()}, {"stores": ("tape",)}, {"chunk": -1}, {"driver": "nope"},
])
def test_bad_settings_are_refused(config, change):
    decoding.check(config)
    config.update(change)
    with pytest.raises(ConfigError):
        decoding.check(config)
