"""What is recorded is what was selected, what is played is what was recorded, and reuse is that of the recording."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from tiny import CAPACITY, CONFIG

import kvjax
from configs.kvswap_paper import get_config
from experiments.kvswap import reuse
from experiments.speed import replay, throughput, timing
from kvjax.cache import state as caching
from kvjax.calibration.tuner import fifo
from kvjax.errors import CheckpointError, ConfigError
from kvjax.inference import decode
from kvjax.methods import InfiniGen, KVSwap

TEXTS, TEXT, RECORDED = 2, 40, 8
CONTEXT, STEPS = 80, 12  # more steps than recorded
SIZES = {"budget": 24, "sinks": 2, "window": 4, "sigma": 2}  # 18 selected tokens
METHODS = {"kvswap": KVSwap(group=2, **SIZES), "infinigen": InfiniGen(**SIZES)}
SLOTS = {"kvswap": 14, "infinigen": 26}


@pytest.fixture(scope="module")
def llm(params):
    return kvjax.LLM(CONFIG, params)


@pytest.fixture(scope="module", params=METHODS)
def method(request):
    return METHODS[request.param]


@pytest.fixture(scope="module")
def texts(tokens):
    return tokens[:, :TEXT].tolist()


def ranks_of(method):
    return -(-replay.groups_of(method) // TEXTS)


@pytest.fixture(scope="module")
def recording(llm, method, texts):
    share = replay.selecting(method, 18 // TEXTS)
    return replay.record(llm, share, texts, RECORDED, ranks_of(method))


def decoded(llm, method, tokens, driver="fused", **cache):
    """Every step of a staggered run."""
    cache = llm.prefill(tokens[:, :CONTEXT].tolist(), method=method, capacity=CAPACITY, **cache)
    state = replay.stagger(method, cache.state) if isinstance(method, replay.Replay) else cache.state
    for _ in range(STEPS):
        done = decode.step(cache.plan, llm.params, state, jnp.zeros(2, jnp.int32), driver=driver)
        state = done.state
        yield done
    dataclasses.replace(cache, state=state).close()


def test_recorded_are_the_complete_groups_in_their_order(llm, method, texts, recording):
    """Given the positions that each step attended, their groups are recorded, without the unfinished one."""
    share = replay.selecting(method, 18 // TEXTS)
    cache = llm.prefill([text[:-RECORDED] for text in texts], method=share, capacity=TEXT + 1)
    state, heads = cache.state, recording.block.shape[3]
    for step in range(RECORDED):
        complete = (TEXT - RECORDED + step - method.sinks - (method.window - 1)) // method.group
        fed = np.asarray(texts, np.int32)[:, step - RECORDED]
        done = decode.step(cache.plan, llm.params, state, fed)
        state = done.state
        for layer, b, head in np.ndindex(CONFIG.num_layers, TEXTS, heads):
            pos = np.asarray(done.reports[layer].selected)[b, head]
            groups = list(dict.fromkeys(int(p - method.sinks) // method.group for p in pos if p >= 0))
            expected = [group for group in groups if group < complete][: ranks_of(method)]
            assert recording.block[step, layer, b, head].tolist() == expected
    assert recording.width == (TEXT - method.sinks - (method.window - 1)) // method.group
    assert heads == (1 if method.shared else CONFIG.num_kv_heads)


@pytest.mark.parametrize(("where", "driver"), [("memory", "staged"), ("flash", "fused")])
def test_each_step_reads_and_attends_what_was_recorded(llm, method, tokens, recording, tmp_path, where, driver):
    """Given a batch and more steps than recorded, each row plays its own stretch, and comes back to the start."""
    player, unfinished = replay.replayed(method, recording), []
    cache = {} if where == "memory" else {
        "store": kvjax.FlashStore(directory=tmp_path),
        "slots": kvjax.Slots(count=SLOTS[method.name], policy="fifo", prefetch="layer"),
    }
    for step, done in enumerate(decoded(llm, player, tokens, driver, **cache)):
        for layer, b, head in np.ndindex(CONFIG.num_layers, 2, CONFIG.num_kv_heads):
            at, none = (step + b * RECORDED // 2) % RECORDED, done.state.layers[layer].state.count.shape[-1]
            played = recording.block[at, layer, :, head % recording.block.shape[3]]
            expected = {int(group) + text * recording.width for text in range(TEXTS) for group in played[text]}
            loaded = np.asarray(done.state.layers[layer].state.loaded)[b, head]
            loaded = [int(block) for block in loaded if block < none]
            stored = CONTEXT + step - method.sinks - (method.window - 1)
            own = [stored // method.group] if stored % method.group else []
            assert loaded[: len(own)] == own and len(loaded) == len(own) + replay.groups_of(method)
            assert set(loaded[len(own) :]) <= expected and len(set(loaded)) == len(loaded)
            unfinished += own
        for report in done.reports:
            assert np.all(np.asarray(report.attended) == method.budget)
            assert np.all((np.asarray(report.selected) >= method.sinks).sum(-1) == 18)
    assert bool(unfinished) == (method.group > 1)


def test_groups_are_shared_out_to_texts_by_rank(recording, method):
    """Given M groups of two texts, each has half of them, its best ones, one more where they are odd."""
    table, count = replay.replayed(method, recording).table, replay.groups_of(method)
    ranks = [count // 2, count - count // 2]
    for text, share in enumerate(ranks):
        mine = table[..., (table[0, 0, 0] // recording.width) == text] - text * recording.width
        np.testing.assert_array_equal(mine, recording.block[:, :, text, :, :share])
    assert table.shape[-1] == count


@pytest.mark.parametrize("keep", [True, False])
def test_reuse_is_that_of_the_recording(llm, method, tokens, recording, tmp_path, keep):
    """Given FIFO slots, every step of the store misses as many groups as the simulation in NumPy."""
    player = replay.replayed(method, recording)
    slots = kvjax.Slots(count=SLOTS[method.name], policy="fifo", prefetch="layer", keep=keep)
    steps = decoded(llm, player, tokens, store=kvjax.FlashStore(directory=tmp_path), slots=slots)
    stats = [timing.moved(done) for done in steps]
    need = replay.asked(player, CONFIG.num_layers, CONTEXT, 2, STEPS)
    each = CONFIG.num_kv_heads // recording.block.shape[3]
    np.testing.assert_array_equal([one.needed for one in stats], each * np.count_nonzero(need >= 0, axis=(1, 2)))
    if not keep:
        assert all(one.needed == one.read for one in stats)
        return
    simulated = each * fifo.misses(need, SLOTS[method.name]).sum(axis=1)
    np.testing.assert_array_equal([one.read for one in stats], simulated)
    assert simulated[-1] < stats[-1].needed
    plan = llm.prefill(tokens[:, :CONTEXT].tolist(), method=player, capacity=CAPACITY).plan
    row = throughput.reuse_row(player, plan, slots, CONTEXT, stats)
    assert row["reuse_rate"] == pytest.approx(row["recorded_reuse_rate"]) and 0 < row["reuse_rate"] < 1


def test_the_methods_own_selection_is_paid_for(llm, method, tokens, recording):
    """Given that nothing heeds it, the compiled selection still has the products of the method's own."""
    def flops(chosen):
        cache = llm.prefill(tokens[:, :CONTEXT].tolist(), method=chosen, capacity=CAPACITY)
        one = jax.tree.map(lambda leaf: leaf[0], cache.state.layers[0].state)
        spec, q = cache.plan.layers[0].spec, jnp.ones((CONFIG.num_kv_heads, CONFIG.group, CONFIG.head_dim))
        leaves, tree = jax.tree.flatten(one)  # a compiled function's description is no state

        def select(leaves, q):
            state = jax.tree.unflatten(tree, leaves)
            return chosen.select(spec, state.index, caching.view(spec, state), q).block

        return jax.jit(select).lower(leaves, q).compile().cost_analysis()["flops"]

    assert flops(replay.replayed(method, recording)) >= flops(method) > 0


def test_a_fifo_buffer_by_hand():
    need = np.array([[0, 1], [1, 2], [3, 0], [0, 3]])[:, None]
    # 3 slots: 0 1 | 1 stays, 2 comes | full: 3 and 0 take the places of 0 and 1 | both are there.
    np.testing.assert_array_equal(fifo.misses(need, 3)[:, 0], [2, 1, 1, 0])
    np.testing.assert_array_equal(fifo.misses(need, 2)[:, 0], [2, 1, 2, 0])
    assert fifo.rate(need, 3, skip=1) == pytest.approx(4 / 6) and reuse.overlap(need) == pytest.approx(3 / 6)
    assert reuse.frequent(need) == 3 / 4  # needed 3, 2, 2 and 1 times, of which 7 are four fifths
    assert reuse.frequent(np.concatenate([need, 9 + 0 * need], axis=1)) == (3 / 4 + 1) / 2


def test_drawn_selections_come_back_at_their_rate():
    for rate in (0.2, 0.77):
        block = replay.draw(rate, (20, 2, 1, 100), groups=2000, seed=0).block
        need = block.reshape(20, 2, 100)
        assert all(len(set(row)) == 100 for row in need.reshape(-1, 100))
        assert reuse.overlap(need) == pytest.approx(rate)
        assert rate <= fifo.rate(need, 200, skip=4) < rate + 0.05


def test_more_than_there_are_cannot_be_drawn_anew():
    with pytest.raises(ConfigError, match="cannot select 100 of 119 groups, 80 of them new"):
        replay.draw(0.2, (4, 1, 1, 100), groups=119, seed=0)


SETTINGS = {"name": "kvswap", "replay": True, "group": 2, **SIZES}


def config_with(**changes):
    how = {"model": "", "tokens": TEXT, "steps": RECORDED, "kinds": ("code",), "seed": 0}
    config = ml_collections.ConfigDict({"contexts": (CONTEXT,), "replay": how})
    config.replay.update(changes)
    return config


def test_a_recording_is_made_once(llm, texts, tmp_path, monkeypatch):
    """Given a workdir that has it, nothing is recorded again; other settings record anew, half a file is nothing."""
    calls, record = [], replay.record
    monkeypatch.setattr(replay.common, "load_model", lambda path: llm)
    monkeypatch.setattr(replay, "draw_texts", lambda llm, how, count: texts)
    monkeypatch.setattr(replay, "record", lambda *args: calls.append(args) or record(*args))
    first, again = (replay.make(SETTINGS, config_with(), CONFIG, CONTEXT, tmp_path) for _ in range(2))
    np.testing.assert_array_equal(first.table, again.table)
    assert len(calls) == 1 and len(list(tmp_path.iterdir())) == 1

    monkeypatch.setattr(replay.np, "savez_compressed", lambda file, **arrays: file.write(b"half") and 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            replay.make(SETTINGS, config_with(seed=1), CONFIG, CONTEXT, tmp_path)
    assert len(calls) == 3 and len(list(tmp_path.glob("*.npz"))) == 1


def test_recordings_can_be_taken_to_another_machine(llm, texts, tmp_path, monkeypatch):
    """Given their directory as the model, no model is looked for; what is missing is said before anything is made."""
    monkeypatch.setattr(replay.common, "load_model", lambda path: llm)
    monkeypatch.setattr(replay, "draw_texts", lambda llm, how, count: texts)
    here = replay.make(SETTINGS, config_with(), CONFIG, CONTEXT, tmp_path / "recordings")
    monkeypatch.setattr(replay.common, "load_model", None)
    np.savez_compressed(tmp_path / "recordings" / "older.npz", block=np.zeros(1), width=1)
    config = config_with(model=str(tmp_path / "recordings"))
    config.methods = (SETTINGS,)
    replay.check_model(config)
    replay.check_context(SETTINGS, config, CONTEXT)
    there = replay.make(SETTINGS, config, CONFIG, CONTEXT, tmp_path / "nowhere")
    np.testing.assert_array_equal(here.table, there.table)

    config.replay.seed = 1
    with pytest.raises(ConfigError, match="0 recordings"):
        replay.check_context(SETTINGS, config, CONTEXT)
    config.replay.model = str(tmp_path / "nowhere")
    with pytest.raises(CheckpointError):
        replay.check_model(config)


def test_without_a_replay_the_method_is_as_it_is(tmp_path):
    plain = {key: value for key, value in SETTINGS.items() if key != "replay"}
    assert replay.make(plain, ml_collections.ConfigDict(), CONFIG, CONTEXT, tmp_path) == METHODS["kvswap"]


@pytest.mark.parametrize(("settings", "changes", "words"), [
    ({"replay": "yes"}, {}, "replay='yes'"), ({"replay": 1.5}, {}, "replay=1.5"),
    ({"name": "quest", "replay": True}, {}, "no replay for quest"), ({"dense_layers": 1}, {}, "no replay"),
    ({"reuse": 2}, {}, "no replay"), ({"max_blocks": 3}, {}, "no replay"), ({"budget": None}, {}, "no replay"),
    ({}, {"steps": TEXT}, "replay.steps"), ({}, {"kinds": ("poems",)}, "poems"), ({}, {"nosuch": 1}, "nothing else"),
    ({}, {"tokens": CONTEXT + 1}, "shorter"),
])
def test_what_cannot_be_replayed_is_refused(settings, changes, words):
    settings = {**SETTINGS, **settings}
    if settings["name"] == "quest":
        settings = {"name": "quest", "replay": True}
    config = config_with()
    with config.unlocked():
        config.replay.update(changes)
    replay.check(SETTINGS, config_with())
    with pytest.raises(ConfigError, match=words):
        replay.check(settings, config)
    if words == "shorter":
        replay.check({**settings, "replay": 0.5}, config)  # which is drawn, and of no text


def test_reuse_of_a_kind_of_text_is_that_of_its_recording(llm, texts, monkeypatch):
    """Given texts decoded alone, each has a buffer of its own; a larger one never reads more here."""
    monkeypatch.setattr(replay, "draw_texts", lambda llm, how, count: texts)
    config, settings = config_with(), {"name": "kvswap", "group": 2, **SIZES}
    config.update({"texts": TEXTS, "times_selected": (1.0, 2.0), "warm_up": 1})
    small, large = reuse.measure(llm, "code", settings, 8, config)
    block = replay.record(llm, replay.selecting(METHODS["kvswap"], 8), texts, RECORDED, 4).block[:, :, :, 0]
    rates = [fifo.rate(block[:, :, text], 4, skip=1) for text in range(TEXTS)]
    assert small["reuse_rate"] == pytest.approx(np.mean(rates)) and small["max"] == pytest.approx(max(rates))
    assert small["slots"] == 4 and large["slots"] == 8 and small["reuse_rate"] <= large["reuse_rate"]


@pytest.mark.parametrize("change", [{"times_selected": ()}, {"times_selected": (0.5,)}, {"warm_up": 256}, {"texts": 0}])
def test_bad_settings_of_the_reuse_preset_are_refused(change):
    config = get_config("reuse")
    reuse.check(config)
    config.update(change)
    with pytest.raises(ConfigError, match=next(iter(change))):
        reuse.check(config)


def test_a_text_too_short_for_the_selection_is_refused(llm, texts):
    with pytest.raises(ConfigError, match="cannot select"):
        replay.record(llm, METHODS["kvswap"], [text[:24] for text in texts], 4, ranks=9)


def test_a_deep_model_gives_layers_from_all_its_depth():
    block = np.arange(30)[None, :, None, None, None] * np.ones((2, 1, 3, 1, 5), np.int32)
    recording = replay.Recording(block.astype(np.int32), 40)
    np.testing.assert_array_equal(replay.spread(recording, 4).block[0, :, 0, 0, 0], [0, 7, 15, 22])
    assert replay.spread(recording, 30).block.shape == replay.spread(recording, 64).block.shape == block.shape
