"""Pictures of tables of scores: against the budget or the context, and over a long generation."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from experiments import plots
from experiments.plots import Row

_DRIFT = (
    ("nll", "loss under full attention, nats"), ("agreement", "agreement with full attention, share"),
    ("repeats", "4 tokens in a row seen before, share"),
)


def scores(rows: Sequence[Row]) -> Figure:
    """Plots a panel for each task, with 95 % intervals: scores against the budget if a method has several, else
    against the context, else a dot for each row."""
    of_task: dict[str, list[Row]] = {}
    for row in rows:
        of_task.setdefault(row["task"], []).append(row)
    several = len({row["context"] for row in rows}) > 1
    drawn = plots.spread(
        rows, ("budget", lambda row: _at(row["method"].partition("@")[0], row, several)),
        ("context", lambda row: row["method"]),
    )
    height = max(2.0, 1.1 + 0.22 * len(rows) / len(of_task)) if drawn is None else 3.2
    figure, panels = plots.panels(len(of_task), size=(5.2 if drawn is None else 4.2, height))
    for axes, (task, mine) in zip(panels, of_task.items(), strict=True):
        y, title = _measure(mine)
        interval = "delta_nll_interval" if y == "delta_nll" else "interval"
        axes.set_title(task)
        if drawn is None:
            plots.dots(axes, mine, y, lambda row: _at(row["method"], row, several), interval)
            axes.set_xlabel(title)
            if y == "accuracy":
                axes.set_xlim(-0.03, 1.03)
            continue
        x, by = drawn
        plots.curves(axes, mine, x, y, by, interval)
        for row in mine if x == "budget" else ():
            if row["budget"] is None and y in row:
                plots.level(axes, row, y, by(row), interval)
        plots.steps(axes, [row[x] for row in mine if row[x] is not None])
        axes.set(xlabel={"budget": "budget, tokens", "context": "context, tokens"}[x], ylabel=title)
        if y == "accuracy":
            plots.shares(axes)
    return figure


def _at(name: str, row: Row, several: bool) -> str:
    """Returns a label that tells contexts apart if there are several."""
    return f"{name}, {plots.short(row['context'])}" if several else name


def _measure(rows: Sequence[Row]) -> tuple[str, str]:
    """Returns the field that a task's rows have, and its name on an axis."""
    if any("accuracy" in row for row in rows):
        return "accuracy", "share of right answers"
    if any("delta_nll" in row for row in rows):
        return "delta_nll", "ΔNLL over the full cache, nats per token"
    return "nll", "loss, nats per token"


def drift(rows: Sequence[Row]) -> Figure:
    """Plots likelihood, agreement and repeats of generated texts, window by window."""
    figure, panels = plots.panels(len(_DRIFT))
    looks = plots.styles(row["method"] for row in rows)
    for axes, (y, title) in zip(panels, _DRIFT, strict=True):
        plots.curves(axes, rows, "stop", y, looks=looks)
        plots.steps(axes, [row["stop"] for row in rows])
        axes.set(xlabel="generated tokens, to the end of a window", ylabel=title)
    return figure
