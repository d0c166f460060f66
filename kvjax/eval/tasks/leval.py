"""L-Eval (An et al., 2023) from local files: many questions about one long document, which is read once for all.

These are the datasets that are scored without a judge or ROUGE, GSM100 and CodeU excepted. Scores are L-Eval's; prompts
are plain ones of kvjax, and answers are shorter than its 512 tokens, so that published scores are not comparable. Of
sci_fi only the questions about the document are asked, not those about the real world, which need no context.
"""

import dataclasses
import re

from kvjax.errors import TaskFileError
from kvjax.eval.tasks import files, prompts
from kvjax.eval.tasks.base import Request, Sample

_FIELDS = {"input": str, "instructions": list, "outputs": list, "evaluation": str}
_OPENING = "Read the following text. A question about it comes at the end.\n\n"
_ONE = "Exactly one option is right. Answer with its letter alone, such as A."


@dataclasses.dataclass(frozen=True)
class ClosedTask:
    """Metric, answer length in tokens and instruction of a dataset."""

    metric: str
    new_tokens: int
    instruction: str  # {words} stands for the number of words of the right answer, which L-Eval tells
    evaluation: str = "exam"  # kind of rows that count


DATASETS = {
    "coursera": ClosedTask("letters", 32, "One option or more are right. Answer with their letters alone, such as AB."),
    "quality": ClosedTask("letter", 32, _ONE),
    "tpo": ClosedTask("letter", 32, _ONE),
    "sci_fi": ClosedTask("true_false", 32, "Answer with True or False, by what the text says."),
    "topic_retrieval_longchat": ClosedTask("contains", 64, "Answer with the name of the topic alone."),
    "natural_question": ClosedTask("f1", 64, "Answer with {words} words.", "f1"),
}


def draw(request: Request) -> list[Sample]:
    """Returns the first `request.count` questions of a file; those about one document have the same context.

    A document that is too long loses its end, as in L-Eval, so that it fits in `request.length` tokens with the longest
    question about it. Rows for a judge are left out.

    Raises:
      TaskFileError: the file is not named after a dataset, or cannot be used.
      ConfigError: a question does not fit in `request.length` tokens.
    """
    name = request.path.stem
    if name not in DATASETS:
        raise TaskFileError(f"{request.path}: the name is not that of a dataset of L-Eval that is scored here; "
                            f"name the file as L-Eval does, one of {', '.join(DATASETS)}")
    dataset, samples = DATASETS[name], list[Sample]()
    for where, row in files.read_rows(request.path, _FIELDS, {}):
        if len(samples) < request.count and row["evaluation"] == dataset.evaluation:
            samples += _samples(request, dataset, where, row)
    if not samples:
        raise TaskFileError(f"{request.path}: no row whose evaluation is {dataset.evaluation}; get the original file")
    return samples[: request.count]


def _samples(request: Request, dataset: ClosedTask, where: str, row: files.Row) -> list[Sample]:
    """Returns all questions about the document of a row."""
    questions, outputs = row["instructions"], row["outputs"]
    if len(questions) != len(outputs) or not all(isinstance(text, str) for text in (*questions, *outputs)):
        raise TaskFileError(f"{where}: instructions and outputs are not equally many texts; get the file again")
    if not questions:
        raise TaskFileError(f"{where}: no instructions; a row needs a question")
    texts = [
        f"\n\nQuestion: {question.strip()}\n{dataset.instruction.format(words=len(output.split()))}\nAnswer:"
        for question, output in zip(questions, outputs, strict=True)
    ]
    context, asked = prompts.shared(request, _OPENING + row["input"].strip(), texts, chat=True)
    return [Sample(context, question, (_answer(dataset, where, output),), dataset.metric, dataset.new_tokens)
            for question, output in zip(asked, outputs, strict=True)]


def _answer(dataset: ClosedTask, where: str, output: str) -> str:
    """Returns the right answer in the form that the metric takes."""
    if dataset.metric in ("letter", "letters"):
        answer = re.sub("[^A-D]", "", (output.split() or [""])[0])
    elif dataset.metric == "true_false":
        said = output.lower().partition("[fact:")[0].strip()
        answer = said if said in ("true", "false") else ""
    else:
        answer = output.strip()
    if not answer:
        raise TaskFileError(f"{where}: output {output!r:.80} has no right answer for the score {dataset.metric!r}")
    return answer
