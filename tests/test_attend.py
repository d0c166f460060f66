"""`kvjax.attend` inside a transformer block that knows nothing of kvjax."""

import dataclasses
import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import temporaries

import kvjax
from kvjax.errors import ConfigError, PromptError
from kvjax.methods.shared.adapters import Adapters
from kvjax.methods.shared.delimiters import Delimiters
from kvjax.ops import quantize

HIDDEN, HEADS, KV_HEADS, SIZE = 32, 4, 2, 8
GROUP = HEADS // KV_HEADS
BATCH, PROMPT, STEPS, CAPACITY = 2, 24, 12, 48
LENGTHS = np.array([24, 17], np.int32)

METHODS = {
    "full": kvjax.Full(page=8), "oracle": kvjax.Oracle(budget=CAPACITY),
    "streaming_llm": kvjax.StreamingLLM(budget=CAPACITY),
    "quest": kvjax.Quest(budget=CAPACITY, sinks=2, window=4, page=4),
    "dynakv": kvjax.DynaKV(budget=CAPACITY, sinks=2, window=4, cluster=4, buffer=3, max_blocks=1000),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
SOME = ("full", "quest", "dynakv")
some_methods = pytest.mark.parametrize("method", [METHODS[name] for name in SOME], ids=SOME)


# A block of someone else's model ------------------------------------------------------------------


def weights(seed):
    rng = np.random.default_rng(seed)
    shapes = {
        "q": (HIDDEN, HEADS * SIZE), "k": (HIDDEN, KV_HEADS * SIZE), "v": (HIDDEN, KV_HEADS * SIZE),
        "o": (HEADS * SIZE, HIDDEN),
    }
    return {name: (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32) for name, shape in shapes.items()}


def rope(x, position):
    """Rotates pairs (2i, 2i + 1) of x[..., heads, size] by position * 100^(-2i / size)."""
    angle = position[..., None, None] * 100.0 ** (-jnp.arange(0, SIZE, 2) / SIZE)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = [even * jnp.cos(angle) - odd * jnp.sin(angle), even * jnp.sin(angle) + odd * jnp.cos(angle)]
    return jnp.stack(turned, axis=-1).reshape(x.shape)


def project(w, x, position):
    q, k, v = ((x @ w[name]).reshape(*x.shape[:-1], -1, SIZE) for name in "qkv")
    return rope(q, position), rope(k, position), v


@jax.jit
def block_dense(w, x):
    """The block over a whole sequence x[T, E], with its own causal attention."""
    q, k, v = project(w, x, jnp.arange(len(x)))
    k, v = (jnp.repeat(y, GROUP, axis=1) for y in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, k) / jnp.sqrt(SIZE)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
    attended = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), v)
    return x + attended.reshape(len(x), -1) @ w["o"]


@jax.jit
def block_prefill(w, x, cache, length):
    _, k, v = project(w, x, jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]))
    return kvjax.prefill_cache(cache, k, v, length)


@jax.jit
def block_token(w, x, cache):
    """The block for one token x[B, E] of each sequence."""
    q, k, v = project(w, x, cache.length)
    attended, cache = kvjax.attend(cache, q, k, v)
    return x + attended.reshape(len(x), -1) @ w["o"], cache


# --------------------------------------------------------------------------------------------------


def hidden(seed=0):
    return np.random.default_rng(seed).normal(size=(BATCH, PROMPT + STEPS, HIDDEN)).astype(np.float32)


def prefilled(method, x, dtype="float32"):
    cache = kvjax.init_cache(
        method, batch=BATCH, kv_heads=KV_HEADS, group=GROUP, head_dim=SIZE, capacity=CAPACITY, dtype=dtype
    )
    return block_prefill(weights(1), x[:, :PROMPT], cache, LENGTHS)


def decode(x, cache):
    """Outputs of STEPS tokens that follow each sequence's own prompt."""
    outs = []
    for i in range(STEPS):
        out, cache = block_token(weights(1), x[np.arange(BATCH), LENGTHS + i], cache)
        outs.append(np.asarray(out))
    return np.stack(outs, axis=1), cache


@functools.cache
def dense():
    """Returns what the block's own attention gives for the decoded tokens."""
    whole = np.stack([np.asarray(block_dense(weights(1), jnp.asarray(x))) for x in hidden()])
    return np.stack([whole[b, LENGTHS[b] : LENGTHS[b] + STEPS] for b in range(BATCH)])


@every_method
def test_decoding_equals_the_blocks_own_dense_attention(method):
    out, _ = decode(hidden(), prefilled(method, hidden()))
    np.testing.assert_allclose(out, dense(), atol=2e-5)


@some_methods
def test_decoding_with_a_bf16_cache_is_near_dense_attention(method):
    out, _ = decode(hidden(), prefilled(method, hidden(), "bfloat16"))
    np.testing.assert_allclose(out, dense(), atol=2e-2)
    assert not np.allclose(out, dense(), atol=1e-5)  # keys and values were in fact rounded


@some_methods
def test_a_bf16_cache_stores_keys_and_values_in_bf16(method):
    layer = prefilled(method, hidden(), "bfloat16").layer
    for payload in (layer.state.tail.key, layer.state.tail.value):
        assert payload.dtype == jnp.bfloat16
    for bits in (layer.pool.key, layer.pool.value):
        assert bits.dtype == jnp.uint16 and quantize.unpack(bits, "bfloat16").dtype == jnp.bfloat16


@some_methods
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_keeps_its_structure_shapes_and_types(method, dtype):
    cache = prefilled(method, hidden(), dtype)
    _, later = decode(hidden(), cache)
    assert jax.tree.structure(later) == jax.tree.structure(cache)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(later)] == [(a.shape, a.dtype) for a in jax.tree.leaves(cache)]


def test_an_empty_cache_has_the_structure_of_a_filled_one():
    method = METHODS["dynakv"]
    empty = kvjax.init_cache(method, batch=BATCH, kv_heads=KV_HEADS, group=GROUP, head_dim=SIZE, capacity=CAPACITY)
    assert jax.tree.structure(empty) == jax.tree.structure(prefilled(method, hidden()))


def test_length_counts_the_tokens_of_each_sequence():
    cache = prefilled(METHODS["quest"], hidden())
    np.testing.assert_array_equal(cache.length, LENGTHS)
    np.testing.assert_array_equal(decode(hidden(), cache)[1].length, LENGTHS + STEPS)


def test_a_decoded_token_leaves_the_given_cache_as_it_was():
    cache = prefilled(METHODS["quest"], hidden())
    before = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(cache)]
    decode(hidden(), cache)
    for was, leaf in zip(before, jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(was, leaf)


def test_prefilling_again_drops_what_the_cache_held():
    x, other = hidden(), hidden(5)
    used = decode(other, prefilled(METHODS["dynakv"], other))[1]
    again = block_prefill(weights(1), x[:, :PROMPT], used, LENGTHS)
    np.testing.assert_array_equal(decode(x, again)[0], decode(x, prefilled(METHODS["dynakv"], x))[0])


def test_a_sliding_window_hides_older_tokens():
    """Given a window of 5 tokens, changing the value of an older one changes nothing."""
    cache = kvjax.init_cache(
        METHODS["full"], batch=1, kv_heads=KV_HEADS, group=GROUP, head_dim=SIZE, capacity=CAPACITY, sliding=5
    )
    rng = np.random.default_rng(2)
    k, v = (rng.normal(size=(1, 20, KV_HEADS, SIZE)).astype(np.float32) for _ in range(2))
    q, key, value = (rng.normal(size=(1, n, SIZE)).astype(np.float32) for n in (HEADS, KV_HEADS, KV_HEADS))

    @jax.jit
    def attended(changed):
        other = jnp.where(jnp.arange(20)[:, None, None] == changed, v + 1, v)
        filled = kvjax.prefill_cache(cache, k, other, np.array([20], np.int32))
        return kvjax.attend(filled, q, key, value)[0]

    np.testing.assert_array_equal(attended(15), attended(3))  # token 20 sees 16 .. 20
    assert not np.allclose(attended(16), attended(3))


def test_a_budget_smaller_than_its_parts_is_refused():
    with pytest.raises(ConfigError, match="budget"):
        kvjax.init_cache(kvjax.Quest(budget=8), batch=1, kv_heads=1, group=1, head_dim=8, capacity=100)


def test_what_is_no_method_is_refused(unchecked):
    with pytest.raises(ConfigError, match="no method"):
        kvjax.init_cache("quest", batch=1, kv_heads=1, group=1, head_dim=8, capacity=100)


@pytest.mark.parametrize("name", ["full", "quest"])
def test_the_pool_is_updated_in_place(name):
    """Given a donated cache, temporaries of a token stay far below the pool."""
    cache = kvjax.init_cache(METHODS[name], batch=1, kv_heads=2, group=2, head_dim=64, capacity=20_000)
    q, key = jnp.ones((1, 4, 64)), jnp.ones((1, 2, 64))
    pool = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layer.pool))
    assert temporaries(lambda cache: kvjax.attend(cache, q, key, key), cache) < pool / 4


def test_beyond_the_capacity_outputs_are_nan_and_prompts_refused():
    method = kvjax.Quest(budget=CAPACITY, sinks=2, window=4, page=4)
    cache = kvjax.init_cache(method, batch=1, kv_heads=KV_HEADS, group=GROUP, head_dim=SIZE, capacity=8)
    rng = np.random.default_rng(0)
    q, *new = (jnp.asarray(rng.normal(size=(1, heads, SIZE)), jnp.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    found = []
    for _ in range(9):
        out, cache = kvjax.attend(cache, q, *new)
        found.append(bool(jnp.isfinite(out).all()))
    assert found == [True] * 8 + [False]
    rows = jnp.zeros((1, 12, KV_HEADS, SIZE))
    for length, words in ((9, "capacity=8"), (13, "12 given tokens")):
        with pytest.raises(PromptError, match=words):
            kvjax.prefill_cache(cache, rows, rows, jnp.array([length]))


def test_queries_in_sixteen_bits():
    method = kvjax.Quest(budget=16, sinks=2, window=4, page=4)
    rng, outs = np.random.default_rng(0), {}
    tokens = [[rng.normal(size=(1, heads, SIZE)) for heads in (HEADS, KV_HEADS, KV_HEADS)] for _ in range(24)]
    for dtype in (jnp.bfloat16, jnp.float32):
        cache = kvjax.init_cache(method, batch=1, kv_heads=KV_HEADS, group=GROUP, head_dim=SIZE, capacity=32)
        for token in tokens:
            out, cache = kvjax.attend(cache, *(jnp.asarray(part, dtype) for part in token))
        outs[dtype] = np.asarray(out, np.float32)
    np.testing.assert_allclose(outs[jnp.bfloat16], outs[jnp.float32], atol=0.1)


def test_a_method_that_ends_blocks_at_delimiters_asks_for_token_ids():
    """And cuts by them, prompt and decoded tokens alike."""
    method = dataclasses.replace(harness.METHODS["dynsplit"], importance="table")
    rng = np.random.default_rng(0)
    empty = kvjax.init_cache(method, batch=1, kv_heads=KV_HEADS, group=GROUP, head_dim=SIZE, capacity=CAPACITY)
    key = jnp.asarray(rng.normal(size=(1, 40, KV_HEADS, SIZE)), jnp.float32)
    ids = [*Delimiters.load(harness.DELIMITERS).tokens, 60, 61, 62]
    token = jnp.asarray(rng.choice(ids, (1, 40)), jnp.int32)
    q = jnp.ones((1, HEADS, SIZE))
    with pytest.raises(ConfigError, match="token="):
        kvjax.prefill_cache(empty, key, key, jnp.array([40]))
    with pytest.raises(ConfigError, match="token="):
        kvjax.attend(empty, q, key[:, 0], key[:, 0])
    whole = kvjax.prefill_cache(empty, key, key, jnp.array([40]), token=token)
    cache = kvjax.prefill_cache(empty, key, key, jnp.array([20]), token=token)
    for at in range(20, 40):
        _, cache = kvjax.attend(cache, q, key[:, at], key[:, at], token[:, at])
    np.testing.assert_array_equal(cache.layer.state.counts, whole.layer.state.counts)
    assert len(np.unique(np.asarray(whole.layer.state.counts)[0, 0, :5])) > 1


def _arrays(*shapes):
    return [jnp.ones(shape) for shape in shapes]


@pytest.mark.parametrize(("shapes", "name"), [
    (((2, 4, 8), (2, 1, 8), (2, 2, 8)), "key"), (((2, 4, 8), (2, 2, 8), (2, 1, 8)), "value"),
    (((2, 8, 4), (2, 2, 8), (2, 2, 8)), "q"), (((1, 4, 8), (1, 2, 8), (1, 2, 8)), "q"),
])
def test_arrays_of_other_shapes_are_refused(unchecked, shapes, name):
    """And not broadcast or reshaped: wrong results would be the only sign."""
    cache = kvjax.init_cache(METHODS["full"], batch=2, kv_heads=2, group=2, head_dim=8, capacity=16)
    with pytest.raises(ConfigError, match=f"{name} is"):
        kvjax.attend(cache, *_arrays(*shapes))


def test_prompts_and_sizes_that_are_none_are_refused(unchecked):
    sizes = {"batch": 2, "kv_heads": 2, "group": 2, "head_dim": 8, "capacity": 16}
    cache = kvjax.init_cache(METHODS["full"], **sizes)
    rows, one_head = _arrays((2, 6, 2, 8), (2, 6, 1, 8))
    for args, error, words in (
        ((one_head, rows, jnp.array([6, 5])), ConfigError, "key is"),
        ((rows, rows, jnp.array([6])), ConfigError, "key"),
        ((rows, rows, jnp.array([[6, 5]])), PromptError, r"the shape \[1, 2\]"),
        ((rows, rows, jnp.array(6)), PromptError, r"the shape \[\]"),
        ((rows, rows, jnp.array([-1, 5])), PromptError, "negative"),
        ((rows, rows, jnp.array([5.5, 5])), PromptError, "whole numbers"),
    ):
        with pytest.raises(error, match=words):
            kvjax.prefill_cache(cache, *args)
    for name, wrong in ({"sliding": 0, "rope": 5} | dict.fromkeys(sizes, 0)).items():
        with pytest.raises(ConfigError, match=f"{name}={wrong}"):
            kvjax.init_cache(METHODS["full"], **{**sizes, name: wrong})


def test_lengths_that_are_known_may_be_part_of_a_program():
    """Arrays that a jitted function closes over, not only its arguments."""
    quest = kvjax.Quest(budget=16, sinks=2, window=4, page=4)
    cache = kvjax.init_cache(quest, batch=2, kv_heads=1, group=1, head_dim=8, capacity=64)
    key, length, beyond = jnp.ones((2, 20, 1, 8)), jnp.array([20, 7]), jnp.array([21, 7])
    filled = jax.jit(lambda key: kvjax.prefill_cache(cache, key, key, length))(key)
    np.testing.assert_array_equal(filled.length, [20, 7])
    with pytest.raises(PromptError, match="length=21"):
        jax.jit(lambda key: kvjax.prefill_cache(cache, key, key, beyond))(key)


@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0}, {"sliding": 14}], ids=["plain", "soft_cap", "sliding"])
@pytest.mark.parametrize("method", [kvjax.H2O(budget=CAPACITY, sinks=2, window=6),
                                    kvjax.InfLLM(budget=CAPACITY, sinks=2, window=16, block=4)], ids=["h2o", "infllm"])
def test_a_prompt_is_scored_as_its_tokens_are_one_by_one(method, options):
    """Compares the attention that the model pays, sink logits included."""
    rng = np.random.default_rng(4)
    q, key, value = (2 * rng.normal(size=(1, 32, KV_HEADS, SIZE)).astype(np.float32) for _ in range(3))
    sinks = jnp.asarray([1.0, 3.0])
    empty = kvjax.init_cache(method, batch=1, kv_heads=KV_HEADS, group=1, head_dim=SIZE, capacity=CAPACITY, **options)
    at_once = kvjax.prefill_cache(empty, key, value, np.array([32]), q, sink_logits=sinks)
    cache = empty
    for at in range(32):
        _, cache = kvjax.attend(cache, q[:, at], key[:, at], value[:, at], sink_logits=sinks)
    found, expected = at_once.layer.state.index, cache.layer.state.index
    for name in ("worth", "recent") if isinstance(method, kvjax.H2O) else ("local",):
        # Where a row has been given to another token, they lie in another order.
        rows = (np.sort(np.asarray(getattr(index, name)).reshape(KV_HEADS, -1)) for index in (found, expected))
        np.testing.assert_allclose(*rows, atol=1e-5)


def test_a_layer_has_its_own_adapters():
    fitted = [np.random.default_rng(i).normal(size=(KV_HEADS, SIZE, 4)).astype(np.float32) for i in range(3)]
    method = kvjax.KVSwap(budget=24, sinks=2, window=4, adapters=Adapters(fitted, joint=False, fingerprint=""))
    sizes = {"batch": 1, "kv_heads": KV_HEADS, "group": GROUP, "head_dim": SIZE, "capacity": CAPACITY}
    key = np.random.default_rng(9).normal(size=(1, 30, KV_HEADS, SIZE)).astype(np.float32)
    for i, layer in enumerate(fitted):
        empty = kvjax.init_cache(method, layer=i, **sizes)
        for cache in (empty, kvjax.prefill_cache(empty, key, key, np.array([30]))):
            assert any(np.array_equal(leaf[0], layer) for leaf in jax.tree.leaves(cache.layer.state.index)
                       if leaf.shape[1:] == layer.shape)
    with pytest.raises(ConfigError, match="3 layers"):
        kvjax.init_cache(method, layer=3, **sizes)
    with pytest.raises(ConfigError, match="layer=-1"):
        kvjax.init_cache(method, layer=-1, **sizes)


@pytest.mark.parametrize("heads", [KV_HEADS, 2 * HEADS, 1])
def test_sink_logits_of_another_shape_are_refused(heads):
    sizes = {"kv_heads": KV_HEADS, "group": GROUP, "head_dim": SIZE, "capacity": CAPACITY}
    cache = kvjax.init_cache(METHODS["quest"], batch=1, **sizes)
    key = np.ones((1, 1, KV_HEADS, SIZE), np.float32)
    with pytest.raises(ConfigError, match=r"sink_logits is .* needs \[4\]"):
        kvjax.prefill_cache(cache, key, key, np.array([1]), sink_logits=jnp.zeros(heads))
