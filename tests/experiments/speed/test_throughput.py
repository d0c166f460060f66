"""Made-up keys, methods in turns, and what the table of times says about the device under an emulated one."""

import ml_collections
import numpy as np
import pytest
from harness import METHODS
from tiny import CONFIG, PROMPT, start

from experiments.speed import made_up, throughput, timing
from kvjax.inference import decode
from kvjax.store.host import HostStore

ROW = {"model": "cache-path", "method": "full", "store": "flash:emmc", "context": 64, "batch": 1, "tokens_per_s": 10.0}


@pytest.mark.parametrize(("share", "said"), [(0.5, True), (0.1, False), (None, False)])
def test_a_device_that_the_host_cannot_keep_up_with_is_named(share, said, capsys):
    throughput.print_table([ROW, {**ROW, "late_share": share} if share is not None else ROW])
    printed = capsys.readouterr().out
    assert ("slower than that device" in printed) == said
    assert share is None or f"{100 * share:.2f}" in printed


@pytest.mark.parametrize(("run", "alike"), [(1.0, 1 / 256), (4.0, 0.75)])
def test_neighbouring_made_up_keys_are_of_one_clump_as_often_as_asked(run, alike):
    shape = made_up.shape("cache-path")
    key = np.asarray(made_up.keys(shape, 4000, 0, run)[0])[0].reshape(4000, -1)
    apart = np.square(key[1:] - key[:-1]).mean(-1)  # within a clump all of the variance, between clumps twice of it
    assert abs((apart < 1.5 * made_up.key_variance(shape)).mean() - alike) < 0.03


@pytest.mark.parametrize("name", ["quest", "kvswap"])
def test_bytes_of_tokens_that_are_in_the_blocks_are_useful(params, tokens, name):
    """Of heads with blocks of their own and of heads that share them: a key and a value of each token and head."""
    plan, state, _, branch = start(params, tokens, METHODS[name], HostStore(), keep=False)
    before, moved = branch.stats(), []
    for i in range(3):
        done = decode.step(plan, params, state, tokens[np.arange(2), np.asarray(PROMPT) + i], donate=True)
        state = done.state
        moved.append(timing.moved(done))
    row = timing.traffic_row(before, branch.stats(), moved, plan)
    tokens_read = sum(int(one.rows) for one in moved)
    reads = branch.stats().reads - before.reads
    assert tokens_read > 0 and row["useful_bytes_per_read"] == tokens_read * 2 * 4 * CONFIG.head_dim / reads
    assert row["reads_per_token"] == reads / 6 and row["effective_bandwidth"] > row["useful_bytes_per_read"]
    branch.close()


def groups(**changes):
    config = {"contexts": (8, 16), "batches": (1,), "stores": ("memory", "flash"), "rounds": 1,
              "methods": ({"name": "full"}, {"name": "quest", "label": "other"}), **changes}
    config = ml_collections.ConfigDict(config)
    done = {("reference", "other", "memory", 8, 1)}
    return [[(head["method"], head["store"], head["context"]) for head, _, _ in group]
            for group in throughput._groups("reference", config, done)]


def test_what_is_left_to_measure_is_measured_one_after_the_other_or_in_turns():
    each = [(method, store, context) for context in (8, 16) for store in ("memory", "flash")
            for method in ("full", "other") if (method, store, context) != ("other", "memory", 8)]
    assert groups() == [[one] for one in each]
    assert groups(rounds=2) == [each[:1], each[1:3], each[3:5], each[5:]]


def test_methods_take_turns_each_in_a_directory_of_its_own(monkeypatch, tmp_path):
    events = []

    class Timed:
        def __init__(self, llm, head, settings, batch, config, directory, recordings):
            self.name = head["method"]
            events.append((self.name, directory.name))

        def take_turn(self):
            events.append(self.name)

        def row(self):
            return {"method": self.name}

    monkeypatch.setattr(throughput, "Subject", Timed)
    group = [({"method": name}, {}, 1) for name in "ab"]
    rows = list(throughput.in_turns(None, group, ml_collections.ConfigDict({"rounds": 2}), tmp_path))
    assert events == [("a", "store_0"), ("b", "store_1"), "a", "b", "a", "b"]
    assert rows == [{"method": "a"}, {"method": "b"}]


def test_the_median_is_of_all_turns_without_their_warm_up():
    turns = [np.array([9.0, 5, 5, 5, 1, 2]), np.array([4.0, 5, 5, 5, 3, 4])]
    row = throughput._times("fused", turns, outputs=(2,))
    assert row["fused_ms"] == 2500 and row["fused_compile_s"] == 9 and row["fused_2_s"] == 10
