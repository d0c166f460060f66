"""H2O, SnapKV, ChunkKV: the tokens they keep are those that a slow computation from attention weights keeps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from harness import CAPACITY, GROUP, HEADS, METHODS, SIZE, Sim, Stream, attention_weights

import kvjax
from kvjax.errors import ConfigError
from kvjax.inference import decode
from kvjax.methods import H2O, ChunkKV, SnapKV

ROOM = 18  # of a budget of 24, less two sinks and a window of four
SINKS, RING = 2, 3
PROMPTS = [(60, 31), (24, 4), (95, 7)]
SNAPKV, CHUNKKV, H2O_ = METHODS["snapkv"], METHODS["chunkkv"], METHODS["h2o"]


def full_weights(stream, b, at):
    """Full attention's weights of one query, over all positions of the stream, `[K, G, CAPACITY]`."""
    weight = attention_weights(stream, b, at, [range(at + 1)] * HEADS)
    return np.pad(weight, ((0, 0), (0, 0), (0, CAPACITY - 1 - at)))


def votes_of(stream, b, length, count):
    """Weights of the prompt's last `count` queries, summed `[K, G, length]`."""
    return sum(full_weights(stream, b, at) for at in range(max(0, length - count), length))[..., :length]


def best(worth, positions):
    """The ROOM positions that are worth most, the first of equals."""
    return set(sorted(positions, key=lambda p: (-worth[p], p))[:ROOM])


def middle(length):
    return range(SINKS, max(SINKS, length - RING))


def blocks(sim, b, head):
    return set(sim.places(b, head)["blocks"])


# ----------------------------------------------------------------------------------------- SnapKV


def pooled(observation_scores, kernel, pooling):
    """Each vote replaced by the mean or maximum of its neighbourhood, one after the other."""
    half = kernel // 2
    padded = np.pad(observation_scores, half)
    windows = [padded[i : i + kernel] for i in range(len(observation_scores))]
    return np.array([window.max() if pooling == "max" else window.sum() / kernel for window in windows])


def snapkv_worth(method, stream, b, length, head):
    before = votes_of(stream, b, length, method.observation)[head][:, : max(0, length - RING)]
    rows = [pooled(row, method.kernel, method.pooling) for row in before]
    return np.mean(rows, axis=0) if method.aggregation == "softmax_mean" else np.max(rows, axis=0)


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
@pytest.mark.parametrize("change", [
    {}, {"kernel": 1}, {"kernel": 7, "pooling": "max"}, {"aggregation": "softmax_max"}, {"observation": 40},
], ids=str)
def test_snapkv_keeps_the_tokens_with_most_pooled_votes(change, prompt):
    method, stream = dataclasses.replace(SNAPKV, **change), Stream.draw(0)
    sim = Sim(method, stream, prompt)
    for b, length in enumerate(prompt):
        for head in range(HEADS):
            worth = snapkv_worth(method, stream, b, length, head)
            assert blocks(sim, b, head) == best(worth, middle(length))


def test_later_tokens_replace_the_prompts_least_and_then_each_other():
    stream, prompt = Stream.draw(1), (50, 11)
    sim = Sim(SNAPKV, stream, prompt)
    for _ in range(40):
        sim.step()
        for b, length in enumerate(prompt):
            later = set(range(max(SINKS, length - RING), max(SINKS, sim.at[b] - RING)))
            for head in range(HEADS):
                worth = snapkv_worth(SNAPKV, stream, b, length, head)
                everything = dict(enumerate(worth)) | {p: 1000.0 + p for p in later}
                assert blocks(sim, b, head) == best(everything, {*middle(length), *later})


# ---------------------------------------------------------------------------------------- ChunkKV


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
@pytest.mark.parametrize("change", [
    {}, {"chunk": 1}, {"chunk": 10}, {"shared": True}, {"aggregation": "softmax_max"},
], ids=str)
def test_chunkkv_keeps_the_chunks_with_most_votes(change, prompt):
    method, stream = dataclasses.replace(CHUNKKV, **change), Stream.draw(2)
    sim = Sim(method, stream, prompt)
    for b, length in enumerate(prompt):
        observation_scores = votes_of(stream, b, length, method.observation)
        paid = observation_scores.mean(1) if method.aggregation == "softmax_mean" else observation_scores.max(1)
        paid = np.tile(paid.sum(0), (HEADS, 1)) if method.shared else paid
        for head in range(HEADS):
            score = {}
            for p in middle(length):
                score.setdefault(p // method.chunk, []).append(paid[head, p])
            worth = {p: np.mean(score[p // method.chunk]) for p in middle(length)}
            assert blocks(sim, b, head) == best(worth, middle(length))


def test_chunkkv_keeps_whole_chunks_but_one():
    sim = Sim(CHUNKKV, Stream.draw(3), (90, 70))
    for b, length in enumerate((90, 70)):
        for head in range(HEADS):
            kept = blocks(sim, b, head)
            chunks = {p // CHUNKKV.chunk for p in kept}
            cut = [c for c in chunks if not {p for p in middle(length) if p // CHUNKKV.chunk == c} <= kept]
            assert len(cut) <= 1


def test_a_layer_that_follows_keeps_what_its_leader_keeps(params, tokens):
    """The layer-wise index reuse, through prompt and decoding."""
    method = dataclasses.replace(CHUNKKV, reuse=2)
    plan, state, _, _ = tiny.start(params, tokens, method)
    for i in range(30):
        state = decode.step(plan, params, state, tokens[np.arange(2), np.asarray(tiny.PROMPT) + i]).state
    alone = tiny.start(params, tokens, CHUNKKV)[1].layers[1].state.pos
    leader, follower = (one.state for one in state.layers)
    assert follower.index == ()
    np.testing.assert_array_equal(leader.pos, follower.pos)
    np.testing.assert_array_equal(leader.count, follower.count)
    assert not np.array_equal(alone, tiny.start(params, tokens, method)[1].layers[1].state.pos)


# -------------------------------------------------------------------------------------------- H2O


class SlowH2O:
    """Algorithm 1 with dictionaries: one head of one sequence."""

    def __init__(self, stream, b, head, length, count):
        self.stream, self.b, self.head, self.at = stream, b, head, length
        paid = votes_of(stream, b, length, count)[head].sum(0)
        self.sums = dict(enumerate(paid))
        self.kept = best(self.sums, middle(length))

    @property
    def recent(self):
        return set(range(max(SINKS, self.at - RING), self.at))

    def step(self):
        seen = sorted({p for p in range(SINKS) if p < self.at} | self.kept | self.recent | {self.at})
        weight = attention_weights(self.stream, self.b, self.at, [seen] * HEADS)[self.head].sum(0)
        for p in seen:
            self.sums[p] = self.sums.get(p, 0.0) + weight[p]
        self.at += 1
        gone = self.at - 1 - RING
        if gone >= SINKS:
            self.kept.add(gone)
        if len(self.kept) > ROOM:
            self.kept.remove(min(self.kept, key=self.sums.get))


def test_a_negative_number_of_observed_queries_is_refused():
    with pytest.raises(ConfigError, match="observation=-5"):
        dataclasses.replace(H2O_, observation=-5)
    with pytest.raises(ConfigError, match="observation=0"):
        dataclasses.replace(H2O_, observation=0)


@pytest.mark.parametrize("prompt", [(50, 31), (24, 4), (1, 9)], ids=str)
@pytest.mark.parametrize("observation", [None, 8])
def test_h2o_keeps_the_heavy_hitters_at_every_step(prompt, observation):
    stream = Stream.draw(4)
    sim = Sim(dataclasses.replace(H2O_, observation=observation), stream, prompt)
    slow = {(b, head): SlowH2O(stream, b, head, prompt[b], observation or CAPACITY)
            for b in range(2) for head in range(HEADS)}
    for _ in range(CAPACITY - max(prompt)):
        for (b, head), one in slow.items():
            assert blocks(sim, b, head) == one.kept
            one.step()
        sim.step()


def test_attention_decides_and_not_age():
    """Given one early key that all queries like, it survives everything else; the prompt has room for few."""
    stream = Stream.draw(5)
    stream.k[:, 7] = stream.q.reshape(2, CAPACITY, HEADS, GROUP, SIZE).mean(3)[:, 60] * 3
    stream.q[:, :] = stream.q[:, 60:61]
    sim = Sim(H2O_, stream, (40, 30))
    sim.run(50)
    assert all(7 in blocks(sim, b, head) for b in range(2) for head in range(HEADS))


# ----------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("change", [{"kernel": 4}, {"pooling": "median"}, {"aggregation": "max"}], ids=str)
def test_snapkv_refuses(change):
    with pytest.raises(ConfigError):
        SnapKV(**change)


@pytest.mark.parametrize("kind", [H2O, ChunkKV])
def test_votes_are_weights(kind):
    with pytest.raises(ConfigError, match="softmax_mean"):
        kind(aggregation="mean")


@pytest.mark.parametrize("kind", [H2O, SnapKV, ChunkKV])
def test_a_budget_that_keeps_nothing_is_refused(kind):
    with pytest.raises(ConfigError, match="streaming_llm"):
        kind(budget=12, sinks=2, window=10).spec(kv_heads=1, group=1, head_dim=8, capacity=100)
    kind(budget=None, sinks=2, window=10).spec(kv_heads=1, group=1, head_dim=8, capacity=11)  # nothing to drop


def test_one_layer_alone_needs_the_prompts_queries():
    stream, length = Stream.draw(6), np.array([50, 30])
    cache = kvjax.init_cache(SNAPKV, batch=2, kv_heads=HEADS, group=GROUP, head_dim=SIZE, capacity=CAPACITY)
    prompt = [jnp.asarray(array) for array in (stream.k, stream.v, length)]
    with pytest.raises(ConfigError, match="query"):
        kvjax.prefill_cache(cache, *prompt)
    filled = jax.jit(kvjax.prefill_cache)(cache, *prompt, jnp.asarray(stream.q))
    np.testing.assert_array_equal(filled.layer.state.pos, Sim(SNAPKV, stream, length).cache.state.pos)
