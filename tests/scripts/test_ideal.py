"""The least that a token moves is the sum of what one can count by hand."""

import dataclasses

import jax.numpy as jnp
import pytest

import kvjax
from kvjax.inference.plan import Slots, make_plan
from kvjax.models.config import ModelConfig
from scripts import described, ideal, tpu_compiler

# E = 8, 4 query heads and 2 KV heads of D = 2; two layers. Numbers of bytes below are sums over them.
CONFIG = ModelConfig(family="llama", vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=2, num_heads=4,
                     num_kv_heads=2, head_dim=2)
LAYER = 2 * (8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 16 + 2 * 8)  # q, k and v, o, gate, up and down, two norms; bf16


def least(method, dtype="bfloat16", batch=1, tie=False, windows=(), **more):
    config = dataclasses.replace(CONFIG, tie_embeddings=tie, windows=windows or (None, None))
    plan = make_plan(config, method, batch, 64, dtype)
    params = described.model_params(plan, jnp.bfloat16)
    return ideal.of_token(plan, params, described.model_state(plan, False, Slots()), **more)


def test_weights_once_and_of_the_embedding_the_tokens_rows():
    both = 2 * (8 * 32 + 8)  # unembedding and last norm
    assert least(kvjax.Full()).weights == 2 * LAYER + both + 2 * 8
    assert least(kvjax.Full(), batch=3).weights == 2 * LAYER + both + 3 * 2 * 8
    assert least(kvjax.Full(), tie=True).weights == 2 * LAYER + both


def test_full_attends_every_token_of_every_sequence():
    found = least(kvjax.Full(), batch=3)
    row = 2 * 2 * 2  # key and value of D = 2 in bf16
    assert found.attended == 3 * 2 * 2 * 64 * row and found.index == 0
    assert found.written == 3 * 2 * 2 * 2 * row
    assert found.total == found.weights + found.attended + found.written


def test_quest_attends_its_budget_and_reads_every_bound():
    found = least(kvjax.Quest(budget=24, window=4, sinks=2, page=8))
    assert found.attended == 2 * 2 * (24 - 1) * 2 * 2 * 2  # less the newest token, which is on the chip
    assert found.index == 2 * 2 * (64 // 8) * 2 * 2 * 4  # minimum and maximum of D numbers, f32


def test_blocks_in_few_bits_are_smaller_than_the_window():
    found = least(kvjax.Quest(budget=24, window=4, sinks=2, page=8), dtype="int8")
    tail, rows = 2 + 3, 24 - 2 - 4
    assert found.attended == 2 * 2 * (tail * 2 * 2 * 4 + rows * 2 * (2 + 4))


def test_a_sliding_window_bounds_what_is_attended():
    found = least(kvjax.Full(), windows=(16, None))
    assert found.attended == 2 * (16 + 64) * 2 * 2 * 2


def test_one_layer_may_be_counted_alone():
    assert 2 * least(kvjax.Full(), layers=1).attended == least(kvjax.Full()).attended


def test_streaming_reads_no_index_and_attends_its_budget():
    found = least(kvjax.StreamingLLM(budget=24))
    assert found.index == 0 and found.attended == 2 * 2 * (24 - 1) * 2 * 2 * 2


def test_icecache_reads_the_keys_it_opens():
    few, all_keys = (least(kvjax.IceCache(budget=24, window=4, dense_layers=0, page=4, pages=pages)).index
                     for pages in (1, 1000))
    assert few == 2 * 2 * 2 * 4 * 4 * 2  # a page on each of two levels, of 4 keys in f32
    assert all_keys == 2 * 2 * (64 + 8) * 4 * 2


@pytest.mark.parametrize("name", ["kvswap", "infinigen", "dynakv", "pqcache"])
def test_an_index_is_part_of_the_state(name):
    plan = make_plan(dataclasses.replace(CONFIG, head_dim=16), kvjax.METHODS[name](budget=256), 1, 512, "bfloat16")
    state = described.model_state(plan, False, Slots())
    found = [ideal.index_bytes(layer, cache.state) for layer, cache in zip(plan.layers, state.layers, strict=True)]
    whole = [ideal.nbytes(cache.state.index) for cache in state.layers]
    assert all(0 < part <= all_of for part, all_of in zip(found, whole, strict=True))


def test_where_libtpu_cannot_be_had_a_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    said = tpu_compiler.install(tmp_path / "none")
    assert said.startswith("libtpu ") and "cannot be installed" in said and said.endswith(".")


def test_any_other_failure_of_pip_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tpu_compiler.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="pip could not install libtpu"):
        tpu_compiler.install(tmp_path / "none")
