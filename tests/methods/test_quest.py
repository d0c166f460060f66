"""Quest: page bounds against brute force, and pages ranked as the paper says."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import GROUP, HEADS, SIZE, Sim, Stream, selection
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvjax.cache.types import Context, View, WindowEviction
from kvjax.methods import Quest, quest
from kvjax.ops.topk import AGGREGATIONS

METHOD = Quest(budget=24, sinks=2, window=4, page=4)
SPEC = METHOD.spec(kv_heads=HEADS, group=GROUP, head_dim=SIZE, capacity=40)
PROMPT, MORE = 24, 8


@functools.partial(jax.jit, static_argnums=0)
def scores_and_choice(method, index, view, q):
    """The score that `select` gives every page, and the pages it selects."""
    kept = []

    def keep(scores, occupied, count):
        kept.append(scores)
        return quest_top(scores, occupied, count)

    quest_top = quest.top_blocks
    with mock.patch.object(quest, "top_blocks", keep):
        selection = method.select(SPEC, index, view, q)
    return kept[0], selection.block


@jax.jit
def fill(keys, length):
    """The index after a prompt of `length` of the first 24 tokens and 8 more, one by one."""
    nth, none = jnp.arange(PROMPT), jnp.zeros(0, jnp.int32)
    pos, unseen = SPEC.sinks + nth, jnp.zeros((HEADS, GROUP, 0, SIZE))
    context = Context(keys[:, :PROMPT], pos, nth < length, nth, unseen, none)
    index, _ = METHOD.build(SPEC, METHOD.init(SPEC, ()), context)
    unknown = jnp.full(SPEC.ring, -1, jnp.int32)
    for i in range(MORE):
        evicted = WindowEviction(keys[:, PROMPT + i], SPEC.sinks + length + i, jnp.int32(-1), jnp.bool_(True), unknown)
        index, _ = METHOD.append(SPEC, index, view_of(length), evicted)
    return index


def view_of(stored):
    """A view of which `select` needs the counts only."""
    count = jnp.clip(stored - SPEC.block_rows * jnp.arange(SPEC.num_blocks), 0, SPEC.block_rows)
    none = jnp.zeros((HEADS, 0), jnp.int32)
    return View(
        pos=jnp.full((HEADS, SPEC.num_blocks, SPEC.block_rows), -1, jnp.int32),
        count=jnp.broadcast_to(count, (HEADS, SPEC.num_blocks)).astype(jnp.int32),
        held_pos=none, held_block=none, loaded=none,
        oldest_key=jnp.zeros((HEADS, SIZE)),
    )


def stored_keys(keys, length):
    """The keys in the order in which they were stored."""
    return np.concatenate([keys[:, :length], keys[:, PROMPT:]], axis=1)


numbers = st.floats(-50, 50, width=32, allow_subnormal=False)
cases = given(
    keys=hnp.arrays(np.float32, (HEADS, PROMPT + MORE, SIZE), elements=numbers),
    q=hnp.arrays(np.float32, (HEADS, GROUP, SIZE), elements=numbers), length=st.integers(0, PROMPT),
)


@settings(max_examples=60)
@cases
def test_the_bound_of_a_page_is_not_below_any_of_its_keys_scores(keys, q, length):
    bound, _ = scores_and_choice(METHOD, fill(keys, length), view_of(length + MORE), q)
    stored = stored_keys(keys, length)
    score = np.einsum("kgd,ktd->kgt", q, stored).max(axis=1) / np.sqrt(SIZE)
    page = np.arange(stored.shape[1]) // SPEC.block_rows
    assert (np.asarray(bound)[:, page] >= score - 1e-2).all()


@settings(max_examples=60)
@cases
def test_bounds_are_the_minimum_and_maximum_of_each_pages_keys(keys, q, length):
    index, stored = fill(keys, length), stored_keys(keys, length)
    for page in range(-(-stored.shape[1] // SPEC.block_rows)):
        mine = stored[:, SPEC.block_rows * page :][:, : SPEC.block_rows]
        np.testing.assert_array_equal(index.low[:, :, page], mine.min(axis=1))
        np.testing.assert_array_equal(index.high[:, :, page], mine.max(axis=1))


@settings(max_examples=60)
@cases
def test_the_bound_is_reached_by_a_page_of_one_key(keys, q, length):
    """Given equal keys, the bound of every page is their score: it is no looser than the paper's."""
    same = np.broadcast_to(keys[:, :1], keys.shape)
    bound, _ = scores_and_choice(METHOD, fill(same, length), view_of(length + MORE), q)
    score = np.einsum("kgd,kd->kg", q, keys[:, 0]).max(axis=1) / np.sqrt(SIZE)
    np.testing.assert_allclose(bound[:, 0], score, rtol=1e-4, atol=1e-2)


def test_the_machinery_keeps_the_bounds_of_the_true_pages():
    """Given a long and a short prompt and 20 decoded tokens, bounds are those of the keys at each page's positions."""
    sim = Sim(METHOD, Stream.draw(0), [60, 2])
    sim.run(20)
    state = jax.device_get(sim.cache.state)
    for b in range(2):
        for head in range(HEADS):
            for page in np.flatnonzero(state.count[b, head]):
                keys = sim.stream.k[b, state.pos[b, head, page, : state.count[b, head, page]], head]
                np.testing.assert_array_equal(state.index.low[b, head, :, page], keys.min(0))
                np.testing.assert_array_equal(state.index.high[b, head, :, page], keys.max(0))


def brute_force_ranking(keys, q, rule, count):
    """Pages of one head by the paper's formula, best first: sum_d max(q_d m_d, q_d M_d), then `rule` over the group."""
    low, high = (np.stack([f(page, axis=0) for page in keys]) for f in (np.min, np.max))
    bound = np.maximum(q[:, None] * low, q[:, None] * high).sum(-1) / np.sqrt(SIZE)  # [G, pages]
    if rule.startswith("softmax"):
        bound = np.exp(bound - bound.max(-1, keepdims=True))
        bound /= bound.sum(-1, keepdims=True)
    score = bound.mean(0) if rule.endswith("mean") else bound.max(0)
    return np.argsort(-score, kind="stable")[:count]


@pytest.fixture(scope="module")
def decoded():
    """A long and a short prompt and 20 tokens more, on which the aggregation has no influence."""
    sim = Sim(METHOD, Stream.draw(1), [60, 30])
    sim.run(20)
    return sim


@pytest.mark.parametrize("rule", AGGREGATIONS)
def test_pages_are_selected_as_brute_force_ranks_them(decoded, rule):
    method = Quest(budget=24, sinks=2, window=4, page=4, aggregation=rule)
    sim, rng, spec = decoded, np.random.default_rng(0), decoded.plan.spec
    state = jax.device_get(sim.cache.state)
    for b in range(2):
        q = rng.normal(size=(HEADS, GROUP, SIZE)).astype(np.float32)
        found = selection(sim, b, q, method).block
        for head in range(HEADS):
            used = np.flatnonzero(state.count[b, head])
            keys = [sim.stream.k[b, state.pos[b, head, j, : state.count[b, head, j]], head] for j in used]
            np.testing.assert_array_equal(found[head], used[brute_force_ranking(keys, q[head], rule, spec.max_blocks)])


def test_empty_pages_are_never_selected():
    _, block = scores_and_choice(METHOD, fill(np.ones((HEADS, PROMPT + MORE, SIZE), np.float32), 0), view_of(8),
                                 -np.ones((HEADS, GROUP, SIZE), np.float32))
    assert {0, 1} <= set(np.asarray(block[0])) <= {0, 1, SPEC.num_blocks}
