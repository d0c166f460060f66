"""What the model class for lm-evaluation-harness passes on, with the harness itself left out."""

import importlib
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.errors import ConfigError
from kvjax.eval.tasks import endpoint


class TemplateLM:
    """The harness's base class (0.4.13), as far as it encodes a context and its continuation."""

    def _encode_pair(self, context, continuation):
        spaces = len(context) - len(context.rstrip())
        if spaces > 0:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        whole, before = self.tok_encode(context + continuation), self.tok_encode(context)
        return before, whole[len(before):]


STUBS = {
    "lm_eval": {"utils": None}, "lm_eval.__main__": {"cli_evaluate": None}, "lm_eval.api": {},
    "lm_eval.api.model": {"TemplateLM": TemplateLM},
    "lm_eval.api.registry": {"register_model": lambda name: lambda kind: kind},
    "lm_eval.models": {}, "lm_eval.models.utils": {"handle_stop_sequences": None},
}


@pytest.fixture
def module(monkeypatch):
    """`kvjax.eval.lm_eval` over modules that have nothing but the names it imports."""
    for name, has in STUBS.items():
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[name]).update(has)
    monkeypatch.delitem(sys.modules, "kvjax.eval.lm_eval", raising=False)
    found = importlib.import_module("kvjax.eval.lm_eval")
    yield found
    sys.modules.pop("kvjax.eval.lm_eval", None)


def test_a_text_begins_once(module):
    """A chat template has the token that begins a text in it."""
    made = module.KvjaxLM(str(pathlib.Path(kvjax.__file__).parent / "reference"))
    begin = made.text.special_tokens["bos_token"]
    assert made.tok_encode("a") == made.tok_encode(f"{begin}a") == made.tok_encode("a", add_special_tokens=True)
    assert made.tok_encode("a", add_special_tokens=False) == made.tok_encode("a")[1:]


@pytest.mark.parametrize(("context", "continuation", "alone"), [
    ("The pass ke", "y", "y"), ("The pass ke", "y is", "y is"),
    ("The pass ke", "y is 4711", None), ("The pass key is", " 4711", None), ("a  ", "", "  "),
    ("a", "", ""),
])
def test_a_continuation_that_a_token_leaves_nothing_of_is_encoded_alone(module, context, continuation, alone):
    """Given joins that a token spans, and joins that none does."""
    made = module.KvjaxLM(str(pathlib.Path(kvjax.__file__).parent / "reference"))
    before, rest = made._encode_pair(context, continuation)
    assert before == made.llm.encode(context.rstrip(), start=True)
    whole = made.llm.encode(context + continuation, start=True)
    assert rest == (whole[len(before):] if alone is None else made.llm.encode(alone, start=False))
    assert bool(rest) == (alone != "")


def test_a_context_without_tokens_is_the_token_that_begins_texts(module):
    made = module.KvjaxLM(str(pathlib.Path(kvjax.__file__).parent / "reference"), add_bos_token=False)
    assert made._encode_pair("  ", "a") == ([made.prefix_token_id], made.llm.encode("  a", start=False))


def test_types_and_chunk_reach_the_model_and_its_caches(module):
    reference = str(pathlib.Path(kvjax.__file__).parent / "reference")
    made = module.KvjaxLM(reference, method="streaming_llm", dtype="bfloat16", cache_dtype="int8")
    assert {leaf.dtype for leaf in jax.tree.leaves(made.llm.params)} == {jnp.dtype("bfloat16")}
    with made.endpoint._cache([1, 2, 3], 4) as cache:
        assert (cache.plan.dtype, cache.plan.capacity) == ("int8", endpoint.LEAST_CAPACITY)
    wrong = module.KvjaxLM(reference, chunk=0)
    with pytest.raises(ConfigError, match="chunk=0"), wrong.endpoint._cache([1, 2, 3], 4):
        pass
