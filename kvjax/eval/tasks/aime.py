"""AIME from a local file of JSON lines with problem and answer: mathematics that takes long chains of thought.

The instruction is the shared context of all problems, so that what is measured is decoding.
"""

import dataclasses
import sys

from kvjax.errors import TaskFileError
from kvjax.eval.tasks import files, prompts
from kvjax.eval.tasks.base import Request, Sample

NEW_TOKENS = 8192
INSTRUCTION = ("Solve the problem step by step. The answer is an integer from 0 to 999; put it in \\boxed{} at the end."
               "\n\nProblem: ")


def draw(request: Request) -> list[Sample]:
    """Returns the first `request.count` problems; `request.length` is ignored, as none is long.

    Raises TaskFileError for an answer that is not an integer from 0 to 999, or a file that cannot be used.
    """
    rows = files.read_rows(request.path, {"problem": str, "answer": object}, {})[: request.count]
    answers = tuple(_answer(where, row) for where, row in rows)
    questions = [f"{row['problem'].strip()}\n\nSolution:" for _, row in rows]
    whole = dataclasses.replace(request, length=sys.maxsize)
    context, asked = prompts.shared(whole, INSTRUCTION, questions, chat=True)
    return [Sample(context, question, (answer,), "aime", NEW_TOKENS)
            for question, answer in zip(asked, answers, strict=True)]


def _answer(where: str, row: files.Row) -> str:
    answer = str(row["answer"]).strip()
    if isinstance(row["answer"], bool) or not (answer.isdecimal() and len(answer) <= 3):
        raise TaskFileError(f"{where}: answer {row['answer']!r} is no integer from 0 to 999; this is not AIME")
    return answer
