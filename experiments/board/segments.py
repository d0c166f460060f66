"""Segments of a decoded text: the mean loss and the recall of each."""

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from kvjax.eval.metrics import Probe
from kvjax.inference.decode import Step
from kvjax.inference.generate import Observer

SEGMENT = 512  # tokens whose loss and recall are one figure


class Segments:
    """Observer that gives a probe its steps, and keeps the recall of each segment of the first ones.

    Args:
      probe: the probe, if any.
      steps: steps that are divided into segments; later ones, as of a question, are not.
    """

    def __init__(self, probe: Probe | None, steps: int):
        self.probe, self.steps, self.done, self.cuts = probe, steps, 0, [0]

    @property
    def observer(self) -> Observer | None:
        """The observer to give a run; None without a probe."""
        return None if self.probe is None else functools.partial(self._see, self.probe)

    def _see(self, probe: Probe, step: Step, tokens: np.ndarray) -> None:
        probe(step, tokens)
        self.done += 1
        if self.done <= self.steps and (self.done % SEGMENT == 0 or self.done == self.steps):
            self.cuts.append(len(probe.recalls))

    @property
    def means(self) -> dict:
        """The mean recall of each segment, if there is a probe."""
        if self.probe is None:
            return {}
        recalls = [self.probe.recalls[start:stop] for start, stop in itertools.pairwise(self.cuts)]
        return {"recall_by_segment": [float(np.mean(some)) if some else None for some in recalls]}


def segment_means(losses: Sequence[float]) -> list[float]:
    """Returns the mean of each `SEGMENT` numbers; the last ones may be fewer."""
    return [float(np.mean(losses[i : i + SEGMENT])) for i in range(0, len(losses), SEGMENT)]
