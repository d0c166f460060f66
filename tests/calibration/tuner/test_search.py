"""The tuner on the small test model: what it predicts against what a cache really takes, and resuming."""

import dataclasses
import time

import numpy as np
import pytest
from tiny import CONFIG, make_params

import kvjax
from kvjax.calibration import tuner
from kvjax.calibration.tuner import fifo, profile, search
from kvjax.calibration.tuner.solver import Setting
from kvjax.errors import ConfigError, FormatMismatch, ReadFailed, WriteFailed
from kvjax.inference import decode
from kvjax.inference.plan import Slots, make_plan, slot_pool
from kvjax.methods.shared.adapters import Adapters
from kvjax.store.flash.store import FlashStore
from kvjax.store.host import HostBranch, HostStore
from tests.store.conftest import skip_without

TEXT = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 90).tolist()
SPACE = tuner.Space(groups=(2, 4), sigmas=(2, 4), reuses=(24, 48))
SELECTED = 24
FAMILY = tuner.Family(SELECTED)


@pytest.fixture(scope="module")
def llm():
    return kvjax.LLM(CONFIG, make_params())


def parts(setting):
    return FAMILY.method(setting), FAMILY.slots(setting)


@pytest.mark.parametrize(("bits", "per_head", "dtype"), [
    (32, False, "float32"), (4, False, "bfloat16"), (4, True, "int8"),
])
@pytest.mark.parametrize("setting", [Setting(4, 2, 24), Setting(2, 4, 48), Setting(2, 4, 0)])
def test_predicted_memory_is_what_a_cache_takes(llm, setting, bits, per_head, dtype):
    family = tuner.Family(SELECTED, bits, per_head=per_head, dtype=dtype)
    method, slots = family.method(setting), family.slots(setting)
    texts = [2 * TEXT[:60], 2 * TEXT[:50]]
    cache = llm.prefill(texts, method=method, slots=slots, store=HostStore(), capacity=128, dtype=dtype)
    assert profile.memory_bytes(CONFIG, method, slots, 2, 128, dtype) == cache.resident_bytes
    cache.close()


@pytest.mark.parametrize("setting", [Setting(4, 2, 24), Setting(2, 4, 0)])
def test_predicted_memory_has_the_store_in_it(llm, setting, tmp_path):
    """Given two sequences that have decoded, with nothing left to be written."""
    skip_without("aio", tmp_path)
    family, store = tuner.Family(96), FlashStore(directory=tmp_path)
    method, slots = family.method(setting), family.slots(setting)
    texts = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (2, 900)).tolist()
    cache = llm.prefill(texts, method=method, slots=slots, store=store, capacity=1024)
    cache.branch.settle()
    done = llm.generate([[1, 2, 3, 4], [5, 6, 7, 8]], cache, max_new_tokens=8).cache
    done.flush()
    measured = done.resident_bytes + done.store_bytes
    assert profile.memory_bytes(CONFIG, method, slots, 2, 1024, "float32", store) == pytest.approx(measured, rel=0.2)
    assert done.store_bytes > 0.1 * measured
    for one in (done, cache):
        one.close()


def test_without_a_buffer_nothing_comes_back_and_little_is_kept(llm):
    """Memory of one layer's groups for all layers, and groups of each step are read anew."""
    space = tuner.Space((4,), (2,), (0, 24))
    assert search._reuse_rates(llm, TEXT, space, FAMILY)(0, 96) == 0.0
    least, kept = (profile.memory_bytes(CONFIG, *parts(Setting(4, 2, reuse)), 1, 96) for reuse in space.reuses)
    pool = slot_pool(make_plan(CONFIG, FAMILY.method(Setting(4, 2, 24)), 1, 96), 0, Slots())
    assert kept - least == (CONFIG.num_layers - 1) * pool.rows.nbytes
    found = tuner.tune(llm, HostStore(), TEXT, contexts=(96,), max_bytes=least, selected=SELECTED, space=space)
    assert found.slots(1, 96) == Slots(keep=False, prefetch="layer") and found.solutions[1, 96].memory == least


def test_a_larger_buffer_reuses_more(llm):
    """A buffer for all that was ever selected reads each group once; the least one reads some again."""
    need = profile.needed_groups(llm, FAMILY.method(Setting(4, 2, 24)), TEXT, 60)
    rates = [fifo.rate(need, slots) for slots in (7, 50)]
    assert 0 < rates[0] <= rates[1] < 1


def test_what_is_needed_is_what_a_cache_over_a_store_reads(llm):
    """But for groups that are being filled, which are in memory from their first token on."""
    method, slots, context = FAMILY.method(Setting(4, 2, 24)), FAMILY.slots(Setting(4, 2, 200)), 60
    need = profile.needed_groups(llm, method, TEXT, context)
    assert need.shape[0] == len(TEXT) - context and (need >= 0).any(axis=2).all()
    cache = llm.prefill(TEXT[:context], method=method, store=HostStore(), slots=slots, capacity=len(TEXT) + 1)
    usage = llm.score([*TEXT[context:], 0], cache).usage
    begun = method.complete_groups(len(TEXT) - 1) - method.complete_groups(context)
    read = fifo.misses(need, slots.count).sum()
    assert read <= usage.blocks_read / CONFIG.num_kv_heads <= read + CONFIG.num_layers * (begun + 1)
    cache.close()


def test_reading_nothing_takes_no_time():
    assert profile.StoredLayer(HostStore(), CONFIG, 4, 1, 96).read_seconds(0) == (0.0, 0.0)


class LateBranch(HostBranch):
    """Answers a read that was not announced 20 ms late, and notes what it was asked for."""

    def __init__(self, geometry, data):
        super().__init__(geometry, data)
        self.begun, self.asked = [], []

    def _begin(self, layer, ids):
        self.begun.append(ids.copy())

    def _load(self, layer, ids, targets, out):
        self.asked.append(ids.copy())
        if not (self.begun and np.array_equal(self.begun[-1], ids)):
            time.sleep(0.1)
        super()._load(layer, ids, targets, out)


@pytest.mark.parametrize("context, groups", [(8, 2), (96, 24)])  # fewer groups than are asked for, and more
def test_reads_are_timed_with_and_without_being_announced(context, groups):
    """No group is read twice while there are others, and what is waited for is not what keeps the caller busy."""
    made = []

    class LateStore(HostStore):
        def create(self, geometry, fingerprint, least_blocks=1):
            made.append(LateBranch(geometry, super().create(geometry, fingerprint)._data))
            return made[-1]

    whole, busy = profile.StoredLayer(LateStore(), CONFIG, 4, 2, context).read_seconds(5, repeats=3)
    assert whole >= 0.1 > busy > 0.0
    first = [ids.reshape(2, -1)[0] for ids in made[0].asked]
    assert len(first) == 7 and len(made[0].begun) == 3
    assert len(np.unique(first[:4])) == min(groups, 4 * 5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4"])
def test_what_was_announced_to_flash_is_what_is_landed(dtype, tmp_path):
    """Given asynchronous reads of three sequences, which C begins: only arrays as C takes them do not drop these."""
    skip_without("aio", tmp_path)
    made = profile.StoredLayer(FlashStore(directory=tmp_path), CONFIG, 4, 3, 96, dtype)
    made.read_seconds(5, repeats=3)
    stats = made._branch.stats()
    assert stats.prefetch_used == 3 * 3 * 5 and not stats.mispredicted
    made.close()


def test_programs_of_a_setting_go_with_it(llm):
    """Given that a process may have so many memory maps only, of which every compiled program holds some."""
    for setting in (Setting(4, 2, 24), Setting(2, 4, 48)):
        profile.compute_seconds(llm, *parts(setting), 2, 96, "bfloat16", repeats=1)
        assert decode.compiled_token(True)._cache_size() == 0


@pytest.mark.parametrize("layers", [1, 3])
def test_a_layer_computes_on_as_many_tokens_as_there_will_be(layers, monkeypatch):
    """Given a cache that has room for few tokens, which the repeats must not outgrow."""
    config = dataclasses.replace(CONFIG, num_layers=layers, windows=(None,) * layers)
    method, slots, seen, step = *parts(Setting(4, 2, 24)), [], decode.step

    def noted(plan, params, state, *args, **options):
        one = state.layers[0].state
        seen.append((int(state.length[0]), int(one.index.stored[0]), int(one.count[0, 0].sum())))
        return step(plan, params, state, *args, **options)

    monkeypatch.setattr(profile.decode, "step", noted)
    assert profile.compute_seconds(kvjax.LLM(config, make_params(config)), method, slots, 2, 48) > 0.0
    assert len(seen) == 10 and max(seen)[0] < 48
    assert seen[0][1] == seen[0][2] == method.stored_tokens(seen[0][0]) > 0


def test_solutions_are_kept_as_they_are_found(llm, tmp_path, monkeypatch):
    path, settings = tmp_path / "config.json", {"max_bytes": 10**8, "selected": SELECTED, "space": SPACE}
    first = tuner.tune(llm, HostStore(), TEXT, contexts=(96,), path=path, **settings)
    assert tuner.load(path) == first and first.solutions[1, 96].setting.sigma == 2
    monkeypatch.setattr(profile, "compute_seconds", lambda *args: pytest.fail("measured again"))
    assert tuner.tune(llm, HostStore(), TEXT, contexts=(96,), path=path, **settings) == first
    changes = (
        {"selected": 32}, {"bits": 4}, {"per_head": True}, {"aggregation": "mean"}, {"relax": 0.5},
        {"dtype": "bfloat16"}, {"max_bytes": 10**7}, {"space": tuner.Space()},
    )
    for change in changes:
        with pytest.raises(FormatMismatch, match=r"selected=24, bits=32, .* relax=0\.1"):
            tuner.tune(llm, HostStore(), TEXT, contexts=(96,), path=path, **{**settings, **change})
    for store, text in ((FlashStore(directory=tmp_path, profile="emmc"), TEXT), (HostStore(), TEXT[:-1])):
        with pytest.raises(FormatMismatch, match=r"on HostStore \(no device\), text \w+, .* not for the model"):
            tuner.tune(llm, store, text, contexts=(96,), path=path, **settings)


def test_two_devices_are_two_stores(llm, tmp_path, monkeypatch):
    stores = []
    for device in ("device nvme0n1", "device mmcblk0"):
        monkeypatch.setattr(search, "_device", lambda directory, device=device: device)
        stores.append(search._source(llm, FlashStore(directory=tmp_path), TEXT))
    assert "nvme0n1" in stores[0] and stores[0] != stores[1]
    monkeypatch.undo()
    assert search._device(str(tmp_path)).startswith("device ")


def test_a_tuning_that_was_interrupted_measures_what_is_missing(llm, tmp_path, monkeypatch):
    """Given two context lengths and a device that fails in the second: the first one's solution stands."""
    measured, failing = [], True

    def compute(llm, method, slots, batch, capacity, dtype):
        if capacity == 96 and failing:
            raise ReadFailed("the device is gone")
        measured.append(capacity)
        return 1.0

    monkeypatch.setattr(profile, "compute_seconds", compute)
    settings = {"max_bytes": 10**8, "selected": SELECTED, "contexts": (48, 96), "path": tmp_path / "config.json",
                "space": tuner.Space((4,), (2,), (24,))}
    with pytest.raises(ReadFailed):
        tuner.tune(llm, HostStore(), TEXT, **settings)
    first = tuner.load(settings["path"]).solutions
    failing = False
    found = tuner.tune(llm, HostStore(), TEXT, **settings).solutions
    assert measured == [48, 96] and list(first) == [(1, 48)] and found[1, 48] == first[1, 48]


def test_adapters_of_each_sigma_are_used_and_those_of_another_model_refused(llm, tmp_path):
    rng, directories = np.random.default_rng(0), {}
    for sigma in SPACE.sigmas:
        rank = CONFIG.num_kv_heads * CONFIG.head_dim // sigma
        basis = tuple(rng.normal(size=(CONFIG.num_kv_heads, CONFIG.head_dim, rank)).astype(np.float32)
                      for _ in range(CONFIG.num_layers))
        for name, fingerprint in (("mine", llm.identity), ("other", "another model")):
            directories[name, sigma] = str(tmp_path / f"{name}_{sigma}")
            Adapters(basis, True, fingerprint).save(directories[name, sigma])
    settings = {"contexts": (96,), "max_bytes": 10**8, "selected": SELECTED, "space": SPACE}
    mine = {sigma: directories["mine", sigma] for sigma in SPACE.sigmas}
    found = tuner.tune(llm, HostStore(), TEXT, adapters=mine, **settings)
    method = found.method(1, 96)
    assert method.adapters == mine[method.sigma] and method.fitted.has_ratio(method.sigma)
    with pytest.raises(FormatMismatch, match="another model"):
        tuner.tune(llm, HostStore(), TEXT, adapters={**mine, 4: directories["other", 4]}, **settings)


def test_costs_between_knots_are_not_measured(llm, monkeypatch):
    """Given three batch sizes and two knots, the middle one is solved with what lies between theirs."""
    measured, seconds = [], {1: 3.0, 2: 7.0, 3: 5.0}

    def compute(llm, method, slots, batch, capacity, dtype):
        measured.append(batch)
        return seconds[batch]

    monkeypatch.setattr(profile, "compute_seconds", compute)
    settings = {"max_bytes": 10**8, "selected": SELECTED, "space": tuner.Space((4,), (2,), (24,)), "contexts": (96,)}
    found = tuner.tune(llm, HostStore(), TEXT, batches=(1, 2, 3), knots=(2, 2), **settings)
    assert sorted(measured) == [1, 3] and found.solutions[2, 96].compute == pytest.approx(4.0)
    assert found.solutions[2, 96].memory == profile.memory_bytes(CONFIG, *parts(Setting(4, 2, 24)), 2, 96)
    tuner.tune(llm, HostStore(), TEXT, batches=(1, 2, 3), knots=(3, 2), **settings)
    assert sorted(measured) == [1, 1, 2, 3, 3]


def test_computing_is_measured_with_the_group_in_the_middle(llm, monkeypatch, tmp_path):
    """Given three group sizes, of which none hides its reads, so that all are tried: once for each sigma and buffer."""
    measured = []
    monkeypatch.setattr(profile, "compute_seconds", lambda llm, method, slots, *pair: measured.append(
        (method.group, slots.count)) or 1e-9)
    space = tuner.Space((2, 4, 8), (2,), (24, 48))
    tuner.tune(llm, FlashStore(directory=tmp_path), TEXT, contexts=(96,), max_bytes=10**8, selected=SELECTED,
               relax=0.0, space=space)
    assert [group for group, _ in measured] == [4, 4] and measured[0][1] < measured[1][1]


def test_rates_of_another_machine_are_taken(llm, monkeypatch, tmp_path):
    """Given the rates that a tuning found, another one records no text."""
    settings = {"max_bytes": 10**8, "selected": SELECTED, "space": SPACE, "contexts": (96,)}
    first = tuner.tune(llm, HostStore(), TEXT, **settings)
    monkeypatch.setattr(profile, "needed_groups", lambda *args: pytest.fail("recorded again"))
    other = tuner.tune(llm, HostStore(), TEXT, rates=first.tables.rates, **settings)
    assert other.tables.rates == first.tables.rates
    assert other.solutions[1, 96].reuse_rate == first.tables.rates[96, other.solutions[1, 96].setting.reuse]
    with pytest.raises(FormatMismatch, match=r"other rates for \(context, C\) = \[\(96, 24\)\]"):
        path = tmp_path / "tuning.json"
        tuner.tune(llm, HostStore(), TEXT, path=path, rates=first.tables.rates, **settings)
        tuner.tune(llm, HostStore(), TEXT, path=path, rates={(96, 24): 1.0}, **settings)
    with pytest.raises(ConfigError, match=r"rates=.*81.* must be shares"):
        tuner.tune(llm, HostStore(), TEXT, rates={(96, 24): 81.0}, **settings)


def test_numpys_integers_are_saved(unchecked, llm, tmp_path):
    path, numbers = tmp_path / "tuning.json", np.asarray([1, 96, 10**8, SELECTED, 32])
    tuner.tune(llm, HostStore(), TEXT, batches=numbers[:1], contexts=numbers[1:2], max_bytes=numbers[2],
               selected=numbers[3], bits=numbers[4], relax=np.float32(0.25), space=SPACE, path=path)
    assert set(tuner.load(path).solutions) == {(1, 96)}


def test_a_text_longer_than_the_context_is_cut(llm, monkeypatch):
    """Given a context of a third of the text: as large a share is selected as there."""
    asked, context = [], len(TEXT) // 3
    monkeypatch.setattr(profile, "needed_groups", lambda llm, method, tokens, prompt, dtype: asked.append(
        (len(tokens), prompt, method.budget)) or np.zeros((2, 1, 1), np.int32))
    family, space = tuner.Family(SELECTED), tuner.Space((1,), (2,), (24,))
    search._reuse_rates(llm, TEXT, space, family)(24, context)
    most = family.method(Setting(1, 2, 24)).budget - SELECTED
    assert asked == [(context, context // 2, most + SELECTED // 2)]


def test_bad_settings_are_refused(unchecked, llm, tmp_path):
    with pytest.raises(ConfigError, match="budget"):
        tuner.tune(llm, HostStore(), TEXT, contexts=(96,), max_bytes=10, selected=SELECTED, space=SPACE)
    for name in ("batches", "contexts"):
        for sizes in ((), (0,), 8, "96"):
            with pytest.raises(ConfigError, match=f"{name}="):
                tuner.tune(llm, HostStore(), TEXT, max_bytes=10**8, **{name: sizes})
    for knots in ((1, 2), (2,), (3, 0), 3):
        with pytest.raises(ConfigError, match="knots="):
            tuner.tune(llm, HostStore(), TEXT, max_bytes=10**8, contexts=(96,), knots=knots)
    for change, error in (({"max_bytes": "2G"}, "max_bytes='2G'"), ({"relax": -0.1}, "relax=-0.1"),
                          ({"relax": "0.1"}, "relax='0.1'")):
        with pytest.raises(ConfigError, match=error):
            tuner.tune(llm, HostStore(), TEXT, contexts=(96,), **{"max_bytes": 10**8, **change})
    with pytest.raises(ConfigError, match="no store"):
        tuner.tune(llm, str(tmp_path), TEXT, max_bytes=10**8)
    with pytest.raises(WriteFailed, match="no directory"):
        tuner.tune(llm, HostStore(), TEXT, max_bytes=10**8, path=tmp_path / "nowhere" / "tuning.json")
    with pytest.raises(ConfigError, match="too few"):
        tuner.tune(llm, HostStore(), TEXT[:10], max_bytes=10**8, selected=SELECTED)
    with pytest.raises(ConfigError, match=r"use FlashStore\(directory="):
        tuner.tune(llm, FlashStore(file=tmp_path / "one.kv"), TEXT, max_bytes=10**8, selected=SELECTED)
    with pytest.raises(ConfigError, match="codec='rle'"):
        tuner.tune(llm, FlashStore(directory=tmp_path, codec="rle"), TEXT, max_bytes=10**8, selected=SELECTED)


def test_a_short_text_stands_for_a_longer_context(llm, monkeypatch):
    """Given a prompt of an eighth of the context: an eighth of what is selected, and buffers of the same multiples."""
    slots, prompt = [], len(TEXT) // 2
    monkeypatch.setattr(search.fifo, "rate", lambda need, count: slots.append((len(need), count)) or 0.5)
    space, family = tuner.Space((1,), (2,), (24, 48)), tuner.Family(SELECTED)
    rate = search._reuse_rates(llm, TEXT, space, family)
    assert [rate(reuse, 8 * prompt) for reuse in space.reuses] == [0.5, 0.5]
    assert slots == [(len(TEXT) - prompt, 3 + 1), (len(TEXT) - prompt, 2 * 3)]
