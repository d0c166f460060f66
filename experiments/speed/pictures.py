"""Pictures of timed runs: a token's time, or tokens per second, against what was varied."""

import re
from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure

from experiments import plots
from experiments.plots import Row

_OUTPUTS = re.compile(r"(\w+)_(\d+)_s")  # seconds of so many tokens, in `throughput._times`


def throughput(rows: Sequence[Row]) -> Figure:
    """Plots a panel for each model and store, and one of the seconds of many tokens if they were measured.

    Lines go over contexts, batches or budgets, whichever varies first, and dots stand for rows where nothing does.
    Dotted lines are the limit that the memory's bandwidth sets.
    """
    rows = [{**row, "ms": 1e3 * row["batch"] / row["tokens_per_s"]} for row in rows]
    groups = list(dict.fromkeys((row["model"], row["store"]) for row in rows))
    outputs = list(_outputs(rows))
    batches = len({row["batch"] for row in rows}) > 1
    drawn = plots.spread(
        rows, ("context", lambda row: _name(row, row["method"], batches)),
        ("context", lambda row: _name(row, _family(row), batches)), ("batch", lambda row: row["method"]),
        ("budget", _family),
    )
    most = max(sum((row["model"], row["store"]) == group for row in rows) for group in groups)
    height = 3.2 if drawn else max(2.0, 1.1 + 0.22 * most)
    figure, panels = plots.panels(len(groups) + bool(outputs), size=(4.2 if drawn else 5.2, height))
    for axes, group in zip(panels, groups, strict=False):
        mine = [row for row in rows if (row["model"], row["store"]) == group]
        axes.set_title(", ".join(group))
        if drawn is None:
            plots.dots(axes, mine, "ms", lambda row: _name(row, row["method"], batches))
            axes.set_xlabel("ms per token")
            axes.set_xlim(0, 1.08 * max(row["ms"] for row in mine))
            continue
        x, by = drawn
        looks = plots.styles(map(by, rows))
        plots.logarithmic(axes)
        plots.curves(axes, mine, x, "tokens_per_s" if x == "batch" else "ms", by, looks=looks)
        if x == "context":
            limits = {name: {**look, "linestyle": ":", "marker": ""} for name, look in looks.items()}
            plots.curves(axes, mine, x, "limit_ms", by, looks=limits)
        plots.steps(axes, [row[x] for row in mine if row[x] is not None])
        axes.set(xlabel={"context": "context, tokens", "batch": "sequences", "budget": "budget, tokens"}[x],
                 ylabel="tokens per second" if x == "batch" else "ms per token")
    if drawn is not None and drawn[0] == "context":
        panels[0].plot([], [], color="#808080", linestyle=":", label="limit of the memory's bandwidth")
    if outputs:
        plots.curves(panels[-1], outputs, "tokens", "seconds", "label")
        plots.steps(panels[-1], [row["tokens"] for row in outputs])
        panels[-1].set(title="many tokens", xlabel="decoded tokens", ylabel="seconds")
        plots.logarithmic(panels[-1])
    return figure


def _family(row: Row) -> str:
    return row["method"].partition("@")[0]


def _name(row: Row, name: str, batches: bool) -> str:
    return f"{name}, batch {row['batch']}" if batches else name


def _outputs(rows: Sequence[Row]) -> Iterator[Row]:
    """Yields a row for each number of tokens whose seconds were measured."""
    for row in rows:
        for match in filter(None, map(_OUTPUTS.fullmatch, row)):
            yield {"label": f"{row['method']}, {row['store']}, {match[1]}", "tokens": int(match[2]),
                   "seconds": row[match[0]]}
