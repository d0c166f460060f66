"""Three tiers: slots in device memory, slots in host memory, a store behind both; all answer alike."""

import dataclasses
import errno

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import METHODS, either
from tiny import CONFIG, decoded, start

import kvjax
from kvjax.cache.tiers import TieredPool
from kvjax.errors import ConfigError, ReadFailed
from kvjax.inference import plan as planning
from kvjax.inference.plan import Slots
from kvjax.store.flash.store import FlashStore
from kvjax.store.host import HostStore
from tests.inference.test_decode import teacher_forced
from tests.store.faults import FaultySystem

HOST, STEPS = 12, 8  # blocks per head; there are fewer than 2 * HOST


def tiers(state) -> list[TieredPool]:
    return [one.pool for one in state.layers if isinstance(one.pool, TieredPool)]


@pytest.mark.parametrize(("name", "driver", "backend"), either(
    ("dynakv", "staged", "io"), ("quest", "fused", "buffer"), ("kvswap", "staged", "io"),
    slow=(("quest", "staged", "buffer"),),
))
def test_a_host_tier_changes_no_bit(params, tokens, name, driver, backend, tmp_path):
    """Given methods that append, hold and split, against all blocks in memory with the same driver."""
    expected = teacher_forced(params, tokens, METHODS[name], driver, steps=STEPS)
    got = teacher_forced(params, tokens, METHODS[name], driver, FlashStore(directory=tmp_path), steps=STEPS, host=HOST,
                         backend=backend)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("driver", ["staged", "fused"])
def test_its_slots_are_in_pinned_host_memory_and_stay_there(params, tokens, driver):
    plan, state, _, _ = start(params, tokens, METHODS["quest"], HostStore(), host=HOST)
    for one in (state, planning.copy_state(state), decoded(plan, params, state, tokens, 2, driver)[0]):
        assert {pool.host_rows.sharding.memory_kind for pool in tiers(one)} == {"pinned_host"}
        assert {pool.rows.sharding.memory_kind for pool in tiers(one)} == {"device"}


def test_what_left_the_device_comes_from_the_host(params, tokens, tmp_path):
    """Given room for every block in host memory, only what was written is read again."""
    method, reads = METHODS["quest"], {}
    for host in (None, 24):
        plan, state, _, branch = start(params, tokens, method, FlashStore(directory=tmp_path), host=host)
        state, _ = decoded(plan, params, state, tokens, STEPS)
        reads[host] = branch.stats().blocks_read
        if host:
            used = sum(int(jax.device_get(pool.host_table.block < pool.num_blocks).sum()) for pool in tiers(state))
            written = 2 * 2 * 2 * STEPS  # a row of each layer, sequence and head in every step
            assert 0 < reads[host] <= used + written
        branch.close()
    assert reads[24] < reads[None]


def test_what_is_written_leaves_the_host(params, tokens):
    plan, state, _, branch = start(params, tokens, METHODS["quest"], HostStore(), host=24, backend="io")
    state, _ = decoded(plan, params, state, tokens, STEPS)
    pool = tiers(state)[0]
    held = pool.host_table.block[:, :, :1]
    there = pool.locate_on_host(held) < pool.host_slots
    assert bool(there.all())
    new = jnp.zeros((*held.shape[:2], 8))
    pool = pool.put_row(held[..., 0], jnp.zeros(held.shape[:2], jnp.int32), new, new, jnp.int32(0), state.ref)
    assert not bool((pool.locate_on_host(held) < pool.host_slots).any())
    branch.close()


def test_device_and_host_hold_what_the_store_holds(params, tokens):
    """After splits, appended rows and evictions, a block that is in several tiers is the same in each."""
    plan, state, _, branch = start(params, tokens, METHODS["dynakv"], HostStore(), host=HOST, backend="io")
    state, _ = decoded(plan, params, state, tokens, STEPS)
    pool = tiers(state)[-1]
    on_host = np.asarray(pool.locate_on_host(pool.table.block))
    host_rows, rows = np.asarray(pool.host_rows), np.asarray(pool.rows)
    shared = 0
    for b, head, slot in zip(*np.nonzero(on_host < HOST), strict=True):
        if pool.table.block[b, head, slot] < pool.num_blocks:
            np.testing.assert_array_equal(rows[b, head, slot], host_rows[b, head, on_host[b, head, slot]])
            shared += 1
    assert shared > 4
    branch.close()


def test_a_failed_read_leaves_both_tiers_as_they_were(params, tokens, tmp_path):
    expected = teacher_forced(params, tokens, METHODS["quest"], steps=STEPS)
    store = FlashStore(directory=tmp_path)
    store.system = FaultySystem()
    plan, state, _, _ = start(params, tokens, METHODS["quest"], store, host=HOST)
    store.system.fail("preadv", errno.EIO)
    with pytest.raises(ReadFailed) as failure:
        decoded(plan, params, state, tokens, STEPS)
    store.system.heal()
    _, logits = decoded(plan, params, failure.value.state, tokens, STEPS)
    np.testing.assert_array_equal(logits, expected)


def _model(params):
    return kvjax.LLM(CONFIG, params)


def test_asked_extended_saved_and_restored(params, tmp_path):
    """The same answers as with two tiers, of the cache, of one that read on, and of one that was restored."""
    llm, context, question = _model(params), list(range(1, 50)), [7, 8, 9]
    answers = []
    for host, prefetch in ((None, "off"), (HOST, "off"), (HOST, "layer")):
        path = tmp_path / f"{host}-{prefetch}"
        cache = llm.prefill(context, method=METHODS["quest"], store=FlashStore(file=tmp_path / f"{path.name}.kv"),
                            slots=Slots(host=host, prefetch=prefetch))
        grown = llm.extend(cache, question, chunk=2)
        cache.save(path)
        answers.append([llm.generate(question, one, max_new_tokens=8).tokens for one in (cache, grown)])
        grown.close()
        cache.close()
        again = llm.restore(path, method=METHODS["quest"])
        assert bool(tiers(again.state)) == (host is not None)
        answers[-1].append(llm.generate(question, again, max_new_tokens=8).tokens)
        again.close()
    assert answers[0] == answers[1] == answers[2]
    assert answers[1][0] == answers[1][2]


def test_buffers_of_an_accelerator_are_not_for_python(params, tokens, monkeypatch):
    monkeypatch.setattr(planning, "default_backend", lambda: "io")
    with pytest.raises(ConfigError, match="backend='buffer' is only for CPU"):
        start(params, tokens, METHODS["quest"], HostStore(), backend="buffer")


def test_bad_settings_are_refused(params, tokens):
    with pytest.raises(ConfigError, match="host=2 must be more than"):
        start(params, tokens, METHODS["quest"], HostStore(), host=2)
    for other in ({"offload": HostStore()}, {"keep": False}):
        with pytest.raises(ConfigError, match="leave it out"):
            Slots(host=HOST, **other)
    assert dataclasses.replace(Slots(), host=HOST).host == HOST
