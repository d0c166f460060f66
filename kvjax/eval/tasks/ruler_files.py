"""Samples from files that RULER's own scripts write, among them its question answering, as JSON lines."""

from kvjax.errors import TaskFileError
from kvjax.eval.tasks import files, prompts
from kvjax.eval.tasks.base import Request, Sample

_FIELDS = {"index": int, "input": str, "outputs": list, "length": int}
_NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}


def draw(request: Request) -> list[Sample]:
    """Returns the first `request.count` rows of TASK.jsonl or TASK/validation.jsonl, cut to `request.length` tokens.

    The question is the last line of the input followed by `answer_prefix`.

    Raises:
      TaskFileError: the path is not named after a RULER task, or the file cannot be used.
    """
    kind, path = _kind(request), request.path
    metric = "string_match_part" if kind == "qa" else "string_match_all"
    samples = []
    for where, row in files.read_rows(path, _FIELDS, {})[: request.count]:
        context, line, question = row["input"].rstrip("\n").rpartition("\n")
        question += files.text_of(where, row, "answer_prefix")
        ids = prompts.split(request, context + line, question)
        samples.append(Sample(*ids, files.answers_of(where, row, "outputs"), metric, _NEW_TOKENS[kind]))
    return samples


def _kind(request: Request) -> str:
    """Returns the family of the task that the path is named after."""
    for name in (request.path.stem, request.path.parent.name):
        if (kind := name.split("_")[0]) in _NEW_TOKENS:
            return kind
    raise TaskFileError(f"{request.path}: the name is not that of a RULER task; name the file or its folder as RULER "
                        f"does, beginning with one of {', '.join(_NEW_TOKENS)}")
