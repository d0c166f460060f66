"""Tasks by name. `draw` makes a task's samples; the name of a task that reads a file contains its path.

    samples = tasks.draw("niah_multikey_1", tasks.Request(tokenizer, text, 4096, 32, rng))
    samples = tasks.draw("longbench:data/qasper.jsonl", tasks.Request(tokenizer, "", 31500, 200, rng))

RULER has thirteen: eight of needles (with essays from a file: "niah_single_2:essays.txt"), vt, cwe, fwe, and qa_1 and
qa_2 from files of SQuAD and HotpotQA; "ruler:FILE" reads samples that its own scripts wrote.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

from kvjax.errors import ConfigError
from kvjax.eval.tasks import (
    aime,
    files,
    gsm8k,
    leval,
    longbench,
    longgen,
    niah,
    perplexity,
    recall,
    ruler,
    ruler_files,
    ruler_lists,
    ruler_qa,
    scbench,
)
from kvjax.eval.tasks.base import Continuation, Request, Sample, Task

# A task's index seeds its draws: new tasks go to the end.
TASKS: dict[str, Task] = {
    "passkey": Task(niah.passkey),
    "needle": Task(niah.needle),
    "needle_of_4": Task(niah.needle_of_4),
    "perplexity": Task(perplexity.draw, continues=True),
    "niah_grid": Task(niah.grid),
    "multi_request": Task(niah.multi_request),
    "mqar": Task(recall.draw, continues=True),
    **{name: Task(functools.partial(ruler.niah, task), hides_in_file=task.hay == "essay")
       for name, task in ruler.NIAH.items()},
    "vt": Task(ruler_lists.variable_tracking),
    "cwe": Task(ruler_lists.common_words),
    "fwe": Task(ruler_lists.frequent_words),
    "longgen": Task(longgen.draw),
    "text": Task(perplexity.draw_file, continues=True, reads_file=True),
    "ruler": Task(ruler_files.draw, reads_file=True),
    "longbench": Task(longbench.draw, reads_file=True),
    "longbench_v2": Task(longbench.draw_v2, reads_file=True),
    "gsm8k": Task(gsm8k.draw, reads_file=True),
    "qa_1": Task(ruler_qa.squad, reads_file=True),
    "qa_2": Task(ruler_qa.hotpot, reads_file=True),
    "leval": Task(leval.draw, reads_file=True),
    "aime": Task(aime.draw, reads_file=True),
    "scbench": Task(scbench.draw, reads_file=True),
    "decoded_needles": Task(niah.decoded_needles),
}


def find(name: str) -> tuple[Task, pathlib.Path]:
    """Returns the task and the file in a name; Path() if it has none.

    Raises ConfigError for an unknown name, or a file that is missing or of no use.
    """
    base, _, path = name.partition(":")
    if base not in TASKS:
        raise ConfigError(f"unknown task {name!r}; use one of {', '.join(TASKS)}")
    task = TASKS[base]
    if task.reads_file != bool(path) and not task.hides_in_file:
        wanted = f"write {base}:FILE" if task.reads_file else f"write {base}"
        raise ConfigError(f"task {name!r} {'needs a' if task.reads_file else 'reads no'} file; {wanted}")
    return task, pathlib.Path(path).expanduser()


def number(name: str) -> int:
    """Returns a number that makes a task's draws differ from those of others with the same seed."""
    return list(TASKS).index(name.partition(":")[0])


def draw(name: str, request: Request) -> Sequence[Sample] | Sequence[Continuation]:
    """Draws the samples of a task.

    Args:
      name: name of the task, followed by ":FILE" if it reads one.
      request: what to draw.

    Raises:
      ConfigError: the name is unknown, or a sample does not fit in the requested length.
      TaskFileError: the file cannot be used.
    """
    task, path = find(name)
    if task.hides_in_file and ":" in name:
        request = dataclasses.replace(request, text=files.read_essays(path))
    return task.draw(dataclasses.replace(request, path=path))


__all__ = ["TASKS", "Continuation", "Request", "Sample", "Task", "draw", "find", "number"]
