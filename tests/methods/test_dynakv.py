"""DynaKV: when clusters are split, and by which threshold. Statistics of its clusters: test_dynakv_long_run.py."""

import dataclasses

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from harness import GROUP, HEADS, SIZE, Sim, Stream, check_every_token_has_one_place, selection

from kvjax.cache.fill import Prompts, empty_state, fill_state
from kvjax.errors import ConfigError
from kvjax.inference.plan import make_plan
from kvjax.methods import DynaKV

# Scenes of a few tokens -----------------------------------------------------------------------------

# Three clusters A, B, C of eight keys each; a step attends one of them.
SMALL = DynaKV(budget=32, sinks=2, window=4, cluster=8, buffer=3, max_blocks=1)
MIDDLE, A, B, C = 26, 0, 1, 2  # first position that leaves the window while decoding; axes of the centres
FAR = 3.0  # an outlier's distance from its centre: too wide for any cluster here


def centre(axis):
    return 10.0 * np.eye(SIZE, dtype=np.float32)[axis]


def scene(evicted, asked, method=SMALL):
    """A sequence whose n-th decode step asks for cluster asked[n] and in which leaving[n] leaves the window.

    `evicted` are (axis, offset): a key that far from the centre, each in a direction of its own.
    """
    rng = np.random.default_rng(0)
    stream = Stream(*(np.zeros((1, harness.CAPACITY, n, SIZE), np.float32) for n in (HEADS * GROUP, HEADS, HEADS)))
    stream.v[:] = rng.normal(size=stream.v.shape)
    for i, axis in enumerate([A] * 8 + [B] * 8 + [C] * 8):
        stream.k[0, 2 + i] = centre(axis) + 0.1 * rng.normal(size=(HEADS, SIZE))
    for i, (axis, offset) in enumerate(evicted):
        stream.k[0, MIDDLE + i] = centre(axis) + offset * np.eye(SIZE)[3 + i % 5]
    for i, axis in enumerate(asked):
        stream.q[0, MIDDLE + 3 + i] = 0.4 * centre(axis)
    return Sim(method, stream, [MIDDLE + 3])


def look(sim, head=0):
    """Returns what a step left behind: held positions, splits, flags, and the cluster each position is in."""
    state, none = jax.device_get(sim.cache.state), sim.plan.spec.num_blocks
    check_every_token_has_one_place(sim)
    held = {int(p): int(j) for p, j in zip(sim.places(0, head)["held"], _used(state, none, head), strict=True)}
    block = {int(p): int(j) for j in range(none) for p in state.pos[0, head, j] if p >= 0}
    return dataclasses.make_dataclass("Look", ["held", "splits", "flags", "block"])(
        held, int(state.index.splits[0, head]), {int(j) for j in np.flatnonzero(state.index.split[0, head])}, block
    )


def _used(state, none, head):
    return [j for j in state.tail.held_block[0, head] if j < none]


def forced(sim):
    """Returns what `select` would load on purpose in the next step; the query has no say in it."""
    return selection(sim, 0, np.zeros((HEADS, GROUP, SIZE), np.float32)).force


def cluster_of(seen, axis):
    """The block of a cluster's first key."""
    return seen.block[2 + 8 * axis]


def test_the_scene_has_three_clusters():
    seen = look(scene([], []))
    assert len({seen.block[p] for p in range(2, MIDDLE)}) == 3
    assert all(seen.block[p] == cluster_of(seen, (p - 2) // 8) for p in range(2, MIDDLE))


def test_a_near_key_is_added_to_its_cluster():
    sim = scene([(A, 0.0)], [B])
    sim.step()
    seen = look(sim)
    assert seen.block[MIDDLE] == cluster_of(seen, A)
    assert not seen.held and not seen.flags


def test_a_key_belongs_to_the_cluster_at_the_smallest_distance():
    """Given A three times as far from the origin, a key of B has a larger inner product with A, and is B's."""
    sim = scene([(B, 0.0)], [A])
    sim.stream.k[0, 2:10] *= 3
    sim.stream.k[0, MIDDLE] = centre(B) + 0.4 * centre(A)
    sim = Sim(SMALL, sim.stream, [MIDDLE + 3])
    sim.step()
    seen = look(sim)
    assert seen.held == {MIDDLE: cluster_of(seen, B)}


def test_a_far_key_splits_a_loaded_cluster_at_once():
    sim = scene([(A, FAR)], [A])
    sim.step()
    seen = look(sim)
    assert seen.splits == 1 and not seen.held and not seen.flags
    assert len({seen.block[p] for p in range(2, 10)}) == 1  # the near keys stay together
    assert list(seen.block.values()).count(seen.block[MIDDLE]) == 1  # and the far one is alone


def test_a_far_key_waits_while_its_cluster_is_not_loaded():
    sim = scene([(A, FAR), (B, 0), (B, 0)], [B, B, B])
    for _ in range(3):
        sim.step()
        seen = look(sim)
        assert seen.held == {MIDDLE: cluster_of(seen, A)}
        assert seen.flags == {cluster_of(seen, A)} and seen.splits == 0


def test_a_waiting_key_is_attended():
    sim = scene([(A, FAR), (B, 0)], [B, B])
    sim.step()
    out, report = sim.step()
    keys = [0, 1, MIDDLE, *range(10, 18), *range(MIDDLE + 1, MIDDLE + 5)]  # sinks, held, cluster B, window
    assert int(report.attended[0, 0]) == len(keys)
    np.testing.assert_allclose(out[0], _dense(sim.stream, MIDDLE + 4, keys), atol=1e-5)


def _dense(stream, at, keys):
    part = Stream(stream.q[:, at : at + 1], stream.k[:, keys], stream.v[:, keys])
    last = len(keys) - 1
    return harness.dense_attention(dataclasses.replace(part, q=np.repeat(part.q, last + 1, 1)), 0, last)


def test_a_flagged_cluster_is_split_when_it_is_next_loaded():
    sim = scene([(A, FAR), (B, 0), (B, 0)], [B, B, A])
    for _ in range(3):
        sim.step()
    seen = look(sim)
    assert seen.splits == 1 and not seen.held and not seen.flags
    assert seen.block[MIDDLE] != cluster_of(seen, A)


def test_a_near_key_waits_too_while_its_cluster_is_flagged():
    sim = scene([(A, FAR), (A, 0)], [B, B])
    for _ in range(2):
        sim.step()
    seen = look(sim)
    assert seen.held == {MIDDLE: cluster_of(seen, A), MIDDLE + 1: cluster_of(seen, A)}


def test_a_split_takes_its_own_waiting_keys_only():
    sim = scene([(A, FAR), (C, FAR), (B, 0)], [B, B, A])
    for _ in range(3):
        sim.step()
    seen = look(sim)
    assert seen.held == {MIDDLE + 1: cluster_of(seen, C)} and seen.flags == {cluster_of(seen, C)}


def test_nothing_is_forced_below_the_limit():
    sim = scene([(A, FAR), (C, FAR)], [B, B])
    for _ in range(2):
        sim.step()
    assert len(look(sim).held) == 2
    np.testing.assert_array_equal(forced(sim), sim.plan.spec.num_blocks)


def test_a_full_buffer_forces_the_cluster_with_most_waiting_keys():
    sim = scene([(A, FAR), (C, FAR), (C, FAR), (B, 0)], [B] * 4)
    for _ in range(3):
        sim.step()
    seen = look(sim)
    assert len(seen.held) == 3 and int(forced(sim)[0]) == cluster_of(seen, C)
    sim.step()
    seen = look(sim)
    assert seen.splits == 1 and seen.held == {MIDDLE: cluster_of(seen, A)}


def test_a_forced_cluster_is_fetched_but_not_attended():
    sim = scene([(A, FAR), (C, FAR), (C, FAR), (B, 0)], [B] * 4)
    for _ in range(3):
        sim.step()
    block = cluster_of(look(sim), C)
    _, report = sim.step()
    assert block in np.asarray(sim.cache.state.loaded[0, 0])
    assert set(np.asarray(report.selected[0, 0])) - {-1} == {*range(10, 18), MIDDLE, MIDDLE + 1, MIDDLE + 2}


def test_a_full_cluster_is_split_though_its_keys_are_alike():
    """Given keys that are all equal, blocks of 16 rows still take one after the other."""
    sim = scene([(A, 0)] * 60, [A] * 60)
    sim.stream.k[0, 2:] = centre(A)
    sim = Sim(SMALL, sim.stream, [MIDDLE + 3])
    for _ in range(60):
        sim.step()
        check_every_token_has_one_place(sim)
    assert np.asarray(sim.cache.state.index.splits).min() >= 2


# Blocks run out -------------------------------------------------------------------------------------

TIGHT = DynaKV(budget=40, sinks=2, window=4, cluster=4, block_rows=8, num_blocks=12, buffer=3, threshold=1.2)


def step_numbers(sim):
    state = jax.device_get(sim.cache.state)
    none = sim.plan.spec.num_blocks
    return {
        "free": (state.count == 0).sum(-1), "flags": state.index.split.sum(-1),
        "held": (state.tail.held_block < none).sum(-1), "refused": state.index.refused,
    }


@pytest.mark.parametrize("seed", range(3))
def test_refused_splits_are_counted_and_no_key_is_lost(seed):
    sim = Sim(TIGHT, Stream.draw(seed), [40, 30])
    for _ in range(56):
        before = step_numbers(sim)
        sim.step()
        after = step_numbers(sim)
        check_every_token_has_one_place(sim)
        refused = after["refused"] > before["refused"]
        assert (before["free"] <= before["flags"])[refused].all()  # never while a block was to be had
    assert (after["free"] == 0).any() and (after["refused"] > 0).any()


@pytest.mark.parametrize("seed", range(3))
def test_a_flagged_cluster_has_a_free_block_in_reserve(seed):
    sim = Sim(TIGHT, Stream.draw(seed), [40, 30])
    for _ in range(56):
        sim.step()
        now = step_numbers(sim)
        assert (now["flags"] <= now["free"]).all() and (now["held"] <= TIGHT.buffer).all()


def test_a_reserved_block_is_not_given_away():
    """Given two full clusters, one of them flagged, and one free block: a key of the other one waits as well.

    It could open the free block, but then the flagged cluster could never be split.
    """
    method = DynaKV(budget=48, sinks=2, window=4, cluster=32, block_rows=32, num_blocks=3, buffer=3, max_blocks=1)
    rng = np.random.default_rng(0)
    stream = Stream.draw(0, batch=1)
    for i in range(68):
        stream.k[0, 2 + i] = centre(A if i < 32 else B) + 0.1 * rng.normal(size=(HEADS, SIZE))
    stream.k[0, 67] = centre(A)  # 66 is of B, 67 of A
    stream.q[0, 69:] = 0.4 * centre(A)
    stream.q[0, 71] = 0.4 * centre(B)
    sim = Sim(method, stream, [69])
    sim.step()
    assert step_numbers(sim)["flags"].max() == 1 and step_numbers(sim)["free"].min() == 1
    sim.step()
    assert (step_numbers(sim)["free"] == 1).all() and (step_numbers(sim)["refused"] == 1).all()
    sim.step()
    check_every_token_has_one_place(sim)
    assert (np.asarray(sim.cache.state.index.splits) == 1).all() and (step_numbers(sim)["held"] == 0).all()


# The threshold --------------------------------------------------------------------------------------


def two_scales():
    """A scene whose second head has keys that spread ten times as wide."""
    sim = scene([(A, 1.0)], [B])
    offsets = sim.stream.k[0, 2:MIDDLE, 0] - np.stack([centre(a) for a in [A] * 8 + [B] * 8 + [C] * 8])
    sim.stream.k[0, 2:MIDDLE, 1] = sim.stream.k[0, 2:MIDDLE, 0] + 9 * offsets
    return Sim(SMALL, sim.stream, [MIDDLE + 3])


def test_the_threshold_is_a_multiple_of_the_mean_cluster_variance_of_each_head():
    stream = Stream.draw(20)
    for b, prompt in enumerate((80, 60)):
        sim = Sim(SMALL, stream.row(b), [prompt])
        for head in range(HEADS):
            pos, count = (np.asarray(x)[0, head] for x in (sim.cache.state.pos, sim.cache.state.count))
            keys = [sim.stream.k[0, p[:n], head].astype(np.float64) for p, n in zip(pos, count, strict=True) if n]
            mean = sum(len(k) * k.var(axis=0).sum() for k in keys) / sum(len(k) for k in keys)
            np.testing.assert_allclose(sim.cache.state.index.tau[0, head], SMALL.threshold * mean, rtol=1e-5)


def test_heads_with_keys_of_another_spread_have_another_threshold():
    tau = np.asarray(two_scales().cache.state.index.tau[0])
    np.testing.assert_allclose(tau[1] / tau[0], 100, rtol=1e-3)


def test_the_same_distance_is_far_for_one_head_and_near_for_another():
    sim = two_scales()
    sim.step()
    assert MIDDLE in look(sim, 0).held and MIDDLE in look(sim, 1).block


def test_a_buffer_larger_than_a_block_is_refused():
    with pytest.raises(ConfigError, match="buffer"):
        DynaKV(cluster=4, buffer=8).spec(kv_heads=1, group=1, head_dim=8, capacity=1000)


def test_an_unknown_update_is_refused():
    with pytest.raises(ConfigError, match="adaptive, static, local"):
        DynaKV(update="global")


def test_a_table_can_tell_the_updates_apart():
    assert [DynaKV(update=u).name for u in ("adaptive", "static", "local")] == [
        "dynakv", "dynakv_static", "dynakv_local"
    ]


def test_thresholds_of_a_batch_are_those_of_each_sequence_alone():
    """Fills eight caches of 256 clusters at once: as many sums XLA:CPU makes in another order than one."""
    plan = make_plan(tiny.CONFIG, DynaKV(budget=64, window=8, cluster=2, iterations=1, buffer=2), 8, 576)
    layer, rng = plan.layers[-1], np.random.default_rng(0)
    shape = (8, 512, tiny.CONFIG.num_kv_heads, tiny.CONFIG.head_dim)
    key, value = (jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(2))
    length = jnp.arange(512, 512 - 8, -1, dtype=jnp.int32)

    @jax.jit
    def threshold(*prompts):
        state, _ = fill_state(layer, empty_state(layer, len(prompts[0]), plan.dtype), Prompts(*prompts), None)
        return state.index.tau

    alone = [threshold(key[i : i + 1], value[i : i + 1], length[i : i + 1])[0] for i in range(8)]
    np.testing.assert_array_equal(threshold(key, value, length), np.stack(alone))
