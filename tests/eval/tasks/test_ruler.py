"""RULER's thirteen tasks: lengths, places, how often an answer is in its context, and question answering from files."""

import json
import re

import numpy as np
import pytest

from kvjax.errors import ConfigError, TaskFileError
from kvjax.eval import tasks
from kvjax.eval.tasks import ruler, scoring

LENGTH = 4_096
MADE = (*ruler.NIAH, "vt", "cwe", "fwe")
THIRTEEN = (*MADE, "qa_1", "qa_2")


def squad(articles=20, paragraphs=5) -> dict:
    """Returns a file of SQuAD 2.0: a paragraph has one question with two wordings of its answer, and one without."""
    def paragraph(i: int, j: int) -> dict:
        filler, answers = f"The town of number {i}-{j} was founded long ago. " * 4, (f"Mayor{i}x{j}", "the mayor")
        asked = {"question": f"Who governs {i}-{j}?", "answers": [{"text": answer} for answer in answers]}
        return {"context": f"Article {i} part {j}. {filler}Its mayor is {answers[0]}.",
                "qas": [{**asked, "is_impossible": False},
                        {"question": "Who knows?", "answers": [], "is_impossible": True}]}

    return {"data": [{"title": str(i), "paragraphs": [paragraph(i, j) for j in range(paragraphs)]}
                     for i in range(articles)]}


def hotpot(rows=12) -> list[dict]:
    """Returns a file of HotpotQA: ten documents to each question, the last of which all questions share."""
    def documents(i: int) -> list:
        own = [[f"Title {i}.{j}", [f"Fact {j} of row {i}. ", f"It is Secret{i}x{j}. " * 3]] for j in range(9)]
        return [*own, ["Shared", ["Everyone has this."]]]

    return [{"question": f"What is fact 0 of row {i}?", "answer": f"Secret{i}x0", "context": documents(i)}
            for i in range(rows)]


@pytest.fixture
def named(tmp_path):
    """A function that adds to a task's name the file that it reads, if any."""
    (tmp_path / "squad.json").write_text(json.dumps(squad()))
    (tmp_path / "hotpot.json").write_text(json.dumps(hotpot()))
    paths = {"qa_1": tmp_path / "squad.json", "qa_2": tmp_path / "hotpot.json"}
    return lambda name: f"{name}:{paths[name]}" if name in paths else name


@pytest.mark.parametrize("name", THIRTEEN)
def test_a_prompt_with_its_answer_fits_and_fills_nine_tenths(name, request_for, named):
    request = request_for(length=LENGTH, count=2)
    for sample in tasks.draw(named(name), request):
        used = request.tokens(sample.context, start=True) + request.tokens(sample.question) + sample.max_new_tokens
        assert 0.9 * LENGTH < used <= LENGTH


@pytest.mark.parametrize("name", THIRTEEN)
def test_equal_seeds_draw_equal_samples(name, request_for, named):
    first, again, other = (tasks.draw(named(name), request_for(1_500, 2, seed)) for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize("name", [*ruler.NIAH, "vt"])
def test_an_answer_is_in_its_context_once_and_not_in_its_question(name, request_for):
    """Given a chain of variables, a name is told once and used once, but for the last."""
    for sample in tasks.draw(name, request_for(length=LENGTH, count=3)):
        counts = [len(re.findall(rf"\b{answer}\b", sample.context)) for answer in sample.answers]
        assert counts == ([2, 2, 2, 2, 1] if name == "vt" else [1] * len(counts))
        assert not any(answer in sample.question for answer in sample.answers)
        assert scoring.score(sample.metric, f"They are {', '.join(sample.answers)}.", sample.answers) == 1


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_2", "vt"])
def test_answers_are_at_all_depths(name, request_for):
    """Given a chain, the third of its five names, which is seldom first or last."""
    depths = []
    for sample in tasks.draw(name, request_for(length=1_500, count=24)):
        text = sample.context.rpartition("in the following text.\n\n")[2]
        depths.append(text.index(sample.answers[len(sample.answers) // 2]) / len(text))
    most = (0.25, 0.65, 0.12) if name == "vt" else (0.15, 0.85, 0.2)
    assert min(depths) < most[0] and max(depths) > most[1] and np.std(depths) > most[2]


def test_links_of_a_chain_are_in_different_places_of_the_noise(request_for):
    for sample in tasks.draw("vt", request_for(length=1_500, count=6)):
        text = sample.context.rpartition("in the following text.\n\n")[2]
        assert text.count("VAR") == 9 and not re.search(r"VAR .*\nVAR ", text)


def test_the_solved_example_of_a_chain_fills_500_tokens(request_for):
    request = request_for(length=LENGTH, count=1)
    (sample,) = tasks.draw("vt", request)
    example = sample.context.partition(" variables are assigned the value")[0]
    assert 420 < request.tokens(example, start=True) <= 500


def test_needles_are_hidden_in_essays_from_files(request_for, tmp_path):
    (tmp_path / "b.txt").write_text("Second essay. It ends here.")
    (tmp_path / "a.txt").write_text("First  essay.\nIt is short.")
    (tmp_path / "all.json").write_text(json.dumps({"text": "First essay. It is short. Second essay. It ends here."}))
    (tmp_path / "one.text").write_text("First essay. It is short. Second essay. It ends here.")
    of_folder, of_json, of_file = (tasks.draw(f"niah_multikey_1:{path}", request_for(length=900, count=2))
                                   for path in (tmp_path, tmp_path / "all.json", tmp_path / "one.text"))
    assert of_folder == of_json == of_file
    text = re.sub(r"One of the special magic .*?: \d+\. ?", "", of_folder[0].context)
    assert "First essay. It is short. Second essay. It ends here. First essay." in text and "cat" not in text


@pytest.mark.parametrize("content", ["", "[1]", '{"words": 1}', "{"])
def test_files_without_essays_are_refused(content, request_for, tmp_path):
    (tmp_path / "essays.json").write_text(content)
    with pytest.raises(TaskFileError, match=r"essays\.json"):
        tasks.draw(f"niah_single_2:{tmp_path / 'essays.json'}", request_for())
    with pytest.raises(TaskFileError, match=r"a folder of \*\.txt"):
        tasks.draw(f"niah_single_2:{tmp_path}", request_for())


def documents_of(context: str) -> list[str]:
    """Returns the documents of a context; fails if they are not numbered from 1 on."""
    text = context.partition("given documents.\n\n")[2].rpartition("\n\nAnswer the question")[0]
    numbers, texts = zip(*re.findall(r"Document (\d+):\n(.*?)(?=\n\nDocument \d+:\n|\Z)", text, re.S), strict=True)
    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1))
    return list(texts)


def test_questions_of_squad_have_their_paragraph_once_and_its_article_first(request_for, named):
    samples = tasks.draw(named("qa_1"), request_for(length=1_300, count=7))
    assert [sample.question for sample in samples[4:6]] == ["Question: Who governs 0-4? Answer:",
                                                           "Question: Who governs 1-0? Answer:"]
    for i, sample in enumerate(samples):
        documents = documents_of(sample.context)
        assert len(set(documents)) == len(documents) > 5
        assert sample.context.count(sample.answers[0]) == 1 and sample.answers[1] == "the mayor"
        assert sum(document.startswith(f"Article {i // 5} ") for document in documents) == 5
    places = [next(i for i, text in enumerate(documents_of(sample.context)) if sample.answers[0] in text)
              for sample in samples]
    assert len(set(places)) > 2


def test_questions_of_hotpot_have_their_ten_documents(request_for, named):
    for i, sample in enumerate(tasks.draw(named("qa_2"), request_for(length=1_500, count=3))):
        documents = documents_of(sample.context)
        assert {f"Title {i}.{j}" for j in range(9)} | {"Shared"} <= {text.partition("\n")[0] for text in documents}
        assert len(set(documents)) == len(documents) > 10


def test_an_answer_of_any_wording_is_right(request_for, named):
    (sample,) = tasks.draw(named("qa_1"), request_for(length=1_300, count=1))
    scores = [scoring.score(sample.metric, text, sample.answers) for text in ("It is mayor0X0.", "The Mayor", "nobody")]
    assert scores == [1, 1, 0] and sample.max_new_tokens == 32


def test_few_documents_are_repeated(request_for, tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(squad(articles=1, paragraphs=2)))
    (sample, _) = tasks.draw(f"qa_1:{tmp_path / 'small.json'}", request_for(length=1_300))
    assert len(set(documents_of(sample.context))) == 2 < len(documents_of(sample.context))


def test_documents_that_do_not_fit_are_refused(request_for, named):
    with pytest.raises(ConfigError, match="raise that"):
        tasks.draw(named("qa_2"), request_for(length=300))


@pytest.mark.parametrize(("name", "content", "words"), [
    ("qa_1", hotpot(1), "not SQuAD's format"), ("qa_2", squad(1), "not HotpotQA's format"),
    ("qa_1", {"data": []}, "no questions"), ("qa_2", [], "no questions"),
    ("qa_2", [{"question": "q", "answer": "a", "context": [["t", "s", "u"]]}], "not HotpotQA's format"),
    ("qa_2", [{"question": "q", "answer": "", "context": [["t", ["s"]]]}], "without an answer"),
    ("qa_2", [{"question": "q", "answer": 3, "context": [["t", ["s"]]]}], "not HotpotQA's format"),
])
def test_other_files_are_refused(name, content, words, request_for, tmp_path):
    (tmp_path / "bad.json").write_text(json.dumps(content))
    with pytest.raises(TaskFileError, match=words):
        tasks.draw(f"{name}:{tmp_path / 'bad.json'}", request_for())
