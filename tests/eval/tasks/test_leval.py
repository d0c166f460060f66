"""L-Eval and AIME from hand-made files: what is asked, that a document is shared, and what is refused."""

import dataclasses
import json

import pytest

from kvjax.errors import ConfigError, TaskFileError
from kvjax.eval import tasks
from kvjax.eval.tasks import leval, scoring

WORDS = " ".join(f"w{i}" for i in range(400))
ROWS = {
    "coursera": ("Which are right?\nA. this\nB. that\nC. those\nD. none", "AC", ("AC", "exam")),
    "quality": ("Why?\n (A) so\n (B) as\n (C) if\n (D) or", "(B) as", ("B", "exam")),
    "tpo": ("why\nA. so\nB. as\nC. if\nD. or", "D", ("D", "exam")),
    "sci_fi": ("1.\tShips fly, True or False?", "True [fact: False]", ("true", "exam")),
    "topic_retrieval_longchat": ("What is the first topic?", "The role of art", ("The role of art", "exam")),
    "natural_question": ("when did it start", "April 25 , 2018", ("April 25 , 2018", "f1")),
}


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def row_of(name: str, questions=2, document="The cat sat.") -> dict:
    """Returns a row of a dataset with several questions about a document."""
    question, output, (_, evaluation) = ROWS[name]
    return {"input": document, "instructions": [f"{question} {i}" for i in range(questions)],
            "outputs": [output] * questions, "source": name, "evaluation": evaluation}


@pytest.mark.parametrize("name", leval.DATASETS)
def test_right_answers_score_one_and_wrong_ones_nothing(name, request_for, tmp_path):
    path = lines(tmp_path / f"{name}.jsonl", row_of(name), row_of(name, document="A dog ran."))
    samples = tasks.draw(f"leval:{path}", request_for(count=9))
    assert len(samples) == 4 and samples[0].answers == (ROWS[name][2][0],)
    for sample in samples:
        assert scoring.score(sample.metric, f" {sample.answers[0]}", sample.answers) == 1
        assert scoring.score(sample.metric, "", sample.answers) == 0


def test_questions_about_one_document_share_its_context(request_for, tmp_path):
    request = request_for(count=5)
    path = lines(tmp_path / "tpo.jsonl", row_of("tpo", 3), row_of("tpo", 3, document="A dog ran."))
    samples = tasks.draw(f"leval:{path}", request)
    assert [sample.context == samples[0].context for sample in samples] == [True] * 3 + [False] * 2
    assert request.tokenizer.decode(samples[0].context).endswith("The cat sat.")
    questions = [request.tokenizer.decode(sample.question) for sample in samples]
    assert len(set(questions[:3])) == 3 and all(text.startswith("\n\nQuestion: why\nA. so") for text in questions)
    assert questions[1].endswith("Answer with its letter alone, such as A.\nAnswer:") and "D. or 1\n" in questions[1]


def test_long_documents_lose_their_end_alike_for_all_questions(request_for, tmp_path):
    row = {**row_of("natural_question", document=WORDS), "instructions": ["when", "when " + "on earth " * 20]}
    request = request_for(length=200)
    short, long = tasks.draw(f"leval:{lines(tmp_path / 'natural_question.jsonl', row)}", request)
    assert short.context == long.context and len(long.context) + len(long.question) == 200
    kept = request.tokenizer.decode(short.context).partition("w0 ")[2]
    assert WORDS.startswith(f"w0 {kept}") and 100 < len(kept) < len(WORDS) - 100
    with pytest.raises(ConfigError, match="leaves no room for its context"):
        tasks.draw(f"leval:{tmp_path / 'natural_question.jsonl'}", request_for(length=30))


def test_the_number_of_words_of_an_answer_is_told_as_in_l_eval(request_for, tmp_path):
    request = request_for(count=1)
    path = lines(tmp_path / "natural_question.jsonl", row_of("natural_question"))
    (sample,) = tasks.draw(f"leval:{path}", request)
    assert "Answer with 4 words." in request.tokenizer.decode(sample.question) and sample.metric == "f1"


def test_rows_for_a_judge_are_left_out(request_for, tmp_path):
    judged = {**row_of("natural_question", document="Judged."), "evaluation": "LLM"}
    path = lines(tmp_path / "natural_question.jsonl", judged, row_of("natural_question"))
    request = request_for(count=9)
    samples = tasks.draw(f"leval:{path}", request)
    assert len(samples) == 2 and "Judged" not in request.tokenizer.decode(samples[0].context)


def test_a_chat_model_gets_document_and_question_as_one_message(request_for, tmp_path):
    request = request_for(count=1)
    chatty = dataclasses.replace(request.tokenizer, template="[USER]{{ messages[0].content }}[END][BOT]")
    request = dataclasses.replace(request, tokenizer=chatty)
    for name, path in (("leval", lines(tmp_path / "tpo.jsonl", row_of("tpo"))),
                       ("aime", lines(tmp_path / "aime.jsonl", {"problem": "1 + 1?", "answer": 2}))):
        (sample,) = tasks.draw(f"{name}:{path}", request)
        assert chatty.decode(sample.context).startswith("[USER]")
        assert chatty.decode(sample.question).endswith("[END][BOT]")


@pytest.mark.parametrize(("name", "changes", "words"), [
    ("other", {}, "not that of a dataset of L-Eval"),
    ("tpo", {"evaluation": "LLM"}, "no row whose evaluation is exam"),
    ("tpo", {"outputs": ["A"]}, r":1: instructions and outputs are not equally many"),
    ("tpo", {"outputs": ["A", 3]}, "not equally many texts"),
    ("tpo", {"instructions": [], "outputs": []}, "no instructions"),
    ("tpo", {"outputs": ["A", "none"]}, r"'none' has no right answer for the score 'letter'"),
    ("tpo", {"outputs": ["A", ""]}, "no right answer"),
    ("sci_fi", {"outputs": ["True", "Maybe [fact: True]"]}, "'Maybe .* no right answer"),
    ("tpo", {"input": 3}, "input is int"),
])
def test_other_files_are_refused(name, changes, words, request_for, tmp_path):
    row = row_of(name if name in ROWS else "tpo") | changes
    with pytest.raises(TaskFileError, match=words):
        tasks.draw(f"leval:{lines(tmp_path / f'{name}.jsonl', row)}", request_for())


def test_problems_of_aime_share_their_instruction(request_for, tmp_path):
    rows = [{"problem": "Find m + n.", "answer": "025"}, {"problem": "Find x.", "answer": 7}]
    request = request_for(length=8)
    first, second = tasks.draw(f"aime:{lines(tmp_path / 'aime.jsonl', *rows)}", request)
    assert first.context == second.context and first.answers == ("025",) and second.answers == ("7",)
    assert request.tokenizer.decode((*first.context, *first.question)).endswith("Problem: Find m + n.\n\nSolution:")
    assert scoring.score(first.metric, r"so \boxed{25}", first.answers) == 1


@pytest.mark.parametrize("answer", ["1000", -3, "2.5", True, None, ""])
def test_answers_that_are_none_of_aime_are_refused(answer, request_for, tmp_path):
    with pytest.raises(TaskFileError, match=r":1: answer .* is no integer from 0 to 999"):
        tasks.draw(f"aime:{lines(tmp_path / 'a.jsonl', {'problem': 'p', 'answer': answer})}", request_for())
