"""Rows of the leaderboard from the lines of its batches."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.board import evaluate, grid, report
from experiments.board.exams import Exams
from experiments.board.grid import Cell
from kvjax.eval import tasks
from kvjax.eval.tasks import Sample

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
    head = {**cell.head, "store": exams.config.store}
    if "refused" in lines[-1]:
        return head | {"refused": lines[-1]["refused"]}
    costs = together([line["cost"] for line in lines])
    if not tasks.find(cell.task)[0].continues:
        scores = [score for line in lines for score in line["scores"]]
        return {**head, **evaluate.accuracy(scores), "scores": scores, **costs, **_by_place(exams, cell, lines, scores)}
    losses, hits = ([of_text for line in lines for of_text in line[key]] for key in ("losses", "hits"))
    flat = list(itertools.chain(*hits))
    if not all(all(sample.scored) for sample in exams.drawn(*cell.exam)):
        return {**head, **evaluate.accuracy(flat), **costs}
    nll = float(np.mean(list(itertools.chain(*losses))))
    return {**head, "nll": nll, "perplexity": float(np.exp(nll)), "samples": len(flat),
            "nll_by_text": [float(np.mean(of_text)) for of_text in losses], **costs, **segments_of(lines)}


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


def together(runs: list[dict]) -> dict:
    """Returns the means over batches of their measurements."""
    return {key: report.mean(runs, key) for key in dict.fromkeys(key for one in runs for key in one)}
