"""Stores by name, and what a row of results says about the device under them."""

import importlib

import ml_collections
import pytest

import kvjax
from experiments import common
from experiments.board import long_generation
from experiments.dynakv import adaptive_prefill
from experiments.kvswap import residency
from experiments.speed import throughput
from kvjax.errors import ConfigError
from kvjax.inference.usage import Usage


def test_stores_by_name(tmp_path):
    assert common.make_store("memory", tmp_path) is None
    assert isinstance(common.make_store("host", tmp_path), kvjax.HostStore)
    store = common.make_store("flash", tmp_path / "new")
    assert (store.profile, store.path, store.temporary) == ("native", str(tmp_path / "new"), True)
    store = common.make_store("flash:emmc", tmp_path)
    assert (store.profile, store.layout) == ("emmc", "grouped")
    store = common.make_store("flash:emmc:sequential", tmp_path)
    assert (store.profile, store.layout) == ("emmc", "sequential")


@pytest.mark.parametrize("kind", ["disk", "", "host:emmc", "flash:floppy", "flash:emmc:spiral", "flash:emmc:grouped:x"])
def test_unknown_stores_are_refused_and_make_nothing(tmp_path, kind):
    with pytest.raises(ConfigError, match="unknown"):
        common.make_store(kind, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_cost_of_a_token_is_a_mean_over_tokens_and_not_over_runs():
    """Given a long text and a short question, of which a part went through in a chunk."""
    long = Usage(300, 300, 1.0, 0.0, 300, 200.0, 1000, 100, None)
    short = Usage(11, 80, 1.0, 0.0, 10, 400.0, 10, 10, None)
    cost = common.cost_of([long, short])
    assert cost["attended_tokens"] == pytest.approx((300 * 200 + 10 * 400) / 310)
    assert cost["hit_rate"] == pytest.approx(1 - 110 / 1010)


def test_results_say_what_was_emulated(tmp_path):
    assert common.disk_of(None) == common.disk_of(kvjax.HostStore()) == {}
    assert common.disk_of(common.make_store("flash", tmp_path)) == {"disk": "native"}
    assert common.disk_of(common.make_store("flash:emmc", tmp_path)) == {
        "disk": "emmc (emulated)", "late_share": 0.0, "host_us_per_command": 0.0}


def test_late_commands_are_those_since_a_moment(tmp_path):
    store = common.make_store("flash:emmc", tmp_path)
    store.system.commands, store.system.late = 10, 4
    since = common.commands_of(store)
    store.system.commands, store.system.late, store.system.host_seconds = 30, 9, 1e-4
    found = common.disk_of(store, since)
    assert found["late_share"] == 5 / 20 and found["host_us_per_command"] == pytest.approx(5)
    assert common.commands_of(None) == common.commands_of(common.make_store("flash", tmp_path)) == (0, 0, 0.0)


def test_what_an_experiment_does_not_understand_of_a_method_is_refused():
    settings = {"name": "quest", "budget": 64, "dtype": "int8", "slots": {"count": 9}}
    assert common.make_method(settings, ("dtype", "slots")).budget == 64
    with pytest.raises(ConfigError, match=r"quest: .* no use for a method's slots"):
        common.make_method(settings, ("dtype",))
    with pytest.raises(ConfigError, match="slots=9 must be settings"):
        common.make_slots({**settings, "slots": 9})


@pytest.mark.parametrize("run", [long_generation.run, adaptive_prefill.run, residency.run, throughput.run])
def test_runs_refuse_what_they_do_not_understand(run):
    config = ml_collections.ConfigDict({
        "methods": ({"name": "quest", "budget": 64, "whole": True},), "models": ("x",), "stores": ("x",),
        "drivers": ("x",), "steps": 9, "rounds": 1, "batches": (1,), "contexts": (9,), "slots": 0,
    })
    with pytest.raises(ConfigError, match="no use for a method's whole"):
        run(config, "unused")


PRESETS = (
    "demo", "demo:smoke", "evaluate", "evaluate:smoke", "leaderboard", "leaderboard:smoke", "leaderboard:quick",
    "leaderboard:ruler", "leaderboard:recall", "throughput", "throughput:smoke", "throughput:quick", "dynsplit_paper",
    *(f"dynakv_paper:{name}" for name in ("accuracy", "bits", "latency", "length", "decode", "share", "precision",
                                          "ratio", "buffer", "smoke")),
    *(f"dynsplit_paper:{name}" for name in ("weights", "sweep", "uncapped", "tenth", "passkey", "passkey_8k", "latency",
                                           "outputs", "memory", "reuse", "smoke")),
    *(f"kvswap_paper:{name}" for name in ("budget", "accuracy", "depths", "reasoning", "rolling", "entries", "sizes",
                                          "throughput", "batches", "heads", "models", "best", "groups", "selected",
                                          "rates", "breakdown", "pretrained", "gains", "reuse", "smoke")),
    "decoding", "decoding:smoke", "leaderboard:long", *(f"leaderboard:real{part}" for part in (
        "", "_ruler", "_qa", "_long", "_files", "_decoded")), "tune", "tune:smoke", "shift", "shift:clusters",
    "shift:large", "shift:smoke",
)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_ask_for_what_their_experiment_understands(preset):
    name, *args = preset.split(":")
    config = importlib.import_module(f"configs.{name}").get_config(*args)
    importlib.import_module(f"experiments.{config.experiment}").check(config)


@pytest.mark.parametrize("given", [0, -1, 1.5, True, (), (1, 0), (256.5,)], ids=str)
def test_counts_are_whole_and_not_below_their_least(given):
    common.check_counts({"samples": 1, "lengths": (1, 2)}, samples=1, lengths=1)
    with pytest.raises(ConfigError, match="samples"):
        common.check_counts({"samples": given}, samples=1)


def test_labels_have_the_names_of_configurations():
    for name in kvjax.METHODS:
        budget = {} if name in ("full", "rle") else {"budget": 256}
        assert common.label_of({"name": name, **budget}).partition("@")[0] == name


def test_too_little_text_is_refused():
    class Few:
        def encode(self, text, start):
            return range(10)

    with pytest.raises(ConfigError, match="lower batch"):
        common.held_out_rows(Few(), 2, 100)
