"""LongBench (Bai et al., 2023) and LongBench v2 (Bai et al., 2024) from local files.

Prompts of v1 are LongBench's if its `dataset2prompt.json` is beside the file, or in `config/` there or one level up.
Else they are plain ones of kvjax, as v2's always are, with which scores are not comparable to published ones.
"""

import dataclasses
import pathlib

from kvjax._files import parse_json
from kvjax.errors import TaskFileError
from kvjax.eval.tasks import files, prompts, scoring
from kvjax.eval.tasks.base import Request, Sample

_V1 = {"input": str, "context": str, "answers": list, "dataset": str}
_V2 = dict.fromkeys(("question", "choice_A", "choice_B", "choice_C", "choice_D", "answer", "context"), str)
V2_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Metric, answer length in tokens and prompt of a dataset of v1."""

    metric: str
    new_tokens: int
    prompt: str  # kvjax's own, with {context} before {input}
    chat: bool = True  # whether to use the model's chat template


_QA = "Answer the question from the text in a few words.\n\n{context}\n\nQuestion: {input}\nAnswer:"
_SUM = "Summarise the text.\n\n{context}\n\n{input}\nSummary:"
_COUNT = "How many different paragraphs are there, if repeated ones count once?\n\n{context}\n\nNumber:"
_FIND = "Which paragraph is summed up?\n\n{context}\n\nSummary: {input}\n\nAnswer as in: Paragraph 1\nAnswer:"
_SHOTS, _CODE = "{context}\n{input}", "{context}{input}"
_LINE = scoring.FIRST_LINE

DATASETS = {
    "narrativeqa": Dataset("f1", 128, _QA), "qasper": Dataset("f1", 128, _QA),
    "multifieldqa_en": Dataset("f1", 64, _QA), "hotpotqa": Dataset("f1", 32, _QA), "2wikimqa": Dataset("f1", 32, _QA),
    "musique": Dataset("f1", 32, _QA), "gov_report": Dataset("rouge_l", 512, _SUM),
    "qmsum": Dataset("rouge_l", 512, _SUM), "multi_news": Dataset("rouge_l", 512, _SUM),
    "trec": Dataset("classification" + _LINE, 64, _SHOTS, False), "triviaqa": Dataset("f1" + _LINE, 32, _SHOTS, False),
    "samsum": Dataset("rouge_l" + _LINE, 128, _SHOTS, False), "passage_count": Dataset("share_of_numbers", 32, _COUNT),
    "passage_retrieval_en": Dataset("share_of_numbers", 32, _FIND),
    "lsht": Dataset("classification" + _LINE, 64, _SHOTS, False),
    "lcc": Dataset("edit_similarity", 64, _CODE, False), "repobench-p": Dataset("edit_similarity", 64, _CODE, False),
}


def draw(request: Request) -> list[Sample]:
    """Returns the first `request.count` rows of a v1 file: English and code datasets, lsht, and those of LongBench-E.

    Raises TaskFileError for a file or dataset that cannot be used.
    """
    rows = files.read_rows(request.path, _V1, {"choice_A": "this is LongBench v2; use task longbench_v2"})
    official = _official(request.path)
    return [_v1(request, where, row, official) for where, row in rows[: request.count]]


def _v1(request: Request, where: str, row: files.Row, official: dict[str, str]) -> Sample:
    name = row["dataset"].removesuffix("_e")
    if name not in DATASETS:
        raise TaskFileError(f"{where}: dataset {name!r} is not supported; use one of {', '.join(DATASETS)}")
    dataset = DATASETS[name]
    before, context, after = official.get(name, dataset.prompt).partition("{context}")
    if not context or "{input}" in before:
        raise TaskFileError(f"dataset2prompt.json of {request.path}: {{context}} is not before {{input}} in {name}")
    ids = prompts.split(request, before + row["context"], after.replace("{input}", row["input"]), dataset.chat)
    answers, classes = files.answers_of(where, row, "answers"), files.classes_of(where, row)
    if dataset.metric.startswith("classification") and not set(answers) <= set(classes):
        raise TaskFileError(f"{where}: not all answers {answers} are in all_classes; get the file again")
    return Sample(*ids, answers, dataset.metric, dataset.new_tokens, classes=classes)


def _official(path: pathlib.Path) -> dict[str, str]:
    """Returns LongBench's own prompts by dataset, if their file is there."""
    for folder in (path.parent, path.parent / "config", path.parent.parent / "config"):
        if (file := folder / "dataset2prompt.json").is_file():
            try:
                official = parse_json(files.read_text(file).encode())
            except ValueError as error:
                raise TaskFileError(f"{file}: not a JSON object ({error}); get the file again") from error
            if not isinstance(official, dict) or not all(isinstance(prompt, str) for prompt in official.values()):
                raise TaskFileError(f"{file}: not a JSON object of texts; get the file again")
            return official
    return {}


def draw_v2(request: Request) -> list[Sample]:
    """Returns the first `request.count` rows of a v2 file: multiple choice, without a chain of thought.

    Raises TaskFileError for a file that cannot be used.
    """
    rows = files.read_rows(request.path, _V2, {"answers": "this is LongBench v1; use task longbench"})
    return [_v2(request, where, row) for where, row in rows[: request.count]]


def _v2(request: Request, where: str, row: files.Row) -> Sample:
    if row["answer"] not in ("A", "B", "C", "D"):
        raise TaskFileError(f"{where}: answer {row['answer']!r} must be one of A, B, C, D")
    choices = "\n".join(f"({letter}) {row[f'choice_{letter}'].strip()}" for letter in "ABCD")
    question = (f"\n\nQuestion: {row['question'].strip()}\n{choices}\n\n"
                'Answer with the letter alone, in this form: "The correct answer is (A)".')
    context = f"Read the text and answer the question after it.\n\n{row['context'].strip()}"
    return Sample(*prompts.split(request, context, question, chat=True), (row["answer"],), "choice", V2_TOKENS)
