"""DynaKV over ten thousand tokens: running statistics against brute force, and what splits cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import GROUP, HEADS, SIZE

import kvjax
from kvjax.cache import state as caching
from kvjax.methods import DynaKV

PROMPT, STEPS = 600, 10_000
LONG = DynaKV(budget=64, sinks=4, window=16, buffer=6)


def long_stream(seed, tokens, clumps=24, drift=3.0):
    """Queries, keys and values of one sequence; keys come in clumps that drift."""
    rng = np.random.default_rng(seed)
    centres = 2 * rng.normal(size=(clumps, HEADS, SIZE))
    k = centres[rng.integers(0, clumps, tokens)] + 0.5 * rng.normal(size=(tokens, HEADS, SIZE))
    k += np.linspace(0, drift, tokens)[:, None, None]
    q = 2 * rng.normal(size=(tokens, HEADS * GROUP, SIZE))
    return q.astype(np.float32), k.astype(np.float32), rng.normal(size=k.shape).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def _prefill(method, k, v, length):
    cache = kvjax.init_cache(
        method, batch=1, kv_heads=HEADS, group=GROUP, head_dim=SIZE, capacity=PROMPT + STEPS
    )
    return kvjax.prefill_cache(cache, k, v, length)


def start(stream, prompt):
    _, k, v = (x[None, :PROMPT] for x in stream)
    return _prefill(LONG, k, v, np.array([prompt], np.int32))


def forced(plan, state):
    """What `select` would load on purpose in the next step; the query has no say in it."""
    one = jax.tree.map(lambda leaf: leaf[0], state)
    query = jnp.zeros((HEADS, GROUP, SIZE))
    return plan.method.select(plan.spec, one.index, caching.view(plan.spec, one), query).force


@jax.jit
def decode(cache, q, k, v):
    """Decodes tokens one by one; returns the cache and, for each step, what was held, forced and loaded."""

    def step(cache, token):
        force = forced(cache.plan, cache.layer.state)
        _, cache = kvjax.attend(cache, *(x[None] for x in token))
        state = cache.layer.state
        seen = {"held": state.tail.held_block[0], "splits": state.index.splits[0], "loaded": state.loaded[0]}
        return cache, {**seen, "force": force, "clusters": jnp.sum(state.count[0] > 0, axis=-1)}

    return jax.lax.scan(step, cache, (q, k, v))


@functools.cache
def long_run():
    stream = long_stream(0, PROMPT + STEPS)
    cache, history = decode(start(stream, PROMPT), *(x[PROMPT:] for x in stream))
    return stream[1], jax.device_get(cache), jax.device_get(history)


def members(cache, head):
    """Block, positions and stored keys of every cluster of a head."""
    state, keys = cache.layer.state, np.asarray(cache.layer.pool.key)
    for block in np.flatnonzero(state.count[0, head]):
        rows = state.count[0, head, block]
        yield block, state.pos[0, head, block, :rows], keys[0, head, block, :rows]


@pytest.mark.parametrize("head", range(HEADS))
def test_the_long_run_splits_clusters(head):
    """Without this the tests of running statistics would say little."""
    _, cache, _ = long_run()
    assert cache.layer.state.index.splits[0, head] > 300


@pytest.mark.parametrize("head", range(HEADS))
def test_blocks_keep_the_keys_of_their_positions(head):
    keys, cache, _ = long_run()
    for _, pos, stored in members(cache, head):
        np.testing.assert_array_equal(stored, keys[pos, head])


@pytest.mark.parametrize("head", range(HEADS))
def test_running_variance_equals_brute_force(head):
    _, cache, _ = long_run()
    for block, _, stored in members(cache, head):
        exact = stored.astype(np.float64).var(axis=0).sum()
        np.testing.assert_allclose(cache.layer.state.index.variance[0, head, block], exact, rtol=1e-5)


@pytest.mark.parametrize("head", range(HEADS))
def test_running_centroid_equals_brute_force(head):
    _, cache, _ = long_run()
    for block, _, stored in members(cache, head):
        exact = stored.astype(np.float64).mean(axis=0)
        error = np.linalg.norm(cache.layer.state.index.centroid[0, head, :, block] - exact)
        assert error <= 1e-5 * np.linalg.norm(exact)


def test_the_norm_kept_of_every_cluster_is_that_of_its_centroid():
    _, cache, _ = long_run()
    index = cache.layer.state.index
    np.testing.assert_allclose(index.norm, np.square(index.centroid).sum(-2), rtol=1e-5)


@pytest.mark.parametrize("head", range(HEADS))
def test_no_key_is_lost_in_ten_thousand_inserts(head):
    _, cache, _ = long_run()
    state, spec = cache.layer.state, cache.plan.spec
    stored = np.concatenate([pos for _, pos, _ in members(cache, head)])
    tail = state.tail.pos[0, head]
    assert len(tail[tail >= 0]) >= spec.sinks + spec.ring
    np.testing.assert_array_equal(np.sort(np.concatenate([stored, tail[tail >= 0]])), np.arange(PROMPT + STEPS))


@pytest.mark.parametrize("head", range(HEADS))
def test_held_keys_never_exceed_the_buffer_after_a_step(head):
    _, cache, history = long_run()
    held = (history["held"][:, head] < cache.plan.spec.num_blocks).sum(-1)
    assert held.max() == LONG.buffer  # reached, and then split


@pytest.mark.parametrize("head", range(HEADS))
def test_a_full_buffer_forces_its_fullest_cluster_and_only_then(head):
    _, cache, history = long_run()
    none, pushed = cache.plan.spec.num_blocks, 0
    before = history["held"][:-1, head]
    for held, force, loaded, after in zip(
        before, history["force"][1:, head], history["loaded"][1:, head], history["held"][1:, head], strict=True
    ):
        accounts, keys = np.unique(held[held < none], return_counts=True)
        if keys.sum() < LONG.buffer:
            assert force == none
            continue
        assert force in accounts[keys == keys.max()]
        assert force in loaded and force not in after  # split in the very step
        pushed += 1
    assert pushed > 30


@pytest.mark.parametrize("head", range(HEADS))
def test_every_split_adds_one_cluster(head):
    _, _, history = long_run()
    assert (np.diff(history["splits"][:, head]) == np.diff(history["clusters"][:, head])).all()


def test_splits_compile_nothing():
    """2,000 steps with hundreds of splits are served by one trace."""
    traces = []

    @jax.jit
    def step(cache, q, k, v):
        traces.append(None)
        return kvjax.attend(cache, q[None], k[None], v[None])[1]

    stream = long_stream(1, PROMPT + 2_000)
    cache = start(stream, PROMPT)
    for token in zip(*(x[PROMPT:] for x in stream), strict=True):
        cache = step(cache, *token)
    assert np.asarray(cache.layer.state.index.splits).sum() > 100
    assert len(traces) == 1 and step._cache_size() == 1


@pytest.mark.parametrize(("clumps", "drift"), [(24, 3.0), (STEPS, 0.0)], ids=["clumps", "isotropic"])
def test_clusters_that_start_from_three_tokens_stay_few(clumps, drift):
    """Without a prompt to calibrate tau, keys still gather: on average half the target size and more."""
    stream = long_stream(2, PROMPT + STEPS, clumps, drift)
    cache, history = decode(start(stream, 3), *(x[3 : STEPS + 3] for x in stream))
    assert (np.asarray(cache.layer.state.index.tau) < 0).all()
    clusters = np.asarray(history["clusters"])
    assert (clusters[-1] > 10).all()
    assert (clusters <= 4 + np.arange(1, STEPS + 1)[:, None] / (LONG.cluster / 2)).all()
