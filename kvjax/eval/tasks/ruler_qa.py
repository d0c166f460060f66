"""RULER's question answering (Hsieh et al., 2024): a question of SQuAD or HotpotQA among as many documents as fit.

Both are the local files that RULER takes: `dev-v2.0.json` of SQuAD, `hotpot_dev_distractor_v1.json` of HotpotQA.
Questions are a file's first ones, in its order.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvjax.errors import TaskFileError
from kvjax.eval.tasks import files
from kvjax.eval.tasks.base import Request, Sample
from kvjax.eval.tasks.ruler import PlantedPrompt, fitted

QA_TOKENS = 32
_TASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


@dataclasses.dataclass(frozen=True)
class Question:
    """Question with its right answers and the documents that it needs."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    related: tuple[str, ...] = ()  # documents about the same subject, the first that are added


Data = tuple[list[Question], list[str]]  # questions, and all documents of the file


def squad(request: Request) -> list[Sample]:
    """Draws qa_1: questions of SQuAD that have an answer. Other paragraphs of the same article come first as hay.

    Raises:
      TaskFileError: the file is not SQuAD's.
      ConfigError: question and document do not fit in `request.length`.
    """
    return _draw(request, "SQuAD", _squad)


def hotpot(request: Request) -> list[Sample]:
    """Draws qa_2: questions of HotpotQA, each with its own ten documents.

    Raises:
      TaskFileError: the file is not HotpotQA's.
      ConfigError: question and documents do not fit in `request.length`.
    """
    return _draw(request, "HotpotQA", _hotpot)


def _squad(data: Any) -> Data:
    articles = [[(part["context"], part["qas"]) for part in article["paragraphs"]] for article in data["data"]]
    questions = [
        Question(row["question"], tuple(answer["text"] for answer in row["answers"]), (context,),
                 tuple(dict.fromkeys(other for other, _ in article if other != context)))
        for article in articles for context, rows in article for row in rows if not row.get("is_impossible", False)
    ]
    return questions, sorted({context for article in articles for context, _ in article})


def _hotpot(data: Any) -> Data:
    rows = [(row["question"], row["answer"], tuple(f"{title}\n{''.join(lines)}" for title, lines in row["context"]))
            for row in data]
    questions = [Question(question, (answer,), documents) for question, answer, documents in rows]
    return questions, sorted({document for _, _, documents in rows for document in documents})


def _draw(request: Request, name: str, parse: Callable[[Any], Data]) -> list[Sample]:
    data = files.read_json(request.path)
    try:
        questions, documents = parse(data)
        whole = bool(questions) and all(map(_answered, questions))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TaskFileError(f"{request.path}: not {name}'s format ({error!r}); get its original file") from error
    if not whole:
        raise TaskFileError(f"{request.path}: no questions, or one without an answer; get the original file of {name}")
    return [_sample(request, question, documents) for question in questions[: request.count]]


def _answered(question: Question) -> bool:
    """Returns whether a question has an answer and documents. Raises TypeError if one of them is no text."""
    return all(map("".join, ((question.text,), question.answers, question.documents)))


def _shuffled(rng: np.random.Generator, documents: Sequence[str]) -> list[str]:
    return [documents[i] for i in rng.permutation(len(documents))]


def _sample(request: Request, question: Question, documents: Sequence[str]) -> Sample:
    rng, seed = request.rng, int(request.rng.integers(2**32))
    near = {*question.documents, *question.related}
    far = [document for document in documents if document not in near]
    order = [*question.documents, *_shuffled(rng, question.related), *_shuffled(rng, far)]

    def build(n: int) -> PlantedPrompt:
        wanted = len(question.documents) + n
        chosen = (order * -(-wanted // len(order)))[:wanted]  # all of them again if there are too few, as in RULER
        np.random.default_rng(seed).shuffle(chosen)
        text = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(chosen, 1))
        return PlantedPrompt(f"{_TASK}\n\nThe following are given documents.\n\n{text}\n\n{_TASK}\n\n",
                             f"Question: {question.text} Answer:")

    prompt = fitted(request, QA_TOKENS, build)
    return Sample(prompt.context, prompt.question, question.answers, "string_match_part", QA_TOKENS)
