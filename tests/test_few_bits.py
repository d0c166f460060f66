"""Models whose matrices are in few bits: how they load, what they predict, and that methods keep their laws on them."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import either

import kvjax
from kvjax.errors import ConfigError, FormatMismatch
from kvjax.models.transformer import Transformer
from kvjax.ops import weights
from kvjax.ops.weights import QuantisedMatrix

REFERENCE = pathlib.Path(kvjax.__file__).parent / "reference"
BOUNDS = {"int8": 0.005, "int4": 0.25}  # nats per token that the reference model may lose
TEXT = """A cache keeps what was computed, so that it need not be computed again. When it is full, something must go:
the entry that was used longest ago, or the one that is used least. Neither rule is best for every program, which is why
there are so many of them."""


@pytest.fixture(scope="module")
def wide():
    return kvjax.load(REFERENCE)


@pytest.fixture(scope="module", params=weights.KINDS)
def few(request):
    return request.param, kvjax.load(REFERENCE, weights=request.param)


def losses(llm, text=TEXT):
    """The negative log-likelihood of each token of a text but the first, by dense attention."""
    tokens = jnp.asarray([llm.encode(text, start=True)])
    logits = Transformer(llm.config).apply({"params": llm.params}, tokens, jnp.arange(tokens.shape[1])[None])
    return -np.asarray(jax.nn.log_softmax(logits[0, :-1]))[np.arange(tokens.shape[1] - 1), tokens[0, 1:]]


def matrices(llm):
    """The matrices by path, and all other parameters."""
    leaves = jax.tree.leaves_with_path(llm.params, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    return ({name: leaf for name, leaf in named.items() if isinstance(leaf, QuantisedMatrix)},
            {name: leaf for name, leaf in named.items() if not isinstance(leaf, QuantisedMatrix)})


def test_all_matrices_are_in_few_bits_and_nothing_else(few):
    kind, llm = few
    quantised, others = matrices(llm)
    ends = {"embedding/embedding", "lm_head/weight"} & quantised.keys()
    assert ends and {quantised[name].kind for name in ends} == {"int8"}
    assert {leaf.kind for name, leaf in quantised.items() if name not in ends} == {kind}
    assert len(quantised) == len(ends) + 7 * llm.config.num_layers
    assert all(leaf.ndim == 1 and leaf.dtype == jnp.float32 for leaf in others.values())


def test_weights_are_those_of_the_file_up_to_rounding(few, wide):
    _, llm = few
    whole = {"/".join(str(key.key) for key in path): leaf for path, leaf in jax.tree.leaves_with_path(wide.params)}
    for name, matrix in matrices(llm)[0].items():
        expected = np.asarray(whole[name])
        codes, scale = weights.codes_and_scale(expected, matrix.kind)
        np.testing.assert_array_equal(matrix.codes, codes)
        np.testing.assert_array_equal(matrix.scale, scale)
        off = np.abs(np.asarray(weights.widened(matrix)) - expected).max() / np.abs(expected).max()
        assert 0 < off < (0.005 if matrix.kind == "int8" else 0.15)


def test_a_text_is_predicted_nearly_as_well(few, wide):
    kind, llm = few
    before, after = losses(wide), losses(llm)
    assert np.any(before != after)
    assert abs(after.mean() - before.mean()) < BOUNDS[kind]


def test_the_model_takes_less_memory_and_says_so(few, wide):
    kind, llm = few
    size = sum(leaf.nbytes for leaf in weights.parameters(llm.params))
    assert size < sum(leaf.nbytes for leaf in jax.tree.leaves(wide.params)) / (3.5 if kind == "int8" else 4)
    assert f"in float32{' and' if kind == 'int8' else ', int4 and'} int8, " in repr(llm)
    assert "1.4 M parameters in float32, " in repr(wide) and f"{1.4:.1f} M parameters" in repr(llm)


@pytest.mark.parametrize(("kind", "dtype", "driver"), either(
    ("int8", "float32", "fused"), ("int8", "bfloat16", "staged"), ("int4", "float32", "staged"),
    ("int4", "bfloat16", "fused"),
    slow=(("int8", "float32", "staged"), ("int8", "bfloat16", "fused"), ("int4", "float32", "fused"),
          ("int4", "bfloat16", "staged")),
))
def test_sequences_of_a_batch_decode_as_they_do_alone(kind, dtype, driver):
    llm = kvjax.load(REFERENCE, dtype, weights=kind)
    texts = [TEXT[:150], TEXT[100:250]]
    together = scored(llm, texts, driver)
    for text, logprobs in zip(texts, together, strict=True):
        np.testing.assert_allclose(scored(llm, [text], driver)[0], logprobs, atol=2e-5 if dtype == "float32" else 1e-2)


def scored(llm, texts, driver, method=None, store=None):
    """Log-probabilities of the same continuation of each text, token by token."""
    method = method or kvjax.Quest(budget=40, page=4, window=8)
    with llm.prefill(texts, method=method, store=store, capacity=256) as cache:
        return llm.score([" It is used again."] * len(texts), cache, driver=driver).logprobs


@pytest.mark.parametrize(("method", "drivers"), either(
    (kvjax.Quest(budget=40, page=4, window=8), ("staged", "fused")), (kvjax.DynaKV(budget=60, window=8), ("staged",)),
    slow=((kvjax.DynaKV(budget=60, window=8), ("fused",)),),
), ids=["quest", "dynakv", "dynakv_fused"])
def test_flash_and_memory_and_both_drivers_agree_to_the_bit(few, method, drivers, tmp_path):
    _, llm = few
    expected = scored(llm, [TEXT], "staged", method)
    for driver in drivers:
        store = kvjax.FlashStore(file=tmp_path / driver)
        np.testing.assert_array_equal(scored(llm, [TEXT], driver, method, store), expected)


def test_a_budget_as_large_as_the_context_is_full_attention(few):
    _, llm = few
    full = scored(llm, [TEXT], "fused", kvjax.Full())
    np.testing.assert_allclose(scored(llm, [TEXT], "fused", kvjax.Quest(budget=256, page=4)), full, atol=2e-5)


def test_the_type_of_the_weights_is_part_of_the_model(few, wide):
    kind, llm = few
    assert llm.fingerprint != wide.fingerprint and llm.identity != wide.identity
    assert kvjax.load(REFERENCE, "bfloat16", weights=kind).identity == llm.identity
    cache = llm.prefill(TEXT)
    with pytest.raises(FormatMismatch, match="the cache is of the model"):
        wide.generate("a", cache, max_new_tokens=1)


def test_a_saved_model_has_the_numbers_that_the_codes_stand_for(few, tmp_path):
    _, llm = few
    kvjax.save(llm, tmp_path)
    again = kvjax.load(tmp_path)
    for name, matrix in matrices(llm)[0].items():
        leaf = again.params
        for key in name.split("/"):
            leaf = leaf[key]
        np.testing.assert_array_equal(leaf, weights.widened(matrix))


def test_an_unknown_type_is_an_error_before_anything_is_read(tmp_path):
    with pytest.raises(ConfigError, match=r"weights='int5' .*did you mean int"):
        kvjax.load(tmp_path / "nothing", weights="int5")
