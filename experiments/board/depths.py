"""Share of right answers by depth of the fact in a context, from rows with `by_depth` = [(depth, score), ...]."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

TENTHS = 10


def by_tenth(row: dict) -> list[float]:
    """Returns the share of right answers in each tenth of the context; NaN where nothing was asked. Depth 1 is in the
    last."""
    tenths: list[list[float]] = [[] for _ in range(TENTHS)]
    for depth, right in row["by_depth"]:
        tenths[min(TENTHS - 1, int(TENTHS * depth))].append(right)
    return [float(np.mean(some)) if some else float("nan") for some in tenths]


def heatmap(axes: Axes, rows: Sequence[dict], title: str) -> None:
    """Draws a line for each row."""
    axes.imshow([by_tenth(row) for row in rows], vmin=0, vmax=1, aspect="auto", cmap="RdYlGn")
    axes.set_yticks(range(len(rows)), [f"{row['method']} {row['context']}" for row in rows], fontsize=6)
    axes.set(title=title, xlabel="depth, tenths")


def figure(rows: Sequence[dict], title: str) -> Figure:
    """Returns the heat map as a figure of its own."""
    heat_map = Figure(figsize=(6, 1 + 0.25 * len(rows)), layout="constrained")
    heatmap(heat_map.subplots(), rows, title)
    return heat_map
