"""Our transformer against what transformers computed from the same checkpoints (scripts/make_goldens.py)."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import dense, through_the_cache

import kvjax
from kvjax.errors import ConfigError, PromptError
from kvjax.models import checkpoint
from kvjax.models.config import FAMILIES
from kvjax.models.hf_config import read_config
from kvjax.models.transformer import Transformer

GOLDENS = sorted(path.parent for path in pathlib.Path(__file__).parents[1].glob("goldens/*/golden.npz"))
BY_LENGTH = [path for path in GOLDENS if read_config(path).rope.by_length]
MIXTURES = [path for path in GOLDENS if read_config(path).experts]
over_goldens = pytest.mark.parametrize("directory", GOLDENS, ids=[path.name for path in GOLDENS])


@functools.cache
def load(directory):
    config, params = checkpoint.load(directory, read_config(directory))
    return Transformer(config), params


def positions_of(tokens):
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


@functools.partial(jax.jit, static_argnames=("model", "length"))
def greedy(model, params, tokens, length):
    """The tokens [T] continued to `length`; later places of the buffer do not reach earlier logits."""

    def step(n, buffer):
        logits = model.apply({"params": params}, buffer, positions_of(buffer))
        return buffer.at[0, n].set(jnp.argmax(logits[0, n - 1]).astype(jnp.int32))

    buffer = jnp.zeros((1, length), jnp.int32).at[0, : len(tokens)].set(tokens)
    return jax.lax.fori_loop(len(tokens), length, step, buffer)[0]


def test_goldens_cover_every_family():
    assert {read_config(directory).family for directory in GOLDENS} == set(FAMILIES)


@over_goldens
def test_logits(directory):
    model, params = load(directory)
    golden = np.load(directory / "golden.npz")
    logits = dense(params, golden["tokens"], model.config)
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4)


@over_goldens
def test_logits_of_a_prompt_and_of_each_token_decoded_after_it(directory):
    """Through the cache: half of each row is read at once, and the rest token by token."""
    model, params = load(directory)
    golden = np.load(directory / "golden.npz")
    tokens, half = golden["tokens"], golden["tokens"].shape[1] // 2
    logits = through_the_cache(kvjax.LLM(model.config, params), tokens, half)
    np.testing.assert_allclose(logits, golden["logits"][:, half - 1 : -1], rtol=0, atol=1e-4)


@over_goldens
def test_greedy_answers_through_the_cache(directory):
    model, params = load(directory)
    golden = np.load(directory / "golden.npz")
    prompt, expected = golden["tokens"][0].tolist(), golden["greedy"].tolist()
    llm = kvjax.LLM(dataclasses.replace(model.config, eos_token_ids=()), params)
    result = llm.generate(prompt[-1:], llm.prefill(prompt[:-1]), max_new_tokens=len(expected))
    assert result.tokens == [expected]


@over_goldens
def test_greedy_continuation(directory):
    model, params = load(directory)
    golden = np.load(directory / "golden.npz")
    prompt, expected = golden["tokens"][0], golden["greedy"]
    model = Transformer(model.config.for_length(len(prompt) + len(expected)))
    tokens = greedy(model, params, jnp.asarray(prompt), len(prompt) + len(expected))
    np.testing.assert_array_equal(tokens[len(prompt) :], expected)


# ---------------------------------------------------------------- beyond the length first trained on

FULL_BUDGET = {"budget": 128, "window": 4, "sinks": 2}
WAYS = {
    "staged": {},
    "fused": {"driver": "fused"},
    "chunks": {"chunk": 24},
    "quest": {"method": kvjax.Quest(**FULL_BUDGET)},
    "dynakv": {"method": kvjax.DynaKV(**FULL_BUDGET)},
    "kvswap": {"method": kvjax.KVSwap(**FULL_BUDGET, sigma=1, bits=32)},
    "shadowkv": {"method": kvjax.ShadowKV(**FULL_BUDGET, sigma=1)},
    "rle": {"method": kvjax.RLE(before_rotation=True, tolerance=1e-6)},
}
over_models_by_length = pytest.mark.parametrize("directory", BY_LENGTH, ids=[path.name for path in BY_LENGTH])


def beyond(directory):
    """A text that is longer than the model's original length, and the log-probabilities after its last tokens."""
    golden = np.load(directory / "golden.npz")
    assert len(golden["long_tokens"]) > read_config(directory).rope.original_max_position
    return golden["long_tokens"][None], jax.nn.log_softmax(golden["long_logits"])


def test_dynamic_longrope_and_partial_rotation_have_goldens():
    ropes = [read_config(directory).rope for directory in BY_LENGTH]
    assert {rope.kind for rope in ropes} == {"dynamic", "longrope"} and {rope.partial for rope in ropes} == {0.75, 1.0}


@over_models_by_length
def test_a_long_text_read_at_once(directory):
    model, params = load(directory)
    tokens, expected = beyond(directory)
    found = jax.nn.log_softmax(dense(params, tokens, model.config)[0, -len(expected):])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    short = jax.nn.log_softmax(dense(params, tokens[:, -24:], model.config)[0])
    assert np.abs(short - expected).max() > 0.1
    cache = kvjax.LLM(model.config, params).prefill(tokens.tolist(), capacity=tokens.shape[1])
    np.testing.assert_allclose(jax.nn.log_softmax(cache.logits)[0], expected[-1], rtol=0, atol=1e-4)


def in_ways(directories, ways):
    """Parametrises over ways through the cache for each model; without `--slow` each model goes a third of them, and
    between them all."""
    return pytest.mark.parametrize(("directory", "way"), [
        pytest.param(directory, way, id=f"{way}-{directory.name}", marks=[pytest.mark.slow] * ((i + j) % 3 > 0))
        for i, directory in enumerate(directories) for j, way in enumerate(ways)
    ])


@in_ways(BY_LENGTH, WAYS)
def test_a_long_text_of_which_a_part_is_decoded(directory, way):
    """The prompt alone is within the original length: the capacity says how its keys are rotated."""
    model, params = load(directory)
    tokens, expected = beyond(directory)
    llm = kvjax.LLM(model.config, params)
    logits = through_the_cache(llm, tokens, 60, capacity=tokens.shape[1], **WAYS[way])
    found = jax.nn.log_softmax(logits[0, 1 - len(expected):])
    np.testing.assert_allclose(found, expected[:-1], rtol=0, atol=1e-4)


OPTIONS = [path for path in GOLDENS if read_config(path).query_scalar or read_config(path).sink_logits]


@in_ways(OPTIONS, [way for way in WAYS if way != "shadowkv"])  # which needs longer prompts
def test_attention_of_gemma_and_gpt_oss_in_every_way(directory, way):
    model, params = load(directory)
    golden = np.load(directory / "golden.npz")
    tokens, prompt = golden["tokens"], 12
    logits = through_the_cache(kvjax.LLM(model.config, params), tokens, prompt, capacity=48, **WAYS[way])
    found, expected = (jax.nn.log_softmax(one) for one in (logits, golden["logits"][:, prompt - 1 : -1]))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@over_models_by_length
def test_a_prompt_within_the_original_length_has_a_cache_within_it(directory):
    model, params = load(directory)
    llm, original = kvjax.LLM(model.config, params), model.config.rope.original_max_position
    assert llm.prefill([5] * original, method=kvjax.StreamingLLM(budget=40)).plan.capacity == original
    cache = llm.prefill([5] * (original - 4))
    assert len(llm.generate([7], cache, max_new_tokens=3, eos=()).tokens[0]) == 3
    with pytest.raises(PromptError, match="prefill with a larger capacity"):
        llm.generate([7], cache, max_new_tokens=4)
    assert llm.prefill([5] * (original + 1)).plan.capacity >= original + 1024


@over_models_by_length
def test_a_text_read_for_another_capacity_is_refused(directory):
    model, params = load(directory)
    llm, tokens = kvjax.LLM(model.config, params), beyond(directory)[0][:, :40].tolist()
    with pytest.raises(ConfigError, match=r"capacity=96, .* read it with capacity=120"):
        llm.prefill(llm.read(tokens), capacity=120)
    read = llm.prefill(llm.read(tokens, capacity=120))
    np.testing.assert_array_equal(read.logits, llm.prefill(tokens, capacity=120).logits)
    assert read.plan.capacity == 120


@over_models_by_length
def test_a_restored_cache_rotates_as_before(directory, tmp_path):
    model, params = load(directory)
    llm, (tokens, expected) = kvjax.LLM(model.config, params), beyond(directory)
    llm.prefill(tokens[:, :100].tolist(), capacity=120).save(tmp_path)
    found = llm.score(tokens[:, 100:].tolist(), llm.restore(tmp_path)).logprobs[0]
    np.testing.assert_allclose(found, [row[token] for row, token in zip(expected[3:], tokens[0, 100:], strict=False)],
                               rtol=0, atol=1e-4)


# ---------------------------------------------------------------- mixtures of experts


def test_mixtures_have_goldens_with_shared_experts_dense_layers_and_weights_of_both_kinds():
    mixtures = [read_config(directory).experts for directory in MIXTURES]
    assert {mixture.normalise for mixture in mixtures} == {True, False}
    assert any(mixture.shared_size for mixture in mixtures) and any(mixture.dense_layers for mixture in mixtures)


@in_ways(MIXTURES, ["fused", "chunks", "quest", "dynakv", "kvswap"])
def test_a_mixture_of_experts_by_every_way_through_the_cache(directory, way):
    model, params = load(directory)
    golden = np.load(directory / "golden.npz")
    settings = {"chunk": 8} if way == "chunks" else WAYS[way]
    logits = through_the_cache(kvjax.LLM(model.config, params), golden["tokens"], 12, **settings)
    expected = jax.nn.log_softmax(golden["logits"][:, 11:-1])
    np.testing.assert_allclose(jax.nn.log_softmax(logits), expected, rtol=0, atol=1e-4)
