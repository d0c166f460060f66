"""SCBench from hand-made files: what is asked, that a context is shared, how it is cut, and what is refused."""

import json

import pytest

from kvjax.errors import ConfigError, TaskFileError
from kvjax.eval import tasks
from kvjax.eval.tasks import scbench, scoring

CHOICE = {"input": "What colour?", "answer": "deep blue", "options": ["red", "deep blue", "green", "white"]}
TURNS = {
    "scbench_kv": ({"input": 'Key: "a1"', "answer": "B7-x"}, "it is B7-x.", "it is b7-x."),
    "scbench_prefix_suffix": ({"input": "Starts with ab", "answer": "abXyz"}, "abXyz", "abxyz"),
    "scbench_vt": ({"input": "Find all", "answer": ["VAA", "VBB"]}, "vaa and VBB", "VCC"),
    "scbench_qa_eng": ({"input": "Who?", "answer": "Mr. Gray"}, "it was mr. gray", "Gray"),
    "scbench_choice_eng": (CHOICE, " B. deep blue", "A"),
}


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", scbench.DATASETS)
def test_right_answers_score_one_and_wrong_ones_nothing(name, request_for, tmp_path):
    turn, right, wrong = TURNS[name]
    rows = [{"id": i, "context": f"Text {i}.", "multi_turns": [turn] * 2} for i in (1, 2)]
    path = lines(tmp_path / f"{name}.jsonl", *rows)
    request = request_for(count=3)
    samples = tasks.draw(f"scbench:{path}", request)
    assert [sample.context == samples[0].context for sample in samples] == [True, True, False]
    assert request.tokenizer.decode(samples[2].context).endswith("Text 2.")
    assert turn["input"] in request.tokenizer.decode(samples[0].question)
    for sample in samples:
        scores = [scoring.score(sample.metric, text, sample.answers) for text in (right, wrong, "")]
        assert scores == [1, 0, 0]


def test_options_are_asked_for_by_letter_and_right_as_text_too(request_for, tmp_path):
    path = lines(tmp_path / "scbench_choice_eng.jsonl", {"context": "Text.", "multi_turns": [CHOICE]})
    request = request_for()
    (sample,) = tasks.draw(f"scbench:{path}", request)
    assert "A. red\nB. deep blue\nC. green\nD. white\n" in request.tokenizer.decode(sample.question)
    assert sample.answers == ("deep blue", "B")


def test_long_contexts_lose_their_middle(request_for, tmp_path):
    words = " ".join(f"w{i}" for i in range(400))
    turns = [{"input": "Key: a", "answer": "x"}, {"input": "Key: " + "a b c " * 9, "answer": "y"}]
    path = lines(tmp_path / "scbench_kv.jsonl", {"context": words, "multi_turns": turns})
    request = request_for(length=151)
    short, long = tasks.draw(f"scbench:{path}", request)
    assert short.context == long.context and len(long.context) + len(long.question) == 151
    kept = request.tokenizer.decode(short.context)
    assert "\n\nw0 w1 w2" in kept and kept.endswith("w398 w399")
    with pytest.raises(ConfigError, match="leaves no room for its context"):
        tasks.draw(f"scbench:{path}", request_for(length=30))


@pytest.mark.parametrize(("name", "turns", "words"), [
    ("scbench_summary", [], "not that of a dataset of SCBench that is scored"),
    ("scbench_kv", [], "multi_turns is empty"),
    ("scbench_kv", [{"input": "a"}], "not SCBench's format .*answer"),
    ("scbench_kv", ["a"], "not SCBench's format"),
    ("scbench_kv", [{"input": "a", "answer": ["b"]}], r"answer is \['b'\]"),
    ("scbench_kv", [{"input": 3, "answer": "b"}], "not SCBench's format"),
    ("scbench_vt", [{"input": "a", "answer": "b"}], "answer is 'b'"),
    ("scbench_choice_eng", [{**CHOICE, "answer": "pink"}], "not SCBench's format"),
    ("scbench_choice_eng", [{**CHOICE, "options": ["deep blue"]}], "not SCBench's format"),
])
def test_other_files_are_refused(name, turns, words, request_for, tmp_path):
    path = lines(tmp_path / f"{name}.jsonl", {"context": "c", "multi_turns": turns})
    with pytest.raises(TaskFileError, match=words):
        tasks.draw(f"scbench:{path}", request_for())
