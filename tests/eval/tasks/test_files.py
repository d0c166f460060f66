"""Benchmarks from files in their published formats, and what is said of files that are not."""

import dataclasses
import json

import pytest

from kvjax.errors import CheckpointError, ConfigError, TaskFileError
from kvjax.eval import tasks
from kvjax.eval.tasks import gsm8k, prompts, scoring

V1 = {"input": "Who sat?", "context": "The cat sat.", "answers": ["the cat", "cat"], "length": 3, "dataset": "qasper",
      "language": "en", "all_classes": None, "_id": "x1"}
V2 = {"_id": "y", "domain": "d", "sub_domain": "s", "difficulty": "easy", "length": "short", "question": "Who sat?",
      "choice_A": "a cat", "choice_B": "a dog", "choice_C": "it", "choice_D": "none", "answer": "A",
      "context": "A cat sat."}
RULER = {"index": 0, "input": "Read.\nThe number for k is: 7.\nWhat is the number for k?", "outputs": ["7"],
         "length": 20, "answer_prefix": " The number for k is"}
GSM = {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def text_of(request, sample):
    """Context and question as text."""
    return tuple(x if isinstance(x, str) else request.tokenizer.decode(x) for x in (sample.context, sample.question))


def test_longbench_is_read_with_our_prompts_or_its_own(request_for, tmp_path):
    path, request = lines(tmp_path / "qasper.jsonl", V1, V1), request_for(count=1)
    (one,) = tasks.draw(f"longbench:{path}", request)
    context, question = text_of(request, one)
    assert context.endswith("The cat sat.") and "Who sat?" in question and question.endswith("Answer:")
    assert (one.answers, one.metric, one.max_new_tokens) == (("the cat", "cat"), "f1", 128)
    (tmp_path / "config").mkdir()
    own = {"qasper": "Given:\n{context}\n\nAsked: {input}\nSay:"}
    (tmp_path / "config" / "dataset2prompt.json").write_text(json.dumps(own))
    (one,) = tasks.draw(f"longbench:{path}", request)
    assert text_of(request, one) == ("Given:\nThe cat sat.", "\n\nAsked: Who sat?\nSay:")


@pytest.mark.parametrize(("dataset", "metric", "tokens"), [
    ("hotpotqa_e", "f1", 32), ("triviaqa", "f1_first_line", 32), ("samsum", "rouge_l_first_line", 128),
    ("trec", "classification_first_line", 64), ("gov_report", "rouge_l", 512), ("lcc", "edit_similarity", 64),
    ("passage_retrieval_en", "share_of_numbers", 32),
])
def test_every_dataset_has_its_metric_and_length(dataset, metric, tokens, request_for, tmp_path):
    path = lines(tmp_path / "a.jsonl", {**V1, "dataset": dataset, "all_classes": ["the cat", "cat"]})
    (one,) = tasks.draw(f"longbench:{path}", request_for())
    assert (one.metric, one.max_new_tokens, one.classes) == (metric, tokens, ("the cat", "cat"))
    assert scoring.score(one.metric, "something", one.answers, one.classes) <= 1


def test_over_long_prompts_keep_both_ends(request_for, tmp_path):
    words = " ".join(f"w{i}" for i in range(500))
    path, request = lines(tmp_path / "a.jsonl", {**V1, "dataset": "samsum", "context": words}), request_for(length=101)
    (one,) = tasks.draw(f"longbench:{path}", request)
    whole = (*one.context, *one.question)
    ids = request.tokenizer.encode(words + "\nWho sat?", add_special_tokens=False)
    assert whole == (*request.start, *ids[:50], *ids[-50:])
    assert request.tokenizer.decode(one.question) == "\nWho sat?"


def test_longbench_v2_is_a_choice_of_four_letters(request_for, tmp_path):
    (tmp_path / "data.json").write_text(json.dumps([V2, V2]))
    request = request_for()
    for path in (tmp_path / "data.json", lines(tmp_path / "data.jsonl", V2, V2)):
        first, _ = tasks.draw(f"longbench_v2:{path}", request)
        context, question = text_of(request, first)
        assert context.endswith("A cat sat.") and "(D) none" in question
        assert scoring.score(first.metric, "The correct answer is (A).", first.answers) == 1


def test_ruler_files_are_told_apart_by_their_name(request_for, tmp_path):
    request = request_for()
    (tmp_path / "qa_1").mkdir()
    (one,) = tasks.draw(f"ruler:{lines(tmp_path / 'qa_1' / 'validation.jsonl', RULER)}", request)
    assert (one.metric, one.max_new_tokens) == ("string_match_part", 32)
    (one,) = tasks.draw(f"ruler:{lines(tmp_path / 'niah_single_1.jsonl', RULER)}", request)
    assert (one.metric, one.max_new_tokens) == ("string_match_all", 128)
    assert text_of(request, one) == (
        "Read.\nThe number for k is: 7.\n", "What is the number for k? The number for k is"
    )
    with pytest.raises(TaskFileError, match="not that of a RULER task"):
        tasks.draw(f"ruler:{lines(tmp_path / 'other.jsonl', RULER)}", request)
    with pytest.raises(TaskFileError, match="answer_prefix is int"):
        tasks.draw(f"ruler:{lines(tmp_path / 'vt.jsonl', {**RULER, 'answer_prefix': 5})}", request)


@pytest.mark.parametrize("content", ["null", "[1]", '{"qasper": null}', "{"])
def test_prompts_of_another_kind_are_refused(content, request_for, tmp_path):
    (tmp_path / "dataset2prompt.json").write_text(content)
    with pytest.raises(TaskFileError, match=r"dataset2prompt\.json"):
        tasks.draw(f"longbench:{lines(tmp_path / 'qasper.jsonl', V1)}", request_for())


def test_a_template_that_rewrites_messages_is_refused(request_for):
    """Given one that escapes what they say: a document would come to lie in the model's turn."""
    request = request_for()
    tokenizer = dataclasses.replace(request.tokenizer, template="{{ messages[0].content | tojson }}")
    with pytest.raises(CheckpointError, match="changes what a message says"):
        prompts.split(dataclasses.replace(request, tokenizer=tokenizer), "a", "b", chat=True)


def test_gsm8k_shares_its_examples_and_wants_the_number_after_the_mark(request_for, tmp_path):
    path = lines(tmp_path / "test.jsonl", GSM, {"question": "How much?", "answer": "so\n#### 1,200"})
    first, second = tasks.draw(f"gsm8k:{path}", request_for())
    assert first.context == second.context == gsm8k.CONTEXT and second.answers == ("1,200",)
    assert first.question == "Q: Two and two?\nA:" and first.context.count("The answer is") == 8
    assert scoring.score(first.metric, " 2 + 2 = 4. The answer is 4.", first.answers) == 1
    for question, thought, answer in gsm8k.EXAMPLES:
        assert scoring.last_number(thought) == answer or f"= {answer}" in thought, question


def test_a_text_file_is_predicted(request_for, tmp_path):
    (tmp_path / "a.txt").write_text("one two three four " * 200)
    request = request_for(length=40, count=1, new_tokens=5)
    (one,) = tasks.draw(f"text:{tmp_path / 'a.txt'}", request)
    assert "three four one" in request.tokenizer.decode(one.context) and len(one.tokens) == 5


def without(row, field):
    return {name: value for name, value in row.items() if name != field}


@pytest.mark.parametrize(("name", "content", "words"), [
    ("longbench", json.dumps(V1) + "\n" + json.dumps(without(V1, "answers")), r"bad\.jsonl:2: no field answers"),
    ("longbench", json.dumps(V1) + "\n\n{oops\n", r"bad\.jsonl:3: not JSON"),
    ("longbench", json.dumps(V2), "this is LongBench v2; use task longbench_v2"),
    ("longbench_v2", json.dumps(V1), "this is LongBench v1; use task longbench"),
    ("longbench_v2", json.dumps([V2, 3]), "row 2: expected a JSON object"),
    ("longbench_v2", json.dumps([{**V2, "answer": "E"}]), "row 1: answer 'E'"),
    ("longbench", json.dumps({**V1, "dataset": "dureader"}), ":1: dataset 'dureader' is not supported"),
    ("longbench", json.dumps({**V1, "context": 7}), ":1: context is int, expected str"),
    ("longbench", json.dumps({**V1, "answers": []}), ":1: answers is empty"),
    ("longbench", json.dumps({**V1, "all_classes": 5}), ":1: all_classes is 5"),
    ("longbench", "", "no rows"),
    ("longbench", json.dumps({**V1, "dataset": "trec", "all_classes": ["a"]}), ":1: not all answers .* all_classes"),
    ("gsm8k", json.dumps({**GSM, "answer": "4"}), ":1: the answer has no number after ####"),
    ("gsm8k", json.dumps({**GSM, "answer": "so\n#### 5 apples"}), ":1: the answer has no number after ####"),
    ("gsm8k", json.dumps(RULER), "this is a file of RULER"),
    ("text", None, "cannot be read"),
])
def test_bad_files_are_named_with_line_and_cause(name, content, words, request_for, tmp_path):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TaskFileError, match=words):
        tasks.draw(f"{name}:{path}", request_for())


@pytest.mark.parametrize(("name", "words"), [
    ("nope", "unknown task 'nope'; use one of passkey"), ("longbench", "needs a file; write longbench:FILE"),
    ("needle:x.txt", "reads no file; write needle"), ("niah_single_1:x.txt", "reads no file"),
])
def test_bad_names_say_what_to_write(name, words):
    with pytest.raises(ConfigError, match=words):
        tasks.find(name)


def test_a_chat_model_gets_its_template_around_prompts_that_are_no_examples(request_for, tmp_path):
    request = request_for()
    chatty = dataclasses.replace(
        request.tokenizer, template="[USER]{{ messages[0].content }}[END]{% if add_generation_prompt %}[BOT]{% endif %}"
    )
    request = dataclasses.replace(request, tokenizer=chatty)
    for dataset, wrapped in (("qasper", True), ("trec", False)):
        path = lines(tmp_path / "a.jsonl", {**V1, "dataset": dataset, "all_classes": ["the cat", "cat"]})
        (one,) = tasks.draw(f"longbench:{path}", request)
        context, question = text_of(request, one)
        assert context.startswith("[USER]") == question.endswith("[END][BOT]") == wrapped
