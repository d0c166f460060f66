"""Contexts read once and asked often: the same answers as when each question has a cache of its own."""

import json
import pathlib

import pytest

import kvjax
from kvjax.eval import tasks
from kvjax.eval.tasks import asking


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
    (scores,), results = asking.ask(llm, one, [questions], lambda step, tokens: steps.append(step))
    for sample, score, result in zip(questions, scores, results, strict=True):
        alone = cache()
        (only,), (other,) = asking.ask(llm, alone, [(sample,)])
        assert only == [score] and other.tokens == result.tokens
        alone.close()
    assert len(steps) == results[0].usage.steps  # the first round alone is observed
    one.close()
