"""How good a selection is, measured against exact attention over all keys (NumPy, on the host)."""

import dataclasses

import numpy as np

from kvjax.decode import Step
from kvjax.llm import Cache


@dataclasses.dataclass(frozen=True)
class Quality:
    """Means over layers, steps, sequences and query heads."""

    recall: float
    attention_mass: float


class Probe:
    """Follows a generation (as its `observer`) and measures every step's selection.

    Recall@k: share of the true top-k keys (by q . k after position, per query head) that were
    attended, sinks and window excluded from both sets; steps with fewer than k candidates are left
    out. Attention mass: softmax mass of full attention on the attended tokens.
    """

    def __init__(self, cache: Cache, k: int = 16):
        if not cache.keys:
            raise ValueError("the cache has no keys to measure against; prefill with keep_keys=True")
        self.plan, self.k = cache.plan, k
        self.length = np.asarray(cache.state.length).copy()
        room = cache.plan.capacity - cache.keys[0].shape[1]
        self.keys = [np.pad(keys, ((0, 0), (0, max(0, room)), (0, 0), (0, 0))) for keys in cache.keys]
        self.recalls: list[float] = []
        self.masses: list[float] = []

    def __call__(self, step: Step, tokens: np.ndarray) -> None:
        after = np.asarray(step.state.length)
        for row in np.flatnonzero(after > self.length):
            for keys, plan, report in zip(self.keys, self.plan.layers, step.reports, strict=True):
                keys[row, self.length[row]] = np.asarray(report.key)[row]
                self._measure(keys[row, : after[row]], plan, np.asarray(report.q)[row], report, row)
        self.length = after.copy()

    def _measure(self, keys, plan, q, report, row):
        spec, at = plan.spec, len(keys) - 1
        scores = np.einsum("kgd,tkd->kgt", q, keys) / np.sqrt(q.shape[-1])
        attended = self._attended(plan, np.asarray(report.selected)[row], at)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        self.masses.append(float(np.mean((weight * attended[:, None]).sum(-1) / weight.sum(-1))))
        candidates = slice(spec.sinks, max(spec.sinks, at + 1 - spec.window))
        if scores[..., candidates].shape[-1] >= self.k:
            top = np.argpartition(-scores[..., candidates], self.k - 1, axis=-1)[..., : self.k] + spec.sinks
            hit = np.take_along_axis(np.broadcast_to(attended[:, None], scores.shape), top, axis=-1)
            self.recalls.append(float(hit.mean()))

    @staticmethod
    def _attended(plan, selected, at):
        """Attended tokens as a mask `[K, at + 1]`."""
        spec = plan.spec
        mask = np.full((spec.kv_heads, at + 1), plan.method.attends_all)
        mask[:, : spec.sinks] = True
        mask[:, max(0, at + 1 - spec.window) :] = True
        for head in range(spec.kv_heads):
            mask[head, selected[head][selected[head] >= 0]] = True
        return mask

    @property
    def quality(self) -> Quality:
        recall = float(np.mean(self.recalls)) if self.recalls else float("nan")
        return Quality(recall, float(np.mean(self.masses)))
