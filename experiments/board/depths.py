"""Share of right answers by depth of the fact in a context, from rows with `by_depth` = [(depth, score), ...]."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import plots

TENTHS = 10


def by_tenth(row: dict) -> list[float]:
    """Returns the share of right answers in each tenth of the context; NaN where nothing was asked. Depth 1 is in the
    last."""
    tenths: list[list[float]] = [[] for _ in range(TENTHS)]
    for depth, right in row["by_depth"]:
        tenths[min(TENTHS - 1, int(TENTHS * depth))].append(right)
    return [float(np.mean(some)) if some else float("nan") for some in tenths]


def heatmap(axes: Axes, rows: Sequence[dict], title: str, xlabel: str = "depth in the context, %") -> None:
    """Draws a line for each row, with the per cent of right answers in each tenth."""
    shares = [by_tenth(row) for row in rows]
    axes.imshow(shares, vmin=0, vmax=1, aspect="auto", cmap="cividis")
    for (line, tenth), share in np.ndenumerate(shares):
        if np.isfinite(share):
            color = "black" if share > 0.6 else "white"
            axes.text(tenth, line, f"{100 * share:.0f}", ha="center", va="center", fontsize=6.5, color=color)
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows], fontsize=7)
    axes.set_xticks([tenth - 0.5 for tenth in range(0, TENTHS + 1, 2)], [str(10 * n) for n in range(0, TENTHS + 1, 2)])
    axes.grid(visible=False)
    axes.set(title=f"{title}, %", xlabel=xlabel)


def _name(row: dict) -> str:
    """Returns method and context; and the budget unless the method's name has it."""
    budget = "" if "@" in row["method"] or row.get("budget") is None else f"@{row['budget']}"
    return f"{row['method']}{budget} {row['context']}"


def figure(rows: Sequence[dict], title: str, xlabel: str = "depth in the context, %") -> Figure:
    """Returns the heat map as a figure of its own."""
    heat_map, (axes,) = plots.panels(1, size=(6.5, 1.0 + 0.25 * len(rows)))
    heatmap(axes, rows, title, xlabel)
    return heat_map
