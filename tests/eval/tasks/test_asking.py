"""Contexts read once and asked often: the same answers as when each question has a cache of its own."""

import dataclasses
import gc
import json
import pathlib

import jax
import pytest

import kvjax
from kvjax.errors import ConfigError
from kvjax.eval import tasks
from kvjax.eval.tasks import Sample, asking


@pytest.fixture(scope="module")
def llm():
    return kvjax.load(pathlib.Path(kvjax.__file__).parent / "reference")


def test_batches_hold_contexts_that_can_be_asked_side_by_side(llm, request_for):
    samples = tasks.draw("multi_request", request_for(length=300, count=20))
    found = asking.batches(llm, samples, 2)
    assert [[len(questions) for questions in batch] for batch in found] == [[8, 8], [4]]
    flat = [one for batch in found for questions in batch for one in questions]
    assert [one.answers for one in flat] == [one.answers for one in samples]
    assert asking.capacity(found[0]) % 64 == 0 and asking.capacity(found[0]) >= 300 + flat[0].max_new_tokens


def test_questions_about_one_document_of_l_eval_are_asked_on_forks_of_one_cache(llm, request_for, tmp_path):
    asked = {"instructions": ["what\nA. it", "who\nA. it"], "outputs": ["A", "A"], "evaluation": "exam"}
    rows = [{"input": document, **asked} for document in ("The cat sat.", "A dog ran.")]
    (tmp_path / "tpo.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (batch,) = asking.batches(llm, tasks.draw(f"leval:{tmp_path / 'tpo.jsonl'}", request_for(count=4)), 8)
    assert [len(questions) for questions in batch] == [2, 2]
    assert batch[0][0].context == batch[0][1].context != batch[1][0].context


def test_questions_on_forks_are_answered_as_if_each_were_the_only_one(llm, request_for, tmp_path):
    samples = tasks.draw("multi_request", request_for(length=200, count=3))
    ((questions,),) = asking.batches(llm, samples, 4)
    method = kvjax.Quest(budget=64, window=8, page=4)

    def cache():
        return llm.prefill([list(samples[0].context)], method=method, store=kvjax.FlashStore(directory=tmp_path),
                           capacity=256)

    one, steps = cache(), []
    answers = asking.ask(llm, one, [questions], lambda step, tokens: steps.append(step))
    (scores,), usages = answers.scores, answers.usages
    for sample, score, tokens in zip(questions, scores, answers.tokens, strict=True):
        alone = cache()
        answers = asking.ask(llm, alone, [(sample,)])
        assert answers.scores == [[score]] and answers.tokens == [tokens]
        alone.close()
    assert len(steps) == usages[0].steps  # the first round alone is observed
    one.close()


def test_no_round_keeps_the_cache_of_the_one_before(llm, request_for, monkeypatch):
    samples = tasks.draw("multi_request", request_for(length=200, count=4))
    ((questions,),) = asking.batches(llm, samples, 4)
    cache = llm.prefill([list(samples[0].context)], method=kvjax.Full(), capacity=256)
    held, generate = [], llm.generate

    def counting(*args, **kwargs):
        gc.collect()
        held.append(sum(array.nbytes for array in jax.live_arrays()))
        return generate(*args, **kwargs)

    monkeypatch.setattr(llm, "generate", counting)
    asking.ask(llm, cache, [questions])
    assert len(held) == 4 and max(held) - min(held) < cache.resident_bytes / 2


def test_a_decoded_text_is_fed_token_by_token_once_for_all_questions(llm, request_for):
    samples = tasks.draw("decoded_needles", request_for(length=100, count=3, new_tokens=200))
    ((questions,),) = asking.batches(llm, samples, 4)
    cache = llm.prefill([list(questions[0].context)], method=kvjax.Full(), capacity=asking.capacity([questions]))
    fed: list[int] = []
    answers = asking.ask(llm, cache, [questions], lambda step, tokens: fed.append(int(tokens[0])))
    first = [*questions[0].decoded, *questions[0].question]
    assert fed[: len(first)] == first  # one step for each token; the questions after the first are not observed
    assert answers.usages[0].steps == len(questions[0].decoded) - 1 and len(answers.usages) == 1 + 3
    assert len(fed) == answers.usages[0].steps + answers.usages[1].steps


def test_what_follows_a_decoded_text_is_what_follows_the_same_prompt(llm, request_for):
    samples = tasks.draw("decoded_needles", request_for(length=100, count=2, new_tokens=200))
    ((questions,),) = asking.batches(llm, samples, 4)
    capacity = asking.capacity([questions])
    after = asking.ask(llm, llm.prefill([list(questions[0].context)], method=kvjax.Full(), capacity=capacity),
                       [questions])
    whole = [*questions[0].context, *questions[0].decoded]
    plain = tuple(dataclasses.replace(one, decoded=()) for one in questions)
    within = asking.ask(llm, llm.prefill([whole], method=kvjax.Full(), capacity=capacity), [plain])
    assert after.tokens == within.tokens
    assert after.scores == within.scores and within.logprobs is None
    assert [len(row) for row in after.logprobs] == [len(questions[0].decoded)]


def test_decoded_facts_are_found_by_who_can_have_them(llm, request_for):
    """Asks for facts that lie before the window: full attention has them, streaming_llm cannot."""
    samples = tasks.draw("decoded_needles", request_for(length=100, count=4, new_tokens=400, seed=1))
    ((questions,),) = asking.batches(llm, samples, 4)
    scores = {}
    for method in (kvjax.Full(), kvjax.Oracle(budget=128, window=16), kvjax.StreamingLLM(budget=32, window=28)):
        cache = llm.prefill([list(questions[0].context)], method=method, capacity=asking.capacity([questions]))
        scores[method.name] = asking.ask(llm, cache, [questions]).scores
    assert scores == {"full": [[1.0] * 4], "oracle": [[1.0] * 4], "streamingllm": [[0.0] * 4]}


def test_a_question_after_a_decoded_text_cannot_be_in_the_prompt(request_for):
    with pytest.raises(ConfigError, match="cannot be within the prompt"):
        asking.within_prompt(tasks.draw("decoded_needles", request_for(length=50, count=1, new_tokens=60)))


def test_questions_are_shared_out_in_order_and_the_last_one_of_few_is_asked_again():
    def questions(context, count):
        return tuple(Sample((context,), (i,), (f"{context} {i}",), "number", 4) for i in range(count))

    batch = [questions(1, 5), questions(2, 1)]
    assert [len(part) for part in asking.spread(batch, 4)] == [2, 1, 2, 1]
    assert [one.answers for part in asking.spread(batch, 9) for one in part] == [
        one.answers for part in batch for one in part]
    assert asking.spread(batch, 2) == tuple(batch)
    assert [[one.question[0] for one in asked] for asked in asking.rounds(batch)] == [[i, 0] for i in range(5)]
