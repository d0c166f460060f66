"""Segments of a decoded text: whose steps are in which, and what the rest of a run adds to none."""

import types

import numpy as np

from experiments.board import rows, segments
from experiments.board.segments import SEGMENT, Segments


class Recalls(types.SimpleNamespace):
    """A probe that measures the numbers of its steps."""

    def __call__(self, step, tokens):
        self.recalls.append(step)


def test_each_segment_has_the_recall_of_its_own_steps():
    probe = Recalls(recalls=[])
    watched = Segments(probe, SEGMENT + 88)
    for step in range(2 * SEGMENT + 5):
        watched.observer(step, np.zeros(1))
    assert watched.means == {"recall_by_segment": [np.mean(range(SEGMENT)), np.mean(range(SEGMENT, SEGMENT + 88))]}
    assert len(probe.recalls) == 2 * SEGMENT + 5


def test_without_a_probe_there_is_nothing_to_observe():
    watched = Segments(None, 9)
    assert watched.observer is None and watched.means == {}


def test_losses_are_means_over_segments_and_then_over_texts():
    whole = segments.segment_means([1.0] * SEGMENT + [3.0, 5.0])
    assert whole == [1.0, 4.0]
    lines = [{"nll_by_segment": [whole, [2.0]], "recall_by_segment": [0.5, None]}, {"nll_by_segment": [[3.0, 6.0]]}]
    assert rows.segments_of(lines) == {"nll_by_segment": [2.0, 5.0], "recall_by_segment": [0.5, None]}
    assert rows.segments_of([{}]) == {}
