"""What the machinery shows a method: prompt, queries, token ids, weights; and layers that follow another."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import GROUP, HEADS, METHODS, SIZE, Sim, Stream
from tiny import dense, make_params

from kvjax.cache import layer
from kvjax.cache.fill import empty_state
from kvjax.cache.method import HowPlaced, SamplingMethod
from kvjax.errors import ConfigError
from kvjax.inference import chunked_prefill, decode, prefill
from kvjax.inference.plan import Slots, make_plan, store_geometry
from kvjax.methods import OmniKV, Quest
from kvjax.models.config import ModelConfig
from kvjax.models.transformer import Block, Transformer
from kvjax.ops.attention import NEGATIVE
from kvjax.store.flash.store import FlashStore
from kvjax.typing import Array, Float, Int32, pytree

CONFIG = ModelConfig(
    family="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=128,
)
CAPACITY, PROMPT, STEPS = 96, (40, 3), 30
QUEST = Quest(budget=24, sinks=2, window=4, page=4)


@pytree
class Seen:
    """What `Witness` was shown."""

    quest: object
    weights: Float[Array, "*B 2"]
    query: Float[Array, "*B K G Q D"]
    query_pos: Int32[Array, "*B Q"]
    token: Int32[Array, "*B T"]  # by position: of the prompt's middle part, then of what left the window
    ahead: Int32[Array, "*B T"]  # by position: of the tokens after those that left the window
    noted: Int32[Array, "*B"]  # how many came with the key that `select` had expected to leave


@dataclasses.dataclass(frozen=True)
class Witness(Quest):
    """Quest that writes down what it is shown."""

    observation: int = 4
    table: ClassVar[np.ndarray] = np.arange(10, dtype=np.float32).reshape(5, 2)

    def weights(self, layer):
        return jnp.asarray(self.table[layer])

    def init(self, spec, weights):
        query = jnp.zeros((spec.kv_heads, spec.group, self.observation, spec.head_dim))
        unknown = jnp.full((self.observation,), -1, jnp.int32)
        nothing = jnp.full((CAPACITY,), -1, jnp.int32)
        return Seen(super().init(spec, ()), weights, query, unknown, nothing, nothing, jnp.int32(0))

    def build(self, spec, index, context):
        quest, placement = super().build(spec, index.quest, context)
        token = index.token.at[jnp.where(context.valid, context.pos, CAPACITY)].set(context.token, mode="drop")
        return dataclasses.replace(
            index, quest=quest, query=context.query, query_pos=context.query_pos, token=token
        ), placement

    def select(self, spec, index, view, q):
        return dataclasses.replace(super().select(spec, index.quest, view, q), note=view.oldest_key)

    def append(self, spec, index, view, evicted):
        quest, placement = super().append(spec, index.quest, view, evicted)
        at = jnp.where(evicted.valid, evicted.pos, CAPACITY)
        token = index.token.at[at].set(evicted.token, mode="drop")
        after = jnp.where(evicted.valid, evicted.pos + 1 + jnp.arange(spec.ring), CAPACITY)
        ahead = index.ahead.at[after].set(evicted.ahead, mode="drop")
        expected = False if evicted.note is None else jnp.array_equal(evicted.note, evicted.key)
        noted = index.noted + (evicted.valid & expected)
        return dataclasses.replace(index, quest=quest, token=token, ahead=ahead, noted=noted), placement


def first_layers(count):
    return dataclasses.replace(CONFIG, num_layers=count, windows=(None,) * count)


@pytest.fixture(scope="module")
def params():
    return make_params(CONFIG)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 64, (2, CAPACITY)).astype(np.int32)


def start(method, params, tokens, store=None, config=CONFIG, **slots):
    plan = make_plan(config, method, 2, CAPACITY)
    branch = store.create(store_geometry(plan), "contract") if store else None
    state, _ = prefill.prefill(
        plan, params, tokens[:, : max(PROMPT)], jnp.asarray(PROMPT), branch, Slots(**slots)
    )
    return plan, state, branch


def decoded(method, params, tokens, store=None, driver="staged", steps=STEPS, config=CONFIG, **slots):
    """Logits of the next tokens, and the state after them."""
    plan, state, branch = start(method, params, tokens, store, config, **slots)
    logits = []
    for i in range(steps):
        fed = tokens[np.arange(2), np.asarray(PROMPT) + i]
        done = decode.step(plan, params, state, fed, driver=driver, donate=True)
        state = jax.block_until_ready(done.state)
        logits.append(np.asarray(done.logits))
    if branch is not None:
        branch.close()
    return np.stack(logits), state


@pytest.mark.parametrize("driver", ["staged", "fused"])
def test_token_ids_reach_the_method(params, tokens, driver):
    """One program has every layer in it, and two of them do."""
    method = Witness(budget=24, sinks=2, window=4, page=4)
    _, state = decoded(method, params, tokens, driver=driver, config=first_layers(2 if driver == "fused" else 4))
    for one in state.layers:
        for b, length in enumerate(np.asarray(PROMPT) + STEPS):
            gone = np.arange(method.sinks, length - method.window + 1)
            seen = np.asarray(one.state.index.token[b])
            np.testing.assert_array_equal(seen[gone], tokens[b, gone])
            assert (np.delete(seen, gone) == -1).all()
            first = max(length - STEPS - method.window + 1, method.sinks)  # to leave while decoding
            seen = np.asarray(one.state.index.ahead[b])
            np.testing.assert_array_equal(seen[first + 1 : length], tokens[b, first + 1 : length])
            assert (seen[: first + 1] == -1).all() and (seen[length:] == -1).all()


@pytest.mark.parametrize("driver", ["staged", "fused"])
def test_what_a_selection_notes_reaches_the_append_of_its_step(params, tokens, driver):
    """And `select` sees the key that is about to leave; the second prompt does not fill the window."""
    method = Witness(budget=24, sinks=2, window=4, page=4)
    _, state = decoded(method, params, tokens, driver=driver, config=first_layers(2))
    for one in state.layers:
        left = np.asarray(PROMPT) + STEPS - method.window + 1 - np.maximum(np.asarray(PROMPT) - method.window + 1, 2)
        np.testing.assert_array_equal(one.state.index.noted, left)


def test_tokens_of_a_chunk_come_without_a_note(params, tokens):
    method = Witness(budget=24, sinks=2, window=4, page=4)
    plan, state, _ = start(method, params, tokens)
    state, _ = chunked_prefill.extend(plan, params, state, tokens[:, 40:60], jnp.full(2, 20), chunk=8)
    assert all((one.state.index.noted == 0).all() for one in state.layers)


def test_the_last_queries_of_the_prompt_reach_the_method(params, tokens):
    _, state, _ = start(Witness(budget=24, sinks=2, window=4, page=4), params, tokens)
    seen = state.layers[0].state.index
    np.testing.assert_array_equal(seen.query_pos, [[36, 37, 38, 39], [-1, 0, 1, 2]])
    x = Transformer(CONFIG).apply({"params": params}, jnp.asarray(tokens), method="embed")
    position = jnp.broadcast_to(jnp.arange(CAPACITY), tokens.shape)
    q = Block(CONFIG.layers[0]).apply({"params": params["layers_0"]}, x, position, method="queries")
    for b in range(2):
        for i, at in enumerate(np.asarray(seen.query_pos[b])):
            if at >= 0:
                got = seen.query[b, :, :, i].reshape(4, 8)
                np.testing.assert_allclose(got, q[b, at], rtol=1e-5, atol=1e-5)


def test_weights_of_each_layer_reach_its_index(params, tokens):
    _, state, _ = start(Witness(budget=24, sinks=2, window=4, page=4), params, tokens)
    for i, one in enumerate(state.layers):
        np.testing.assert_array_equal(one.state.index.weights, np.tile(Witness.table[i], (2, 1)))


REUSE = dataclasses.replace(QUEST, dense_layers=1, reuse=2)  # layers: dense, leader, follower, leader
TREE = dataclasses.replace(METHODS["icecache"], dense_layers=1, reuse=3)  # dense, leader, follower, follower


@pytest.mark.parametrize("method", [REUSE, TREE], ids=["quest", "icecache"])
def test_followers_place_and_choose_as_their_leader(method, params, tokens):
    plan, state, _ = start(method, params, tokens)
    assert [one.follows for one in plan.layers] == [False, False, True, method.reuse == 3]
    for i in range(STEPS):
        fed = tokens[np.arange(2), np.asarray(PROMPT) + i]
        done = decode.step(plan, params, state, fed, donate=True)
        state = done.state
        np.testing.assert_array_equal(done.reports[1].selected, done.reports[2].selected)
    assert np.array_equal(done.reports[1].selected, done.reports[3].selected) == (method.reuse == 3)
    one, other = state.layers[1].state, state.layers[2].state
    assert other.index == ()
    np.testing.assert_array_equal(one.pos, other.pos)
    np.testing.assert_array_equal(one.count, other.count)
    assert not np.array_equal(one.tail.key, other.tail.key)


@pytest.mark.parametrize("method", [REUSE, TREE], ids=["quest", "icecache"])
def test_followers_keep_every_key(method, params, tokens):
    """With a budget for everything the choice does not matter: what followers store must be the whole cache."""
    whole = dataclasses.replace(method, budget=None)
    expected = dense(params, tokens, CONFIG)
    shared, _ = decoded(whole, params, tokens)
    for b, prompt in enumerate(PROMPT):
        np.testing.assert_allclose(shared[:, b], expected[b, prompt : prompt + STEPS], rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize(("driver", "prefetch"), [
    ("staged", "off"), ("staged", "layer"), ("staged", "step"), ("fused", "layer"),
])
def test_followers_on_flash_equal_memory(params, tokens, tmp_path, driver, prefetch):
    """The last of four layers, a leader again, is left out of what one program would have in it."""
    config = first_layers(3 if driver == "fused" else 4)
    expected, _ = decoded(REUSE, params, tokens, driver=driver, config=config)
    store = FlashStore(directory=tmp_path)
    got, _ = decoded(REUSE, params, tokens, store, driver, config=config, prefetch=prefetch)
    np.testing.assert_array_equal(got, expected)


def test_a_prefetch_for_a_follower_is_always_right(params, tokens, tmp_path):
    """Followers' blocks are known for certain; with `lookahead` those of leaders are, too."""
    plan, state, branch = start(dataclasses.replace(REUSE, lookahead=True), params, tokens,
                                FlashStore(directory=tmp_path),
                                prefetch="layer")
    for i in range(STEPS):
        fed = tokens[np.arange(2), np.asarray(PROMPT) + i]
        state = decode.step(plan, params, state, fed, donate=True).state
    stats = branch.stats()
    branch.close()
    assert stats.prefetched > 0
    assert stats.mispredicted == 0


def test_a_method_that_rewrites_blocks_cannot_be_followed():
    with pytest.raises(ConfigError, match="reuse=2"):
        dataclasses.replace(METHODS["dynakv"], reuse=2)
    with pytest.raises(ConfigError, match="reuse=0"):
        dataclasses.replace(QUEST, reuse=0)


def test_only_layers_with_the_same_sliding_window_follow():
    """Given windows that change in the middle of a group: the layer that has another one leads, and is followed."""
    config = dataclasses.replace(CONFIG, num_layers=6, windows=(16, None, None, None, None, 16))
    plan = make_plan(config, dataclasses.replace(QUEST, reuse=3, dense_layers=0), 1, CAPACITY)
    assert [one.follows for one in plan.layers] == [False, False, True, False, True, False]


@pytest.mark.parametrize("layers, filters", [(5, [False, True, False, True, False]), (4, [False, True, False, False])])
def test_only_layers_that_are_followed_filter(layers, filters):
    config = dataclasses.replace(CONFIG, num_layers=layers, windows=(None,) * layers)
    method = OmniKV(budget=24, sinks=2, window=4, dense_layers=1, reuse=2)
    plan = make_plan(config, method, 1, CAPACITY)
    assert [one.filters for one in plan.layers] == filters
    assert [one.follows for one in plan.layers] == [False, False, True, False, True][:layers]


def test_a_layer_that_follows_makes_no_weights_that_nobody_sees():
    method = dataclasses.replace(METHODS["h2o"], reuse=2)
    plans = make_plan(CONFIG, method, 1, CAPACITY).layers
    assert [one.observes for one in plans] == [True, False, True, False]


def test_one_layer_alone_has_no_token_ids(params):
    plan = layer.LayerPlan(QUEST, QUEST.spec(kv_heads=2, group=2, head_dim=8, capacity=CAPACITY))
    assert (empty_state(plan, 3).tail.token == -1).all()


# One table of positions for all heads, or none ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Alike(Quest):
    """Quest with one table for all heads, as if tokens might be in another order."""

    placement: ClassVar[HowPlaced] = "alike"


@dataclasses.dataclass(frozen=True)
class Apart(Alike):
    """The same with a table for each head, as if heads might place tokens in their own ways."""

    placement: ClassVar[HowPlaced] = "per_head"


@pytest.mark.parametrize("page", [4, CAPACITY])
def test_tables_of_positions_are_as_few_as_a_method_needs(page):
    settings = {"budget": CAPACITY, "sinks": 2, "window": 4, "page": page}
    sims = [Sim(method(**settings), Stream.draw(3, batch=2), [60, 9]) for method in (Quest, Alike, Apart)]
    for _ in range(20):
        (out, seen), *others = [sim.step() for sim in sims]
        for expected, told in others:
            np.testing.assert_array_equal(out, expected)
            np.testing.assert_array_equal(seen.selected, told.selected)
    states, blocks = [sim.cache.state for sim in sims], sims[0].plan.spec.num_blocks
    assert [one.positions.shape[1:3] for one in states] == [(1, 1), (1, blocks), (HEADS, blocks)]
    assert [one.counts.shape[1:] for one in states] == [(1, blocks), (1, blocks), (HEADS, blocks)]
    for other in states[1:]:
        np.testing.assert_array_equal(states[0].pos, other.pos)
        np.testing.assert_array_equal(states[0].count, other.count)


def test_only_what_stays_can_be_in_order():
    with pytest.raises(ConfigError, match="in_order"):
        type("Careless", (Quest,), {"evicts": True})(budget=64)


def test_what_is_held_back_is_not_in_order():
    class Careless(Quest):
        def blocks(self, capacity, rows):
            return (*super().blocks(capacity, rows)[:3], 1)

    with pytest.raises(ConfigError, match="in_order"):
        Careless(budget=64).spec(kv_heads=2, group=2, head_dim=8, capacity=CAPACITY)


def test_a_method_that_rewrites_blocks_has_a_table_for_each_head():
    class Careless(type(METHODS["dynakv"])):
        placement: ClassVar[HowPlaced] = "alike"

    with pytest.raises(ConfigError, match="placement"):
        Careless(budget=64)


# Rows with weights --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Weighted(SamplingMethod, Quest):
    """Quest whose page j counts j + 1 times, times exp(first number of the key); query head 1 sees even pages only."""

    def select(self, spec, index, view, q):
        selection = super().select(spec, index, view, q)
        block = jnp.broadcast_to(selection.block[:, None], (spec.kv_heads, spec.group, spec.max_blocks))
        hidden = (block % 2 == 1) & (jnp.arange(spec.group) == 1)[:, None]
        bias = jnp.where(hidden, NEGATIVE, jnp.log(block + 1.0))
        return dataclasses.replace(selection, bias=bias)

    def weigh(self, spec, index, q, key, bias):
        return bias + key[:, None, :, 0].astype(jnp.float32)


WEIGHTED = Weighted(budget=24, sinks=2, window=4, page=4)


def weighted_attention(stream, b, at, pos, log_weight):
    """Attention over the given positions, each weighed, in float64: `[K, G, D]` of pos[K, N], log_weight[K, G, N]."""
    rows = np.arange(HEADS)[:, None]
    key, value = (array[b].astype(np.float64)[pos, rows] for array in (stream.k, stream.v))
    q = stream.q[b, at].astype(np.float64).reshape(HEADS, GROUP, SIZE)
    weight = np.exp(np.einsum("kgd,knd->kgn", q, key) / np.sqrt(SIZE) + log_weight)
    return np.einsum("kgn,knd->kgd", weight / weight.sum(-1, keepdims=True), value)


def test_rows_count_as_their_selection_says():
    stream = Stream.draw(3, batch=1)
    sim = Sim(WEIGHTED, stream, [60])
    for _ in range(8):
        at, spec = int(sim.at[0]), sim.plan.spec
        out, report = sim.step()
        chosen = np.asarray(report.selected)[0]
        assert (chosen >= 0).all()
        tail = np.r_[0 : spec.sinks, at - spec.ring : at + 1]
        pos = np.concatenate([chosen, np.tile(tail, (HEADS, 1))], axis=1)
        page = (chosen - spec.sinks) // spec.block_rows
        first = stream.k[0, chosen, np.arange(HEADS)[:, None], 0]
        log_weight = np.zeros((HEADS, GROUP, pos.shape[1]))
        log_weight[:, :, : chosen.shape[1]] = (np.log(page + 1.0) + first)[:, None]
        log_weight[:, 1, : chosen.shape[1]][page % 2 == 1] = -np.inf
        expected = weighted_attention(stream, 0, at, pos, log_weight)
        np.testing.assert_allclose(out[0], expected.reshape(-1, SIZE), atol=1e-5, rtol=0)


def test_weights_need_the_query_that_attends(params, tokens):
    for settings in ({"reuse": 2}, {"lookahead": True}):
        with pytest.raises(ConfigError, match="weighs what it drew"):
            dataclasses.replace(WEIGHTED, **settings)
    plan, state, _ = start(WEIGHTED, params, tokens)
    with pytest.raises(ConfigError, match="decode the text"):
        chunked_prefill.extend(plan, params, state, tokens[:, :4], jnp.asarray([4, 4]), 4)
