"""Likelihoods and answers on demand against those of the whole text, whatever is read densely and what is not."""

import pathlib

import numpy as np
import pytest
import scipy.special
from tiny import dense

import kvjax
from kvjax.errors import PromptError
from kvjax.eval.tasks.endpoint import Endpoint

REFERENCE = pathlib.Path(kvjax.__file__).parent / "reference"
CONTEXT = "\nThe pass key is 29318.\n" + "import os, sys\n" * 6 + "\nThe pass key is"


@pytest.fixture(scope="module")
def llm():
    return kvjax.load(REFERENCE)


def log_probabilities(llm, ids):
    """Of every token of `ids` but the first, and the likeliest ones, by one forward pass."""
    padded = np.pad(ids, (0, 128 - len(ids)))  # one program for all lengths; later tokens reach no earlier logits
    logits = dense(llm.params, padded[None], llm.config)[0, : len(ids) - 1]
    chosen = scipy.special.log_softmax(logits, axis=-1)[np.arange(len(ids) - 1), ids[1:]]
    return chosen, np.argmax(logits, axis=1)


@pytest.mark.parametrize("sparse", [0, 5, 1_000])
def test_likelihoods_are_those_of_a_forward_pass(llm, sparse):
    context = llm.encode(CONTEXT, start=True)
    rests = [llm.encode(text, start=False) for text in (" 29318.", " 11111", "\n")]
    found = list(Endpoint(llm, kvjax.Full(), sparse_tokens=sparse).loglikelihood([(context, rest) for rest in rests]))
    for rest, (logprob, greedy) in zip(rests, found, strict=True):
        chosen, likeliest = log_probabilities(llm, context + rest)
        assert logprob == pytest.approx(chosen[-len(rest) :].sum(), abs=2e-3)
        assert greedy == (likeliest[-len(rest) :].tolist() == rest)
    assert [greedy for _, greedy in found] == [True, False, False]


def test_equal_contexts_are_read_once_and_caches_closed(llm, tmp_path, monkeypatch):
    caches = []
    prefill = llm.prefill
    monkeypatch.setattr(llm, "prefill", lambda *args, **more: caches.append(prefill(*args, **more)) or caches[-1])
    endpoint = Endpoint(llm, kvjax.Quest(budget=48, window=8, page=4), kvjax.FlashStore(directory=tmp_path),
                        sparse_tokens=4)
    a, b = (llm.encode(text, start=True) for text in (CONTEXT, CONTEXT[:60]))
    rest = llm.encode(" 29318", start=False)
    answers = endpoint.loglikelihood([(a, rest), (a, rest), (b, rest)])
    found = [next(answers)]
    assert len(caches) == 1  # contexts are read as answers are asked for
    found += answers
    assert len(caches) == 2 and found[0] == found[1] != found[2]
    assert not list(tmp_path.iterdir())  # files of closed caches are gone


def test_an_answer_ends_before_its_stop_text(llm):
    context, endpoint = llm.encode(CONTEXT, start=True), Endpoint(llm, kvjax.Full())
    assert endpoint.generate(context, 6, ["."]) == " 29318"
    assert endpoint.generate(context, 6, ["zzz"]).startswith(" 29318.")


def test_long_contexts_lose_their_beginning(llm):
    endpoint = Endpoint(llm, kvjax.Full(), sparse_tokens=3, max_length=20)
    context, rest = llm.encode(CONTEXT, start=True), llm.encode(" 29318", start=False)
    with pytest.warns(UserWarning, match="lose their beginning"):
        ((logprob, _),) = endpoint.loglikelihood([(context, rest)])
    kept = context[-(21 - len(rest)) :] + rest
    assert logprob == pytest.approx(log_probabilities(llm, kept)[0][-len(rest) :].sum(), abs=2e-3)


@pytest.mark.parametrize(("context", "rest", "words"), [
    ([], [5], "the context is empty"), ([5], [], "the continuation is empty"), ([5], [5] * 21, "are too many"),
])
def test_what_cannot_be_asked_is_refused(llm, context, rest, words):
    with pytest.raises(PromptError, match=words):
        next(Endpoint(llm, kvjax.Full(), max_length=20).loglikelihood([([5], [5]), (context, rest)]))
