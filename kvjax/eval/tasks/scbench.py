"""SCBench (Li et al., 2024) from local files, as many requests to one context, which is read once for all.

These are the datasets whose answers are found in the context: keys and values, prefixes and suffixes, chains of
variables, and questions about books. Prompts and scores are SCBench's, without its empty system message.
"""

import dataclasses
from typing import Any

from kvjax.errors import TaskFileError
from kvjax.eval.tasks import files, prompts
from kvjax.eval.tasks.base import Request, Sample

_FIELDS = {"context": str, "multi_turns": list}
_LETTERS = "ABCD"


@dataclasses.dataclass(frozen=True)
class SharedContext:
    """Metric, answer length in tokens and prompt of a dataset: text before the context, and the question."""

    metric: str
    new_tokens: int
    opening: str = ""
    question: str = "{input}"


_CHOICE = "Question: {input}\nA. {A}\nB. {B}\nC. {C}\nD. {D}\n\nThe the correct answer is"  # so in SCBench

DATASETS = {
    "scbench_kv": SharedContext(
        "includes", 150, "Extract the value corresponding to the specified key in the JSON object below.\n\n"),
    "scbench_prefix_suffix": SharedContext("includes", 150),
    "scbench_vt": SharedContext("string_match_all", 30),
    "scbench_qa_eng": SharedContext(
        "string_match_part", 40, "Read the book and answer the question. Be very concise in your answer.\n\n",
        "Question: {input}\nAnswer:"),
    "scbench_choice_eng": SharedContext("book_choice", 40, "Read the book and answer the question.\n\n", _CHOICE),
}


def draw(request: Request) -> list[Sample]:
    """Returns the first `request.count` questions of a file; those about one context have the same one.

    A context that is too long loses its middle, as in SCBench, so that it fits in `request.length` tokens with the
    longest question about it.

    Raises:
      TaskFileError: the file is not named after a dataset, or cannot be used.
      ConfigError: a question does not fit in `request.length` tokens.
    """
    name = request.path.stem
    if name not in DATASETS:
        raise TaskFileError(f"{request.path}: the name is not that of a dataset of SCBench that is scored here; name "
                            f"the file as SCBench does, one of {', '.join(DATASETS)}")
    samples: list[Sample] = []
    for where, row in files.read_rows(request.path, _FIELDS, {}):
        if len(samples) < request.count:
            samples += _samples(request, DATASETS[name], where, row)
    return samples[: request.count]


def _samples(request: Request, dataset: SharedContext, where: str, row: files.Row) -> list[Sample]:
    """Returns all questions about the context of a row."""
    if not row["multi_turns"]:
        raise TaskFileError(f"{where}: multi_turns is empty; a row needs a question")
    try:
        asked = [_asked(dataset, turn) for turn in row["multi_turns"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TaskFileError(f"{where}: not SCBench's format ({error!r}); get the original file") from error
    texts = [f"\n\n{question}" for question, _ in asked]
    context, ids = prompts.shared(request, dataset.opening + row["context"], texts, chat=True, keep_end=True)
    return [Sample(context, question, answers, dataset.metric, dataset.new_tokens)
            for question, (_, answers) in zip(ids, asked, strict=True)]


def _asked(dataset: SharedContext, turn: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Returns the question of a turn and its right answers; of a choice these are the option and its letter."""
    given, answer = {"input": turn["input"]}, turn["answer"]
    several = dataset.metric == "string_match_all"
    if not answer or not isinstance(answer, list if several else str):
        raise TypeError(f"answer is {answer!r:.40}")
    answers = tuple(answer) if several else (answer,)
    if dataset.metric == "book_choice":
        given |= dict(zip(_LETTERS, turn["options"], strict=True))
        answers += (_LETTERS[turn["options"].index(answer)],)
    "".join((*given.values(), *answers))  # TypeError unless all are texts
    return dataset.question.format(**given), answers
