"""IceCache's pages: their ranking against NumPy, where leaving tokens go, what happens when pages run out."""

import dataclasses

import harness
import jax
import numpy as np
import pytest
from harness import GROUP, HEADS, METHODS, SIZE, Sim, Stream, check_every_token_has_one_place, selection

from kvjax.errors import ConfigError
from kvjax.methods.dci.tree import occupancy

ALL = dataclasses.replace(METHODS["icecache"], beam=48, projections=0, visit=None)  # a search that sees every token


def test_pages_are_ranked_by_attention_mass_per_row():
    sim = Sim(ALL, Stream.rows(0, 1), [80, 80])
    state, q = jax.device_get(sim.cache.state), np.random.default_rng(5).normal(size=(HEADS, GROUP, SIZE))
    chosen = selection(sim, 0, q).block
    for head in range(HEADS):
        count, pos = state.count[0, head], state.pos[0, head]
        weight = np.exp(sim.stream.k[0, :, head] @ q[head].T / np.sqrt(SIZE))
        density = np.stack([weight[p[:n]].sum(0) / max(n, 1) for p, n in zip(pos, count, strict=True)])
        score = (density / density.sum(0)).mean(1)
        np.testing.assert_array_equal(chosen[head], np.argsort(-score)[: sim.plan.spec.max_blocks])


def test_with_top_the_pages_of_each_query_heads_best_tokens_are_loaded():
    """Algorithm 3: in union over the query heads of a KV head, before all others."""
    sim = Sim(dataclasses.replace(ALL, top=2, aggregation="max"), Stream.rows(0, 1), [80, 80])
    state, q = jax.device_get(sim.cache.state), np.random.default_rng(5).normal(size=(HEADS, GROUP, SIZE))
    chosen = selection(sim, 0, q).block
    for head in range(HEADS):
        score = np.full((GROUP, harness.CAPACITY), -np.inf)
        page = np.zeros(harness.CAPACITY, int)
        for block, (p, n) in enumerate(zip(state.pos[0, head], state.count[0, head], strict=True)):
            score[:, p[:n]], page[p[:n]] = q[head] @ sim.stream.k[0, p[:n], head].T, block
        wanted = set(page[np.argsort(-score, axis=1)[:, :2]].ravel().tolist())
        assert len(wanted) > 1 and set(chosen[head, : len(wanted)].tolist()) == wanted


@pytest.mark.parametrize("change", [
    {"beam": 0}, {"pages": 0}, {"top": 0}, {"insert_beam": 0}, {"num_blocks": 0}, {"visit": 5}, {"projections": 5},
    {"visit": 0, "projections": 5}, {"ratio": 0.0}, {"ratio": -0.5}, {"ratio": 1.0},
], ids=str)
def test_bad_settings_are_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        dataclasses.replace(ALL, **change)


def test_tokens_of_a_page_have_one_parent_and_new_ones_join_their_nearest():
    """Given 60 tokens in a tree and 20 inserted, near keys share pages more often than chance."""
    sim = Sim(ALL, Stream.rows(1, 2), [60, 60])
    sim.run(20)
    check_every_token_has_one_place(sim)
    state = jax.device_get(sim.cache.state)
    assert (state.index.count == state.count).all() and not state.index.strays.any()
    for head in range(HEADS):
        spread = [
            np.var(sim.stream.k[0, p[:n], head], axis=0).sum()
            for p, n in zip(state.pos[0, head], state.count[0, head], strict=True) if n > 1
        ]
        assert np.mean(spread) < 0.8 * np.var(sim.stream.k[0, :80, head], axis=0).sum()
    share = np.asarray(occupancy(state.index))
    assert ((share > 0.3) & (share <= 1)).all()


def test_a_frozen_index_takes_new_tokens_in_the_order_they_come():
    sim = Sim(dataclasses.replace(ALL, update=False), Stream.draw(1, batch=1), [60])
    before = jax.device_get(sim.cache.state)
    sim.run(20)
    check_every_token_has_one_place(sim)
    after = jax.device_get(sim.cache.state)
    np.testing.assert_array_equal(before.index.height, after.index.height)
    for head in range(HEADS):
        new = after.pos[0, head][(after.pos[0, head] >= 57).any(-1)]
        assert (np.diff(new[new >= 57]) == 1).all() and len(new) <= 20 // 4 + 2


def test_with_few_pages_tokens_share_them_and_none_is_lost():
    sim = Sim(dataclasses.replace(ALL, num_blocks=harness.CAPACITY // 4), Stream.draw(2), [70, 20])
    for _ in range(26):
        sim.step()
        check_every_token_has_one_place(sim)
    assert np.asarray(sim.cache.state.index.strays).any()
