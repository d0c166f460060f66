"""Reading ahead: outputs are the same, guesses are counted, and the order of events is what overlap needs."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from harness import METHODS
from tiny import CONFIG, PROMPT, start

from kvjax.cache.read import choose
from kvjax.errors import ConfigError
from kvjax.inference import blocks, decode
from kvjax.inference.plan import Slots
from kvjax.models.transformer import Block
from kvjax.store.flash.store import FlashStore
from kvjax.store.host import HostStore
from kvjax.store.io.threads import ThreadedFetch
from tests.inference.test_decode import teacher_forced
from tests.store.conftest import GEOMETRY, Driver, wait_until
from tests.store.conftest import engine as engine
from tests.store.faults import FaultySystem

DEEP = dataclasses.replace(CONFIG, num_layers=3, windows=(None,) * 3)  # first, inner and last layer


@pytest.fixture(scope="module")
def deep(params):
    return {**params, "layers_2": params["layers_0"]}


def looking_ahead(name):
    return dataclasses.replace(METHODS[name], lookahead=True)


@pytest.mark.parametrize(("name", "prefetch"), [("quest", "layer"), ("dynakv", "step")])
def test_reading_ahead_changes_no_bit(params, tokens, name, prefetch, tmp_path):
    expected = teacher_forced(params, tokens, METHODS[name], steps=12)
    got = teacher_forced(params, tokens, METHODS[name], "staged", FlashStore(directory=tmp_path), steps=12,
                         prefetch=prefetch)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("prefetch", ["layer", "step"])
def test_a_program_that_reads_ahead_gives_the_same_tokens(params, tokens, prefetch, tmp_path):
    expected = teacher_forced(params, tokens, METHODS["quest"], steps=12)
    got = teacher_forced(
        params, tokens, METHODS["quest"], "fused", FlashStore(directory=tmp_path), steps=12, backend="io",
        prefetch=prefetch
    )
    np.testing.assert_array_equal(got.argmax(-1), expected.argmax(-1))
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_slots_that_keep_nothing_read_every_block_in_every_step(params, tokens, tmp_path):
    """Given more slots than blocks, with reading ahead: the same bits, no hit, and all of it submitted."""
    method, slots = METHODS["kvswap"], {"count": 32, "prefetch": "layer", "keep": False}
    expected = teacher_forced(params, tokens, method, steps=6)
    plan, state, _, branch = start(params, tokens, method, FlashStore(directory=tmp_path), **slots)
    for i, logits in enumerate(expected):
        done = decode.step(plan, params, state, tokens[np.arange(2), np.asarray(PROMPT) + i], donate=True)
        state = done.state
        np.testing.assert_array_equal(done.logits, logits)
        for report in done.reports:
            assert (np.asarray(report.stats.missed) == np.asarray(report.stats.requested)).all()
    assert branch.stats().prefetched == branch.stats().prefetch_used > 0
    branch.close()


@pytest.mark.parametrize(("name", "slots"), [
    ("quest", {"keep": False}), ("quest", {"count": 8}), ("kvswap", {"keep": False}), ("dynakv", {"count": 16}),
])
def test_rows_of_what_was_read_are_counted(params, tokens, name, slots):
    """Tries blocks that are full and that are not, read each time or kept, of each head or of all together."""
    plan, state, _, branch = start(params, tokens, METHODS[name], HostStore(), **slots)
    for i in range(6):
        before = jax.device_get([(one.state.count, one.pool.table.block) for one in state.layers])
        done = decode.step(plan, params, state, tokens[np.arange(2), np.asarray(PROMPT) + i])
        state = done.state
        for (count, kept), one, report in zip(before, state.layers, done.reports, strict=True):
            kept = np.repeat(kept if slots.get("keep", True) else kept[..., :0], 2 // kept.shape[1], axis=1)
            expected = [sum(count[b, head, block] for head in range(2) for block in set(need[head].tolist())
                            if block < plan.layers[0].spec.num_blocks and block not in kept[b, head])
                        for b, need in enumerate(np.asarray(one.state.loaded))]
            assert report.stats.rows.tolist() == expected
        assert sum(int(report.stats.rows.sum()) for report in done.reports) > 0
    branch.close()


def test_heads_that_fetch_alike_share_their_blocks(params, tokens, tmp_path):
    """Given blocks that are evicted: the same bits as from memory, and blocks for each head where heads differ."""
    for name, heads in (("kvswap", 1), ("quest", 2)):
        _, state, _, branch = start(params, tokens, METHODS[name], FlashStore(file=tmp_path / name))
        assert {one.pool.rows.shape[1] for one in state.layers} == {branch.geometry.kv_heads} == {heads}
        branch.close()
        got = teacher_forced(params, tokens, METHODS[name], store=FlashStore(file=tmp_path / name), steps=8)
        np.testing.assert_array_equal(got, teacher_forced(params, tokens, METHODS[name], steps=8))


def test_heads_that_reuse_evenly_read_equally_many_blocks_and_change_no_bit(params, tokens, tmp_path):
    """Given blocks of variable length, from the store and from a host tier with room for everything."""
    method = METHODS["dynsplit"]
    expected, read = teacher_forced(params, tokens, method, steps=6), {}
    for host, even in ((None, True), (None, False), (64, True)):
        plan, state, _, branch = start(
            params, tokens, method, FlashStore(directory=tmp_path), count=20, host=host, even=even, backend="io"
        )
        for i, logits in enumerate(expected):
            done = decode.step(plan, params, state, tokens[np.arange(2), np.asarray(PROMPT) + i], donate=True)
            state = done.state
            np.testing.assert_array_equal(done.logits, logits)
        read[host, even] = branch.stats().blocks_read
        branch.close()
    assert read[None, True] > max(read[None, False], read[64, True]) and read[64, True] > 0


@pytest.mark.slow
def test_a_token_without_programs_is_the_same(params, tokens, tmp_path):
    """Operation by operation, callbacks included: the oracle of what compiled programs make of a step."""
    plan, state, _, branch = start(params, tokens, METHODS["quest"], FlashStore(directory=tmp_path), backend="io",
                                   prefetch="layer")
    fed = tokens[np.arange(2), np.asarray(PROMPT)]
    expected = decode.step(plan, params, state, fed)
    again, other, _, other_branch = start(params, tokens, METHODS["quest"], FlashStore(directory=tmp_path),
                                          backend="io",
                                          prefetch="layer")
    with jax.disable_jit():
        got = decode.step(again, params, other, fed)
    np.testing.assert_allclose(got.logits, expected.logits, atol=1e-5)
    branch.close()
    other_branch.close()


def test_unknown_names():
    with pytest.raises(ConfigError, match="prefetch='soon' must be one of off, layer, step"):
        Slots(prefetch="soon")
    with pytest.raises(ConfigError, match="backend='ffi'"):
        Slots(backend="ffi")


@pytest.mark.parametrize("driver", ["staged", "fused"])
def test_a_method_that_looks_ahead_reads_nothing_late(deep, tokens, driver, tmp_path):
    method = looking_ahead("quest")
    plan, state, _, branch = start(deep, tokens, method, FlashStore(directory=tmp_path), DEEP, prefetch="layer")
    for i in range(8):
        state = decode.step(plan, deep, state, tokens[:, max(PROMPT) + i], driver=driver, donate=True).state
    stats = branch.stats()
    assert stats.prefetched == stats.prefetch_used > 0
    assert stats.mispredicted == 0


@pytest.mark.parametrize("lookahead", [True, False])
def test_groups_are_chosen_by_the_previous_layers_input_or_by_a_layers_own_query(params, tokens, lookahead):
    """KVSwap's Eq. 1: what goes into layer 0 is projected with layer 1's weights. Own queries choose other groups."""
    method = dataclasses.replace(METHODS["kvswap"], lookahead=lookahead, budget=14)
    plan, state, _, _ = start(params, tokens, method)
    one, others = plan.layers[1], 0
    for i in range(8):
        token, at = tokens[:, max(PROMPT) + i], state.length
        before = blocks.embed(CONFIG, params, token)
        early, _, _ = Block(CONFIG.layers[1]).apply({"params": params["layers_1"]}, before, at, method="project")
        mine = state.layers[1].state
        done = decode.step(plan, params, state, token)
        own = done.reports[1].q.reshape(early.shape)
        first, second = (np.asarray(choose(one, mine, q).rows.pos) for q in (early, own))
        np.testing.assert_array_equal(done.reports[1].selected, first if lookahead else second)
        others += not np.array_equal(first, second)
        state = done.state
    assert others


@pytest.mark.parametrize("prefetch", ["layer", "step"])
def test_wrong_guesses_are_counted(params, tokens, prefetch, tmp_path):
    method = dataclasses.replace(METHODS["quest"], budget=14)  # two pages of many: the estimate must miss some
    plan, state, _, branch = start(params, tokens, method, FlashStore(directory=tmp_path), prefetch=prefetch)
    for i in range(20):
        state = decode.step(plan, params, state, tokens[:, max(PROMPT) + i], donate=True).state
    stats = branch.stats()
    assert stats.prefetched > stats.prefetch_used > 0
    assert stats.mispredicted > 0


@pytest.mark.parametrize("driver", ["staged", "fused"])
def test_the_next_layer_is_submitted_before_a_layer_is_read(deep, tokens, driver, tmp_path):
    plan, state, _, branch = start(deep, tokens, looking_ahead("quest"), FlashStore(directory=tmp_path), DEEP,
                                   prefetch="layer")
    expected = [("submit", 0), ("submit", 1), ("read", 0), ("answer", 0), ("submit", 2), ("read", 1), ("answer", 1),
                ("read", 2), ("answer", 2)]
    for i in range(50):
        branch.events = []
        state = decode.step(plan, deep, state, tokens[:, (max(PROMPT) + i) % 96], driver=driver, donate=True).state
        jax.block_until_ready(state)
        order = [(event.kind, event.layer) for event in branch.events if event.kind in ("submit", "read", "answer")]
        assert order == expected, f"token {i}"
        for before, after in itertools.pairwise(event for event in branch.events if event.kind == "request"):
            assert before.layer <= after.layer


def test_a_broken_prefetch_is_read_again(params, tokens, tmp_path, engine):
    """The device fails only while it is asked ahead: nobody notices but the counters."""
    method, store = looking_ahead("quest"), FlashStore(directory=tmp_path, engine=engine)
    expected = teacher_forced(params, tokens, method)
    store.system = FaultySystem()
    plan, state, _, branch = start(params, tokens, method, store, prefetch="layer")
    begin = branch._begin

    def failing_begin(layer, ids):
        store.system.fail("preadv", 5)
        begin(layer, ids)
        guess = branch._reads.guesses.get(layer)  # None where every block is there already
        wait_until(lambda: not isinstance(guess, ThreadedFetch) or guess._landed.qsize() == len(guess._chunks))
        store.system.heal()

    branch._begin = failing_begin
    for i, logits in enumerate(expected):
        done = decode.step(plan, params, state, tokens[np.arange(2), np.asarray(PROMPT) + i], donate=True)
        state = done.state
        np.testing.assert_array_equal(done.logits, logits)


def test_a_prefetched_block_that_is_rewritten_is_read_again(tmp_path, engine):
    """Between the hint and the read, the block gets other contents."""
    driver = Driver(FlashStore(directory=tmp_path, engine=engine, staging_bytes=0).create(GEOMETRY, "test"))
    expected = driver.prefill()
    block = np.tile(np.arange(GEOMETRY.num_blocks, dtype=np.int32), (GEOMETRY.batch, GEOMETRY.kv_heads, 1))
    assert driver.branch.submit(0, 0, block)
    driver.append(2, 1, 42.0)
    driver.branch.flush()
    expected[:, :, 2, 1] = 42.0
    np.testing.assert_array_equal(driver.read(), expected)
    stats = driver.branch.stats()
    assert stats.mispredicted == GEOMETRY.streams and stats.prefetch_used == 5 * GEOMETRY.streams
    driver.branch.close()
