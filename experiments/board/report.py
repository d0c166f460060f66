"""Leaderboard as one HTML file without outside resources: plots as SVG, and tables that sort on a click."""

import html
import io
import json
from collections.abc import Iterable
from typing import Any

from matplotlib.figure import Figure

Row = dict[str, Any]
COLUMNS = (
    ("method", "method"), ("task", "task"), ("context", "context"), ("budget", "budget"), ("seed", "seed"),
    ("question", "question"),
    ("accuracy", "accuracy"), ("interval", "95 % interval"), ("delta_nll", "ΔNLL"),
    ("delta_nll_interval", "95 % interval"), ("recall", "recall@k"),
    ("attention_mass", "attention mass"), ("output_error", "error of the selection"), ("attended_tokens", "attended"),
    ("bytes_read_per_token", "bytes read/token"),
    ("reads_per_token", "reads/token"), ("hit_rate", "hit rate"), ("resident_bytes", "resident bytes"),
    ("select_ms", "ms to select"),
    ("refused", "refused"),
)
_NO_MEAN = ("method", "task", "context", "budget", "seed", "question", "interval", "delta_nll_interval", "refused")
_STYLE = """body{font:14px/1.4 system-ui,sans-serif;margin:2rem auto;max-width:80rem;padding:0 1rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.2rem .6rem;text-align:right}
td:first-child,th:first-child{text-align:left}th{cursor:pointer;border-bottom:2px solid #888;position:sticky;top:0;
background:#fff}tr:nth-child(even){background:#f4f4f4}svg{max-width:100%;height:auto}pre{overflow:auto}"""
_SORT = """for (const th of document.querySelectorAll('th')) th.onclick = () => {
  const body = th.closest('table').tBodies[0], i = th.cellIndex
  const sign = (th.dataset.up = th.dataset.up === '1' ? '-1' : '1') === '1' ? 1 : -1
  const value = row => { const text = row.cells[i].dataset.v; return text === '' || isNaN(text) ? text : +text }
  const order = (x, y) => x === '' ? 1 : y === '' ? -1 : sign * (x > y ? 1 : x < y ? -1 : 0)
  const rows = [...body.rows].sort((a, b) => order(value(a), value(b)))
  rows.forEach(row => body.append(row))
}"""


def mean(rows: Iterable[Row], key: str) -> float | None:
    """Returns the mean of a column over the rows that have it; None if none has."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


def page(title: str, header: Row, rows: list[Row]) -> str:
    """Returns the whole HTML file."""
    figures = "".join(map(_svg, _figures(summarise(rows))))
    parts = [
        f"<h1>{html.escape(title)}</h1>", figures, "<h2>Means over tasks, contexts and seeds</h2>",
        table(summarise(rows)), "<h2>All cells</h2>", table(rows), "<h2>Configuration</h2>",
        f"<pre>{html.escape(json.dumps(header, indent=1))}</pre>",
    ]
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
            f"<style>{_STYLE}</style><body>{''.join(parts)}<script>{_SORT}</script></body></html>")


def summarise(rows: list[Row]) -> list[Row]:
    """Returns one row per method, budget and position of the question."""
    keys = [key for key, _ in COLUMNS if key not in _NO_MEAN]
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["budget"], row.get("question")), []).append(row)
    return [{"method": method, "budget": budget, "question": question, **{key: mean(group, key) for key in keys}}
            for (method, budget, question), group in groups.items()]


def table(rows: list[Row]) -> str:
    """Returns an HTML table of the columns that any row has."""
    used = [(key, title) for key, title in COLUMNS if any(row.get(key) is not None for row in rows)]
    head = "".join(f"<th>{html.escape(title)}</th>" for _, title in used)
    body = "".join(f"<tr>{''.join(_cell(row.get(key)) for key, _ in used)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value) -> str:
    if value is None:
        return '<td data-v="">-</td>'
    if isinstance(value, (tuple, list)):
        return f'<td data-v="{value[0]}">{" .. ".join(f"{x:.3f}" for x in value)}</td>'
    text = html.escape(str(value))
    if isinstance(value, float):
        return f'<td data-v="{text}">{value:{",.0f" if abs(value) >= 100 else ".3f"}}</td>'
    return f'<td data-v="{text}">{text}</td>'


def pareto(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points (cost, gain) that no other beats in both, by cost."""
    front: list[tuple[float, float]] = []
    for cost, gain in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or gain > front[-1][1]:
            front.append((cost, gain))
    return front


def _figures(rows: list[Row]) -> list[Figure]:
    made = [
        _scatter(rows, "bytes_read_per_token", "KiB read per token"), _scatter(rows, "resident_bytes", "KiB resident"),
        _recall(rows),
    ]
    return [figure for figure in made if figure is not None]


def _scatter(rows: list[Row], cost: str, title: str) -> Figure | None:
    """Plots accuracy against a cost, a colour per method, and names the points on the Pareto front."""
    shown = [row for row in rows if row.get("accuracy") is not None and row.get(cost) is not None]
    if not shown:
        return None
    figure = Figure(figsize=(11, 5.5))
    axes = figure.subplots()
    front = pareto([(row[cost] / 1024, row["accuracy"]) for row in shown])
    axes.plot(*zip(*front, strict=True), color="black", linewidth=1, label="Pareto front")
    for method, style in _styles(shown).items():
        points = [(row[cost] / 1024, row["accuracy"], row["budget"]) for row in shown if row["method"] == method]
        axes.plot(*zip(*((x, y) for x, y, _ in points), strict=True), linestyle="", label=method, **style)
        for x, y, budget in points:
            if (x, y) in front:
                name = f"{method} {budget or ''}"
                axes.annotate(name, (x, y), fontsize=7, xytext=(4, -9), textcoords="offset points")
    axes.set(xlabel=title, ylabel="accuracy", xscale="symlog")
    return _with_legend(figure, axes)


def _styles(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Returns a marker and a colour for each method, all different for up to thirty."""
    methods = dict.fromkeys(row["method"] for row in rows)
    return {method: {"marker": "os^"[i // 10 % 3], "color": f"C{i % 10}"} for i, method in enumerate(methods)}


def _with_legend(figure: Figure, axes) -> Figure:
    """Returns the figure with its legend at the side, where it hides nothing."""
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    return figure


def _recall(rows: list[Row]) -> Figure | None:
    """Plots recall of the true top-k against the budget."""
    shown = [row for row in rows if row.get("recall") is not None and row["budget"]]
    if not shown:
        return None
    figure = Figure(figsize=(11, 5.5))
    axes = figure.subplots()
    for method, style in _styles(shown).items():
        line = sorted((row["budget"], row["recall"]) for row in shown if row["method"] == method)
        axes.plot(*zip(*line, strict=True), label=method, **style)
    axes.set(xlabel="budget, tokens", ylabel="recall of the true top-k")
    return _with_legend(figure, axes)


def _svg(figure: Figure) -> str:
    """Returns a figure as inline SVG."""
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]
