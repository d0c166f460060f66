"""The tuner on the small test model: what it predicts against what a cache really takes, and resuming."""

import numpy as np
import pytest
from tiny import CONFIG, make_params

import kvjax
from kvjax import tuner
from kvjax.errors import ConfigError, FormatMismatch
from kvjax.store.host import HostStore
from kvjax.tuner import profile, tuning
from kvjax.tuner.solver import Setting

TEXT = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 90).tolist()
SPACE = tuner.Space(groups=(2, 4), sigmas=(2, 4), reuses=(24, 48))
SELECTED = 24


@pytest.fixture(scope="module")
def llm():
    return kvjax.LLM(CONFIG, make_params())


def parts(setting):
    return tuning.make_method(setting, SELECTED, {}), tuning.make_slots(setting, SELECTED)


@pytest.mark.parametrize("setting", [Setting(4, 2, 24), Setting(2, 4, 48)])
def test_predicted_memory_is_what_a_cache_takes(llm, setting):
    method, slots = parts(setting)
    cache = llm.prefill([TEXT[:60], TEXT[:50]], method=method, slots=slots, store=HostStore(), capacity=96)
    assert profile.memory_bytes(CONFIG, method, slots, 2, 96) == cache.resident_bytes
    cache.close()


def test_a_larger_buffer_reuses_more(llm):
    """A buffer for all that was ever selected reads each group once; the least one reads some again."""
    rates = [profile.reuse_rate(llm, *parts(Setting(4, 2, reuse)), TEXT, 60) for reuse in (24, 200)]
    assert 0 < rates[0] <= rates[1] < 1


def test_reading_nothing_takes_no_time():
    assert profile.read_seconds(HostStore(), CONFIG, 4, 0, 1) == 0.0
    assert profile.read_seconds(HostStore(), CONFIG, 4, 5, 2) > 0.0


def test_solutions_are_kept_as_they_are_found(llm, tmp_path, monkeypatch):
    path, settings = tmp_path / "config.json", {"max_bytes": 10**8, "selected": SELECTED, "space": SPACE}
    first = tuner.tune(llm, HostStore(), TEXT, contexts=(96,), path=path, **settings)
    assert tuner.load(path) == first and first.solutions[1, 96].setting.sigma == 2
    monkeypatch.setattr(profile, "compute_seconds", lambda *args: pytest.fail("measured again"))
    assert tuner.tune(llm, HostStore(), TEXT, contexts=(96,), path=path, **settings) == first
    with pytest.raises(FormatMismatch, match="selected=24"):
        tuner.tune(llm, HostStore(), TEXT, contexts=(96,), path=path, **{**settings, "selected": 32})


def test_bad_settings_are_refused(llm):
    with pytest.raises(ConfigError, match="budget"):
        tuner.tune(llm, HostStore(), TEXT, contexts=(96,), max_bytes=10, selected=SELECTED, space=SPACE)
    with pytest.raises(ConfigError, match="too few"):
        tuner.tune(llm, HostStore(), TEXT[:10], max_bytes=10**8, selected=SELECTED)
