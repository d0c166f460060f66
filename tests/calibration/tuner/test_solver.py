"""The greedy solver against exhaustive reading of appendix A.4, and its file."""

import dataclasses
import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.calibration.tuner import tuning
from kvjax.calibration.tuner.solver import Costs, Limits, Setting, Solution, Space, solve
from kvjax.errors import ConfigError, FormatMismatch, ReadFailed, WriteFailed
from kvjax.inference.plan import Slots

SPACE = Space(groups=(1, 2, 4, 8), sigmas=(4, 8, 16), reuses=(100, 200, 300))


def device(bandwidth, latency, tokens=400, busy=0.0):
    """A made-up device: memory of 32 KiB / sigma plus the buffer, reads of whole groups that the buffer lacks; each of
    these keeps the processor busy for so many seconds."""
    return Costs(
        memory=lambda s: 32768 // s.sigma + 16 * s.reuse,
        read=lambda s: (1 - s.reuse / 400) * (tokens / s.group * latency + tokens / bandwidth),
        busy=lambda s: (1 - s.reuse / 400) * tokens / s.group * busy,
        compute=lambda s: 1.0 + 0.01 / s.sigma, reuse_rate=lambda reuse: reuse / 400,
    )


def test_a_fast_device_gets_the_best_quality():
    assert solve(SPACE, 10**6, device(1e6, 0.0)).setting == Setting(1, 4, 100)


def test_groups_grow_until_reading_is_hidden():
    found = solve(SPACE, 10**6, device(1e6, 0.01))  # 0.75 * 400 * 0.01 / G <= 1 from G = 4 on
    assert found.setting == Setting(4, 4, 100) and found.exposed <= 0


def test_the_buffer_grows_only_after_the_largest_group():
    found = solve(SPACE, 10**6, device(400 / 1.9, 0.0))  # (1 - C / 400) * 1.9 <= 1 from C = 200 on
    assert found.setting == Setting(1, 4, 200)


def test_memory_for_the_buffer_comes_from_the_low_rank_keys():
    slow = device(400 / 1.9, 0.0)
    assert solve(SPACE, 32768 // 8 + 16 * 200, slow).setting == Setting(1, 8, 200)


def test_relaxation_accepts_reading_that_is_not_hidden():
    slow = device(400 / 1.9, 0.0)  # 1.425 s of reading against 1 s at C = 100
    room = 32768 // 4 + 16 * 100  # for no larger buffer
    assert solve(SPACE, room, slow, relax=0.45).setting == Setting(1, 4, 100)
    assert solve(SPACE, room, slow, relax=0.35).setting == Setting(1, 8, 200)


def test_memory_that_is_left_goes_into_the_buffer_where_that_is_faster():
    """Given 1.425 s of reading against 1 s at C = 100, which 0.45 accepts; from C = 200 on nothing is gained."""
    assert solve(SPACE, 10**6, device(400 / 1.9, 0.0), relax=0.45).setting == Setting(1, 4, 200)


def test_requests_that_keep_the_processor_busy_make_groups_grow():
    """Given a fast device and 1 ms of work for each of the 300 tokens that are read, groups of 4 prolong a layer by
    7.5 %; where nothing may be seen of reading, the fastest setting is what is left."""
    found = solve(SPACE, 32768 // 4 + 16 * 100, device(1e6, 0.0, busy=1e-3), relax=0.1)
    assert found.setting == Setting(4, 4, 100) and found.exposed == pytest.approx(0.075)
    assert solve(SPACE, 10**6, device(1e6, 0.0, busy=1e-3)).setting == Setting(8, 4, 300)


def test_a_budget_that_nothing_fits_is_refused():
    with pytest.raises(ConfigError, match=f"{32768 // 16 + 1600:,}"):
        solve(SPACE, 100, device(1e6, 0.0))


@pytest.mark.parametrize("change", [{"groups": ()}, {"sigmas": (8, 4)}, {"reuses": (-1, 1)}, {"groups": (2, 2)},
                                    {"sigmas": (True, 2)}])
def test_a_space_without_order_is_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        Space(**change)


@settings(max_examples=200)
@given(bandwidth=st.floats(50, 5000), latency=st.floats(0, 0.05), budget=st.integers(3000, 20000),
       relax=st.sampled_from([0.0, 0.3, 0.6]), busy=st.sampled_from([0.0, 1e-3]))
def test_a_solution_is_the_first_that_hides_enough_or_else_the_fastest(bandwidth, latency, budget, relax, busy):
    """Given any device: of all settings within the budget, in the order C, then G, then sigma; the first with a larger
    buffer if a layer is then faster by a fiftieth, as the fastest has to be."""
    costs = device(bandwidth, latency, busy=busy)

    def seconds(s):
        return max(costs.read(s), costs.compute(s) + costs.busy(s))

    fitting = [
        next((s for sigma in SPACE.sigmas if costs.memory(s := Setting(group, sigma, reuse)) <= budget), None)
        for reuse in SPACE.reuses for group in SPACE.groups
    ]
    fitting = [s for s in fitting if s is not None]
    if not fitting:
        with pytest.raises(ConfigError):
            solve(SPACE, budget, costs, relax)
        return
    hidden = [s for s in fitting if seconds(s) - costs.compute(s) <= relax * costs.compute(s)]
    expected = hidden[0] if hidden else fitting[0]
    larger = [dataclasses.replace(expected, reuse=reuse) for reuse in SPACE.reuses if reuse > expected.reuse]
    for other in [s for s in larger if costs.memory(s) <= budget] if hidden else fitting:
        expected = other if seconds(other) < 0.98 * seconds(expected) else expected
    found = solve(SPACE, budget, costs, relax)
    assert found.setting == expected and found.memory <= budget
    assert found.reuse_rate == expected.reuse / 400
    assert found.seconds == seconds(expected)


# the file -----------------------------------------------------------------------------------------

FOUND = tuning.Tuning(
    {(1, 4096): Solution(Setting(4, 8, 800), 1000, 0.001, 0.0003, 0.002, 0.5),
     (8, 4096): Solution(Setting(8, 16, 600), 900, 0.002, 0.0002, 0.002, 0.4),
     (8, 32768): Solution(Setting(16, 32, 400), 800, 0.003, 0.0001, 0.002, 0.3)},
    tuning.Family(400, bits=4, adapters={32: "adapters_32"}, per_head=True, aggregation="mean", dtype="bfloat16"),
    Limits(10**9, 0.2, Space(sigmas=(2, 3))), fingerprint="model",
)


def test_what_is_loaded_is_what_was_saved(tmp_path):
    FOUND.save(tmp_path / "config.json")
    assert tuning.load(tmp_path / "config.json") == FOUND


@pytest.mark.parametrize(("batch", "context", "pair"), [
    (1, 4096, (1, 4096)), (2, 4096, (1, 4096)), (16, 3000, (8, 4096)), (8, 20000, (8, 32768)), (4, 32768, (8, 32768)),
])
def test_a_run_takes_the_nearest_solution(batch, context, pair):
    assert FOUND.nearest(batch, context) == FOUND.solutions[pair]


def test_a_solution_becomes_a_method_and_its_slots():
    method = FOUND.method(8, 4096, dense_layers=1)
    assert (method.group, method.sigma, method.bits, method.adapters, method.dense_layers) == (8, 16, 4, None, 1)
    assert method.per_head and method.aggregation == "mean" and method.budget - method.sinks - method.window == 400
    assert FOUND.slots(8, 4096) == Slots(count=75, policy="fifo", prefetch="layer")
    assert FOUND.slots(8, 32768).count == 27  # 25 groups of 16, the unfinished one, one that is only rewritten


@pytest.mark.parametrize("name", ["budget", "group", "sigma", "bits", "aggregation"])
def test_what_a_tuning_sets_is_not_for_a_run_to_set(name):
    with pytest.raises(ConfigError, match=f"the tuning sets {name}"):
        FOUND.method(8, 4096, **{name: 8})


def test_a_list_is_a_space_too(tmp_path):
    """What is loaded of it equals it, so that a tuning can be resumed."""
    space = Space(groups=[1, 2], sigmas=range(2, 4))
    assert space == Space(groups=(1, 2), sigmas=(2, 3)) and hash(space) == hash(Space(groups=(1, 2), sigmas=(2, 3)))
    found = dataclasses.replace(FOUND, limits=Limits(10**9, 0.2, space))
    found.save(tmp_path / "config.json")
    assert tuning.load(tmp_path / "config.json") == found


@pytest.mark.parametrize("change", [{"selected": 0}, {"bits": 0}, {"adapters": {0: "there"}}])
def test_a_family_of_impossible_numbers_is_refused(change):
    with pytest.raises(ConfigError, match="must be a positive integer"):
        tuning.Family(**change)


def test_a_family_of_an_unknown_type_is_refused():
    with pytest.raises(ConfigError, match="cannot be kept as 'float8'"):
        tuning.Family(dtype="float8")


def test_a_model_is_loaded_with_its_tuning(tmp_path):
    """Without a method, prefill takes the tuned one, its slots and its type; a tuning of another model is refused."""
    model = pathlib.Path(kvjax.__file__).parent / "reference"
    dataclasses.replace(FOUND, fingerprint=kvjax.load(model).identity).save(tmp_path / "config.json")
    llm = kvjax.load(model, tuning=tuning.load(tmp_path / "config.json"))
    cache = llm.prefill("def main(argv):\n    return 0\n" * 12, capacity=4000, store=kvjax.HostStore())
    assert cache.plan.method == FOUND.method(1, 4096) and cache.plan.dtype == FOUND.family.dtype
    assert cache.state.layers[-1].pool.slots == FOUND.slots(1, 4096).count
    with pytest.raises(ConfigError, match="caches over a store"):
        llm.prefill("def main(argv):\n    return 0\n" * 12)
    FOUND.save(tmp_path / "other.json")
    with pytest.raises(FormatMismatch, match="not for"):
        kvjax.load(model, tuning=tuning.load(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match=r"tuner\.load"):
        kvjax.llm.check_tuning(tmp_path / "other.json")


def test_bad_files_are_typed_errors(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(ReadFailed, match=r"tune\.py"):
        tuning.load(path)
    path.write_text("[]")
    with pytest.raises(ReadFailed):
        tuning.load(path)
    path.write_text(json.dumps({"version": 99}))
    with pytest.raises(FormatMismatch):
        tuning.load(path)
    path.write_text(json.dumps({"version": tuning.VERSION}))
    with pytest.raises(ReadFailed, match="solutions"):
        tuning.load(path)
    with pytest.raises(WriteFailed):
        FOUND.save(tmp_path / "nowhere" / "config.json")


def test_a_save_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    FOUND.save(tmp_path / "config.json")
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "write_text", lambda path, text: path.write_bytes(text[:9].encode()) and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dataclasses.replace(FOUND, fingerprint="other").save(tmp_path / "config.json")
    assert tuning.load(tmp_path / "config.json") == FOUND
