"""Slots that layers take in turns: the same tokens, one layer's memory, and where they are between steps."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from harness import METHODS, either
from tiny import CAPACITY, CONFIG, PROMPT, decoded, make_params, start

import kvjax
from kvjax.errors import ReadFailed
from kvjax.inference import decode, layer_offload, prefill
from kvjax.inference.plan import Slots, bytes_of, make_plan, store_geometry
from kvjax.llm import LLM
from kvjax.store.flash.store import FlashStore
from kvjax.store.host import HostStore
from tests.inference.test_decode import teacher_forced
from tests.store.faults import FaultySystem

STEPS = 12
DEEP = dataclasses.replace(CONFIG, num_layers=3, windows=(None,) * 3)


@pytest.mark.parametrize(("name", "backend", "driver"), either(
    ("kvswap", "buffer", "fused"), ("kvswap", "io", "staged"), ("quest", "io", "fused"), ("dynakv", "io", "staged"),
    ("full", "buffer", "fused"), slow=(("quest", "buffer", "staged"), ("shadowkv", "io", "staged")),
))
def test_layers_that_keep_nothing_share_their_slots_unless_they_rewrite_blocks(
    params, tokens, name, backend, driver, tmp_path
):
    """Given as many tokens as split a cluster: the same logits, and memory of one layer's slots."""
    method, slots = METHODS[name], {"backend": backend, "keep": False}
    expected = teacher_forced(params, tokens, method, steps=8)
    got = teacher_forced(params, tokens, method, driver, FlashStore(file=tmp_path / "tokens"), steps=8, **slots)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    sizes = {}
    for keep in (True, False):
        plan, state, _, branch = start(params, tokens, method, FlashStore(file=tmp_path / f"{keep}"), keep=keep)
        done = decode.step(plan, params, state, tokens[:, max(PROMPT)])
        state, stats = done.state, [report.stats for report in done.reports]
        sizes[keep] = bytes_of(state.layers)
        branch.close()
    assert all((one.missed == one.requested).all() and one.requested.any() for one in stats)
    pools = [one.pool for one in state.layers]
    if name == "dynakv":
        assert sizes[False] == sizes[True] and not any(pool.passing for pool in pools)
    else:
        assert sizes[True] - sizes[False] == sum(pool.waits_for_bytes for pool in pools) > 0
        assert [pool.rows.shape[2] for pool in pools] == [pools[0].slots] + [0] * (len(pools) - 1)


@pytest.mark.parametrize("driver", ["staged", "fused"])
@pytest.mark.parametrize("donate", [True, False])
def test_slots_come_back_to_the_first_layer_on_a_store(tokens, driver, donate, tmp_path):
    """Given a layer in memory before them, and layers with one sequence that takes no part."""
    params, method = make_params(DEEP), dataclasses.replace(METHODS["quest"], dense_layers=1)
    expected = teacher_forced(params, tokens, method, driver, config=DEEP, steps=2)
    plan, state, _, branch = start(params, tokens, method, FlashStore(directory=tmp_path), DEEP, keep=False)
    for i in range(2):
        assert [one.pool.waits for one in state.layers[1:]] == [False, True]
        fed = tokens[np.arange(2), np.asarray(PROMPT) + i]
        done = decode.step(plan, params, state, fed, np.array([True, i == 0]), driver=driver, donate=donate)
        np.testing.assert_allclose(done.logits[0], expected[i, 0], atol=1e-5)
        state = done.state
    branch.close()


@pytest.mark.parametrize(("name", "settings"), [
    ("quest", {"budget": 24}), ("kvswap", {"budget": 24, "dense_layers": 0}), ("full", {}),
])
def test_they_are_updated_in_place(params, tokens, name, settings):
    """Tries methods that choose by their own query, a layer early, and by none."""
    capacity = 8000 if name == "full" else CAPACITY
    plan = make_plan(CONFIG, dataclasses.replace(METHODS[name], **settings), 1, capacity)
    branch = HostStore().create(store_geometry(plan), "test")
    slots = Slots(keep=False, count=None if name == "full" else 4000)
    state, _ = prefill.prefill(plan, params, tokens[:1, :20], jnp.asarray([20]), branch, slots)
    assert decode.temporary_bytes(plan, params, state) < state.layers[0].pool.rows.nbytes / 2
    branch.close()


def test_they_stay_where_they_are(tokens, tmp_path):
    """The driver that goes layer by layer, given a state that it may take."""
    params = make_params(DEEP)
    plan, state, _, branch = start(params, tokens, METHODS["quest"], FlashStore(directory=tmp_path), DEEP, keep=False)
    before = state.layers[0].pool.rows.unsafe_buffer_pointer()
    state, _ = decoded(plan, params, state, tokens, 3)
    assert state.layers[0].pool.rows.unsafe_buffer_pointer() == before
    branch.close()


def test_they_are_not_parked(params, tokens, tmp_path):
    plan, resident, _, branch = start(params, tokens, METHODS["kvswap"], HostStore(), keep=False)
    _, offloaded, _, other = start(
        params, tokens, METHODS["kvswap"], HostStore(), keep=False, offload=FlashStore(directory=tmp_path)
    )
    resident, expected = decoded(plan, params, resident, tokens, STEPS)
    offloaded, got = decoded(plan, params, offloaded, tokens, STEPS)
    np.testing.assert_array_equal(expected, got)
    pools = [one.pool for one in offloaded.layers]
    assert all(pool.waits for pool in pools) and not resident.layers[0].pool.waits
    made = bytes_of(offloaded.layers) - layer_offload.working_set(offloaded.layers)
    assert made == pools[0].waits_for_bytes == resident.layers[0].pool.rows.nbytes
    pages = max(len(one.sums) for one in offloaded.layers)
    assert offloaded.layers[0].branch.geometry.num_blocks == pages, "no room for slots"
    branch.close()
    other.close()
    layer_offload.close(offloaded.layers)


def waits(cache):
    return [one.pool.waits for one in cache.state.layers]


@pytest.mark.parametrize("name", ["quest", "kvswap"])
def test_questions_more_text_and_saving(name, tmp_path):
    """Caches that share a past do not disturb one another, and each has slots in its first layer."""
    llm, context, question = LLM(DEEP, make_params(DEEP, sharper=1)), list(range(1, 50)), [7, 8, 9]
    settings = {"store": FlashStore(file=tmp_path / "a"), "slots": kvjax.Slots(keep=False)}
    memory, stored = (llm.prefill(context, method=METHODS[name], **more) for more in ({}, settings))
    expected = llm.generate(question, memory, max_new_tokens=8).tokens
    for _ in range(2):
        assert llm.generate(question, stored, max_new_tokens=8).tokens == expected
    more, grown = (llm.extend(cache, question, chunk=2) for cache in (memory, stored))
    np.testing.assert_allclose(grown.logits, more.logits, atol=1e-5)
    stored.save(tmp_path / "saved")
    again = llm.restore(tmp_path / "saved", method=METHODS[name])
    assert llm.generate(question, again, max_new_tokens=8).tokens == expected
    expected = llm.generate(question, more, max_new_tokens=8).tokens
    assert llm.generate(question, grown, max_new_tokens=8).tokens == expected
    assert waits(stored) == waits(grown) == waits(again) == [False, True, True]
    again.close()


@pytest.mark.parametrize("driver", ["staged", "fused"])
def test_a_token_that_fails_leaves_them_in_the_first_layer(tokens, driver, tmp_path):
    """Whichever layer's read it is: the retry gives the same logits."""
    params, store = make_params(DEEP), FlashStore(directory=tmp_path, staging_bytes=0, engine="threads")
    expected = teacher_forced(params, tokens, METHODS["quest"], driver, config=DEEP, steps=3)
    store.system = FaultySystem()
    plan, state, _, branch = start(params, tokens, METHODS["quest"], store, DEEP, keep=False)
    for i in range(3):
        branch.flush()  # or what is written behind the last token reads, too, and its error is the retry's
        fed = tokens[np.arange(2), np.asarray(PROMPT) + i]
        store.system.fail("preadv", 5, skip=2 * i)
        with pytest.raises(ReadFailed) as caught:
            decode.step(plan, params, state, fed, driver=driver, donate=True)
        store.system.heal()
        state = caught.value.state
        assert [one.pool.waits for one in state.layers] == [False, True, True]
        done = decode.step(plan, params, state, fed, driver=driver, donate=True)
        np.testing.assert_allclose(done.logits, expected[i], atol=1e-5)
        state = done.state
    branch.close()
