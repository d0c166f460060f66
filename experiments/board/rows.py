"""Rows of the leaderboard from the lines of its batches."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.board import evaluate, grid
from experiments.board.exams import Exams
from experiments.board.grid import Cell
from kvjax.eval import tasks
from kvjax.eval.tasks import Sample, asking

Lines = Mapping[tuple, Sequence[dict]]  # by the key of their cell


def filed(lines: Sequence[dict]) -> Lines:
    """Returns the lines of each cell."""
    by_cell: dict[tuple, list[dict]] = {}
    for line in lines:
        by_cell.setdefault(grid.key_of(line), []).append(line)
    return by_cell


def row_of(exams: Exams, cell: Cell, lines: Lines) -> dict | None:
    """Returns the row of a cell; None as long as a batch is missing."""
    whole = _tiling(lines.get(cell.key, ()), len(exams.drawn(*cell.exam)))
    return None if whole is None else joined(exams, cell, whole)


def joined(exams: Exams, cell: Cell, lines: Sequence[dict]) -> dict:
    """Returns the row of a cell from the lines of all its batches."""
    head = {**cell.head, "store": exams.config.store, "drawn": list(cell.drawn)}
    if "refused" in lines[-1]:
        return head | {"refused": lines[-1]["refused"]}
    costs = together(lines)
    if not tasks.find(cell.task)[0].continues:
        scores = [score for line in lines for score in line["scores"]]
        return {**head, **_scored(scores, _texts(exams, cell)), **costs, **_by_place(exams, cell, lines, scores)}
    losses, hits = ([of_text for line in lines for of_text in line[key]] for key in ("losses", "hits"))
    if not all(all(sample.scored) for sample in exams.drawn(*cell.exam)):
        return {**head, **_scored([float(np.mean(of_text)) for of_text in hits], None), **costs}
    flat = list(itertools.chain(*hits))
    nll = float(np.mean(list(itertools.chain(*losses))))
    return {**head, "nll": nll, "perplexity": float(np.exp(nll)), "samples": len(flat),
            "nll_by_text": [float(np.mean(of_text)) for of_text in losses], **costs, **segments_of(lines)}


def _scored(scores: list[float], texts: list[int] | None) -> dict:
    """Returns scores, their mean and its interval; and the text of each sample where several share one."""
    of_texts = {} if texts is None else {"texts": texts}
    return {**evaluate.accuracy(scores, texts), "scores": scores, **of_texts}


def _texts(exams: Exams, cell: Cell) -> list[int] | None:
    """Returns the number of each sample's text; None if none is shared."""
    told = [asking.told(sample) for sample in exams.drawn(*cell.exam)]
    numbers = {text: i for i, text in enumerate(dict.fromkeys(told))}
    return None if len(numbers) == len(told) else [numbers[text] for text in told]


def _by_place(exams: Exams, cell: Cell, lines: Sequence[dict], scores: Sequence[float]) -> dict:
    """Returns what is known by place in a decoded text: scores, losses and recall; nothing for other tasks."""
    samples = exams.drawn(*cell.exam)
    if not any(isinstance(sample, Sample) and sample.decoded for sample in samples):
        return {}
    by_depth = [(sample.depth, score) for sample, score in zip(samples, scores, strict=True)]
    return {"by_depth": by_depth, **segments_of(lines)}


def _tiling(lines: Sequence[dict], count: int) -> list[dict] | None:
    """Returns lines whose spans are `count` samples together, each once and in order; None if there are none.

    Lines of batches that were cut otherwise may be among them.
    """
    ways: dict[int, list[dict]] = {0: []}  # lines up to a sample
    for line in sorted(lines, key=lambda line: tuple(line["span"])):
        start, stop = line["span"]
        if start in ways:
            ways.setdefault(stop, [*ways[start], line])
    return ways.get(count)


def segments_of(lines: Sequence[dict]) -> dict:
    """Returns the mean loss over all texts, and the recall, of each segment of a decoded text."""
    texts = [of_text for line in lines for of_text in line.get("nll_by_segment", ())]
    recalls = [line["recall_by_segment"] for line in lines if "recall_by_segment" in line]
    found = {"nll_by_segment": [float(np.nanmean(some)) for some in itertools.zip_longest(*texts, fillvalue=np.nan)]}
    return (found if texts else {}) | ({"recall_by_segment": recalls[0]} if recalls else {})


def together(lines: Sequence[dict]) -> dict:
    """Returns the means over batches of what they cost, each of them as often as it has decoded tokens."""
    keys = dict.fromkeys(key for line in lines for key in line["cost"])
    return {key: _weighted([(line["cost"][key], line["seconds"]["steps"] * line["seconds"]["sequences"])
                            for line in lines if line["cost"].get(key) is not None]) for key in keys}


def _weighted(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Returns the mean of values with their weights; None if there are none."""
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs) if pairs else None
