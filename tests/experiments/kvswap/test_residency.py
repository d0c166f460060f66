"""The replay of a recorded decode against the real one, and what the experiment refuses."""

import numpy as np
import pytest
from tiny import CONFIG, make_params

import kvjax
from configs.residency import get_config
from experiments.kvswap import residency
from kvjax.errors import ConfigError
from kvjax.inference import decode

METHOD = kvjax.Quest(budget=24, sinks=2, window=4, page=4)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 80)).astype(np.int32)


@pytest.fixture(scope="module")
def llm():
    return kvjax.LLM(CONFIG, make_params())


@pytest.fixture(scope="module")
def trace(llm):
    cache = llm.prefill(TOKENS[:, :40].tolist(), method=METHOD, capacity=96)
    return residency.record(llm, cache, TOKENS[:, 40:])


@pytest.mark.parametrize("policy", ["lru", "cluster"])
def test_a_replay_reads_what_the_real_cache_reads(llm, trace, policy, tmp_path):
    """Given a decode over a store with few slots, every step misses as many blocks as its replay."""
    slots = trace.need.shape[-1] + 1
    cache = llm.prefill(
        TOKENS[:, :40].tolist(), method=METHOD, capacity=96, store=kvjax.FlashStore(directory=tmp_path),
        slots=kvjax.Slots(count=slots, policy=policy),
    )
    state, missed = cache.state, []
    for column in TOKENS[:, 40:].T:
        done = decode.step(cache.plan, llm.params, state, column, donate=True)
        state = done.state
        missed.append(sum(int(report.stats.missed.sum()) for report in done.reports))
    cache.close()
    np.testing.assert_array_equal(residency.replay(trace, slots=slots, policy=policy), missed)
    assert 0 < residency.best_possible(trace, slots) <= sum(missed)


def test_a_trace_knows_which_blocks_were_written(trace):
    """Given one token a step and a full window, each lane appends one row to one block."""
    blocks = trace.count.shape[-1]
    grown = np.diff(trace.count.astype(int), axis=0)
    for step, lane in np.ndindex(*grown.shape[:2]):
        written = [b for b in trace.written[step, lane] if b < blocks]
        assert written == list(np.flatnonzero(grown[step, lane])) and len(written) == 1


def test_heads_that_share_blocks_are_one_lane(llm):
    """Given groups of tokens that all heads fetch alike, a step needs each once, as its store is asked."""
    method = kvjax.KVSwap(budget=24, sinks=2, window=4, group=4, sigma=2)
    cache = llm.prefill(TOKENS[:, :40].tolist(), method=method, capacity=96)
    found = residency.record(llm, cache, TOKENS[:, 40:44])
    assert found.need.shape[1] == CONFIG.num_layers * len(TOKENS)


@pytest.mark.parametrize("change", [{"times_needed": ()}, {"times_needed": (0.5, 2.0)}, {"steps": 0}, {"context": 0}])
def test_bad_settings_are_refused(change):
    config = get_config("smoke")
    residency.check(config)
    with config.unlocked():
        config.update(change)
    with pytest.raises(ConfigError, match=next(iter(change))):
        residency.check(config)
