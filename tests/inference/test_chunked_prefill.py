"""Reading in chunks: against dense logits, against decoding, across stores, and what becomes of every token."""

import contextlib
import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import METHODS, either
from tiny import CAPACITY, CONFIG, PROMPT, dense, start, temporaries

from kvjax.errors import ConfigError, PromptError, ReadFailed
from kvjax.inference import chunked_prefill as chunked
from kvjax.inference import decode, prefill
from kvjax.inference.chunked_prefill import extend
from kvjax.inference.plan import make_plan
from kvjax.models.config import ModelConfig
from kvjax.ops import causal
from kvjax.store.flash.store import FlashStore

MORE = (30, 17)


def following(tokens):
    """The text after the prompts, right-padded."""
    rows = np.zeros((2, max(MORE)), np.int32)
    for b, (at, count) in enumerate(zip(PROMPT, MORE, strict=True)):
        rows[b, :count] = tokens[b, at : at + count]
    return rows


def extended(params, tokens, method, chunk, store=None, config: ModelConfig = CONFIG, **slots):
    plan, state, _, branch = start(params, tokens, method, store, config, **slots)
    state, logits = extend(plan, params, state, following(tokens), jnp.asarray(MORE, jnp.int32), chunk)
    return plan, state, np.asarray(logits), branch


@pytest.mark.parametrize("name", ["full", "rle"])
def test_a_full_cache_gives_dense_logits(params, tokens, name):
    """In a layer with a sliding window and in one without."""
    config = dataclasses.replace(CONFIG, windows=(16, None))
    expected = dense(params, tokens, config)
    _, state, logits, _ = extended(params, tokens, METHODS[name], 8, config=config)
    for b, length in enumerate(np.asarray(PROMPT) + MORE):
        assert int(state.length[b]) == length
        np.testing.assert_allclose(logits[b], expected[b, length - 1], atol=1e-4)


@pytest.mark.parametrize("name", ["quest", "dynakv"])
def test_a_budget_for_everything_gives_dense_logits(params, tokens, name):
    whole = dataclasses.replace(METHODS[name], budget=None, max_blocks=CAPACITY)
    expected = dense(params, tokens)
    _, _, logits, _ = extended(params, tokens, whole, 8)
    for b, length in enumerate(np.asarray(PROMPT) + MORE):
        np.testing.assert_allclose(logits[b], expected[b, length - 1], atol=1e-4)


@pytest.mark.parametrize("name", ["quest", "dynakv", "streaming_llm", "snapkv"])
def test_a_chunk_of_one_is_a_decoded_token(params, tokens, name):
    plan, one_by_one, logits, _ = start(params, tokens, METHODS[name])
    logits = np.asarray(logits)
    text = following(tokens)
    for i in range(max(MORE)):
        active = i < np.asarray(MORE)
        done = decode.step(plan, params, one_by_one, text[:, i], active, donate=True)
        one_by_one, logits = done.state, np.where(active[:, None], done.logits, logits)
    _, state, got, _ = extended(params, tokens, METHODS[name], 1)
    np.testing.assert_allclose(got, logits, atol=1e-4)
    for ours, theirs in zip(state.layers, one_by_one.layers, strict=True):
        np.testing.assert_array_equal(ours.state.pos, theirs.state.pos)
        np.testing.assert_array_equal(ours.state.tail.token, theirs.state.tail.token)


@pytest.mark.parametrize("name", either("dynakv_merge", "dynakv_local", slow=("dynakv",)))
def test_every_token_has_one_place(params, tokens, name):
    _, state, _, _ = extended(params, tokens, METHODS[name], 8)
    for one in state.layers:
        for b, length in enumerate(np.asarray(PROMPT) + MORE):
            for head in range(CONFIG.num_kv_heads):
                kept = np.concatenate([one.state.pos[b, head].ravel(), one.state.tail.pos[b, head]])
                np.testing.assert_array_equal(np.sort(kept[kept >= 0]), np.arange(length))
        assert not np.asarray(one.state.refused).any()


@pytest.mark.parametrize(("name", "backend"), [("dynakv", "buffer"), ("quest", "io")])
def test_flash_equals_memory(params, tokens, tmp_path, name, backend):
    _, expected, logits, _ = extended(params, tokens, METHODS[name], 8)
    plan, state, got, branch = extended(params, tokens, METHODS[name], 8, FlashStore(directory=tmp_path),
                                        backend=backend)
    np.testing.assert_array_equal(got, logits)
    for ours, theirs in zip(state.layers, expected.layers, strict=True):
        for pair in zip(*map(jax.tree.leaves, (ours.state, theirs.state)), strict=True):
            np.testing.assert_array_equal(*pair)
    text, length = np.zeros((2, 1), np.int32), jnp.ones(2, jnp.int32)
    np.testing.assert_array_equal(*(extend(plan, params, one, text, length, 8)[1] for one in (expected, state)))
    branch.close()


def test_clusters_split_while_a_text_is_read(params, tokens):
    _, before, _, _ = start(params, tokens, METHODS["dynakv"])
    _, after, _, _ = extended(params, tokens, METHODS["dynakv"], 8)
    assert [int(one.state.index.splits.sum()) for one in before.layers] == [0, 0]
    assert all(int(one.state.index.splits.sum()) > 0 for one in after.layers)


def test_a_chunk_refuses_no_split_that_single_tokens_are_granted(params, tokens):
    """Given chunks in which more keys want a split than may be held: their clusters are flagged, and split later."""
    splits = {}
    for chunk in (1, 16):
        _, state, _, _ = extended(params, tokens, METHODS["dynakv"], chunk)
        splits[chunk] = sum(int((one.state.index.splits + one.state.index.split.sum(-1)).sum()) for one in state.layers)
        assert not any(np.asarray(one.state.refused).any() for one in state.layers)
    assert splits[16] > 0.7 * splits[1] > 4


def test_a_failed_read_loses_nothing(params, tokens, tmp_path):
    plan, state, _, branch = start(params, tokens, METHODS["quest"], FlashStore(directory=tmp_path))
    _, expected, _, twin = start(params, tokens, METHODS["quest"], FlashStore(directory=tmp_path))
    text, length = following(tokens), jnp.asarray(MORE)
    failing = mock.Mock(side_effect=ReadFailed("unplugged"))
    unplugged = mock.patch.multiple(branch, _window=failing, _load=failing)  # of reads in C, and in Python
    with unplugged, pytest.raises(ReadFailed) as caught:
        extend(plan, params, state, text, length, 8)
    np.testing.assert_array_equal(caught.value.state.length, PROMPT)
    _, logits = extend(plan, params, caught.value.state, text, length, 8)
    _, wanted = extend(plan, params, expected, text, length, 8)
    np.testing.assert_array_equal(logits, wanted)
    branch.close()
    twin.close()


def test_memory_does_not_grow_with_the_cache(params, tokens):
    """The pool is written in place: a chunk's temporaries are far smaller than it."""
    plan = make_plan(CONFIG, METHODS["dynakv"], 1, 60_000)
    state, _ = prefill.prefill(plan, params, tokens[:1, :20], jnp.asarray([20]))
    pool = sum(leaf.nbytes for leaf in jax.tree.leaves(state.layers[0].pool))
    x, count, zero = jnp.zeros((1, 8, 32)), jnp.asarray([8], jnp.int32), jnp.int32(0)
    layer_plan, at, line, ok = plan.layers[0], state.length, state.ref, jnp.bool_(True)

    def read(one):
        return chunked._read(CONFIG, layer_plan, params["layers_0"], one, x, at, count, zero, line, None)

    fresh = read(jax.tree.map(jnp.copy, state.layers[0])).pending.new_token

    def write(one):
        return chunked._write(layer_plan, one, fresh, jnp.zeros((1, 8), jnp.int32), at, count, ok, zero, line, None)[0]

    assert temporaries(read, state.layers[0]) < pool / 4
    assert temporaries(write, state.layers[0]) < pool / 4


def test_every_chunk_is_read_by_the_same_programs(params, tokens, caplog):
    """Not even cutting the text compiles anything for the second time."""
    plan = make_plan(CONFIG, METHODS["quest"], 1, 200)
    state, _ = prefill.prefill(plan, params, tokens[:1, :20], jnp.asarray([20]))
    state, _ = extend(plan, params, state, tokens[:1, 20:28], jnp.asarray([8]), 4)
    with jax.log_compiles():
        extend(plan, params, state, tokens[:1, 28:52], jnp.asarray([24]), 4)
        assert "Compiling" not in caplog.text
        jax.jit(lambda x: 3 * x)(np.ones(5))
    assert "Compiling" in caplog.text


def test_a_short_text_is_not_padded_to_a_long_chunk(params, tokens):
    plan, state, _, _ = start(params, tokens, METHODS["quest"])
    with mock.patch.object(chunked, "_chunk", side_effect=chunked._chunk) as read:
        extend(plan, params, state, following(tokens)[:, :3], jnp.asarray([3, 2]), 64)
    assert [call.args[3].shape for call in read.call_args_list] == [(2, 4)]


def test_what_is_kept_of_a_prompt_is_decided_by_all_of_it():
    """SentenceKV refuses chunks only if it drops tokens."""
    drops = METHODS["sentencekv"]
    for method, refused in ((drops, True), (dataclasses.replace(drops, keep=None), False)):
        plan = make_plan(CONFIG, method, 1, 200)
        chunked.check(plan, 8)
        with pytest.raises(ConfigError, match="all of a prompt") if refused else contextlib.nullcontext():
            chunked.check_prompt(plan, 8)


def test_bad_input_is_refused(params, tokens):
    plan, state, _, _ = start(params, tokens, METHODS["quest"])
    with pytest.raises(PromptError, match="capacity=96"):
        extend(plan, params, state, np.zeros((2, 80), np.int32), jnp.asarray([80, 80]), 8)
    with pytest.raises(ConfigError, match="chunk=0"):
        extend(plan, params, state, following(tokens), jnp.asarray(MORE), 0)


@pytest.mark.parametrize("rows", [17, 32, 100])
def test_rows_are_attended_in_steps_as_at_once(monkeypatch, rows):
    """In whole steps, with a shorter last one, and in one; some rows are empty."""
    rng = np.random.default_rng(rows)
    q, key, value = (jnp.asarray(rng.normal(size=(2, n, 8)), jnp.float32) for n in (6, rows, rows))
    pos = jnp.asarray(rng.integers(-1, 5, (2, rows)), jnp.int32)

    def part(key, value, pos):
        seen = jnp.broadcast_to(pos[:, None] >= 0, (2, 6, pos.shape[1]))
        return causal.attend_masked(causal.scores_of_many(q, key), value, seen)

    expected = chunked._in_steps(part, key, value, pos)
    monkeypatch.setattr(chunked, "_ROWS", 16)
    found = chunked._in_steps(part, key, value, pos)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
