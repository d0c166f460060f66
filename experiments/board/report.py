"""Leaderboard as one HTML file without outside resources: plots as SVG, bars for each task, and tables that sort."""

import html
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import plots
from experiments.plots import Row
from kvjax.eval.intervals import of_mean, wilson

COLUMNS = (
    ("method", "method"), ("task", "task"), ("context", "context"), ("budget", "budget"), ("seed", "seed"),
    ("question", "question"),
    ("accuracy", "accuracy"), ("interval", "95 % interval"), ("delta_accuracy", "Δ accuracy"),
    ("delta_accuracy_interval", "95 % interval of Δ accuracy"), ("delta_nll", "ΔNLL"),
    ("delta_nll_interval", "95 % interval of ΔNLL"), ("recall", "recall@k"),
    ("attention_mass", "attention mass"), ("output_error", "error of the selection"), ("attended_tokens", "attended"),
    ("bytes_read_per_token", "KiB read/token"),
    ("reads_per_token", "reads/token"), ("hit_rate", "hit rate"), ("resident_bytes", "KiB resident"),
    ("host_bytes", "KiB in host memory"), ("flash_bytes", "KiB on flash"),
    ("select_ms", "ms to select"),
    ("refused", "refused"),
)
_MEANINGS = {
    "budget": "tokens whose keys and values enter the attention of one KV head at one step; - = all of them",
    "question": "after the prompt, token by token, or within it",
    "accuracy": "mean score of the answers, each cell counting alike; the interval is Wilson's",
    "delta_accuracy": "over that of the full cache on the same samples; the interval is a paired bootstrap's, and "
                      "Student's over texts where several questions share one",
    "delta_nll": "loss of held-out text over that of the full cache, nats per token; less is better",
    "recall": "share of the k keys with the largest products that were attended",
    "attention_mass": "share of exact attention's weight on what was attended",
    "output_error": "relative error of exact attention over what was attended",
    "attended_tokens": "tokens that were attended, mean over single tokens and heads",
    "bytes_read_per_token": "read from the store by one sequence, the first load included",
    "reads_per_token": "requests to the store",
    "hit_rate": "share of needed blocks that were in memory",
    "resident_bytes": "the device's memory of one sequence's cache: index, tables, slots, blocks without a store",
    "host_bytes": "host memory of one sequence's cache: a store's blocks, if they are there, its tables and buffers",
    "flash_bytes": "one sequence's blocks in a store's file",
    "select_ms": "in which one layer selects its blocks, for a batch",
    "refused": "why a method cannot run with this budget",
}
_IN_KIB = ("bytes_read_per_token", "resident_bytes", "host_bytes", "flash_bytes")
_FORMS = {"attended_tokens": ",.0f", "reads_per_token": ",.1f"}
_BEST: dict[str, Callable] = {
    "accuracy": max, "delta_nll": min, "recall": max, "attention_mass": max, "output_error": min,
    "bytes_read_per_token": min, "resident_bytes": min, "select_ms": min,
}
_NO_MEAN = ("method", "task", "context", "budget", "seed", "question", "interval", "delta_accuracy_interval",
            "delta_nll_interval", "refused")
_SIGNS = dict(zip(plots.MARKERS, "●■▲◆▼✚✖◀", strict=True))
_WIDE, _NARROW = (11.0, 5.6), (4.4, 5.0)  # inches of a plot; a style sheet shows one of the two
_STYLE = """:root{color-scheme:light dark;--page:#fff;--ink:#1b1f24;--soft:#59636e;--line:#d5dae0;--band:#f5f7f9}
@media(prefers-color-scheme:dark){:root{--page:#14171b;--ink:#e4e8ec;--soft:#9aa4af;--line:#343b44;--band:#1c2127}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:0 auto;max-width:84rem;
padding:1rem}
h1{font-size:1.7rem;margin:.5rem 0}h2{font-size:1.2rem;margin:2rem 0 .5rem}h3{font-size:1rem;margin:.3rem 0}
p,dd{margin:.3rem 0;max-width:70ch}.soft,dd,figcaption{color:var(--soft)}figure{margin:1rem 0}
svg{display:block;width:100%;max-width:62rem;height:auto}svg text{fill:currentColor}.narrow{display:none}
@media(max-width:700px){.wide{display:none}.narrow{display:block}}
.scroll{overflow:auto;max-height:85vh;border:1px solid var(--line);border-radius:4px}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .6rem;text-align:right;white-space:nowrap;font-weight:normal}
td.best{font-weight:bold}.long{white-space:normal;min-width:16rem;text-align:left}
thead th{position:sticky;top:0;background:var(--page);border-bottom:2px solid var(--soft);padding:0;z-index:1}
thead button{font:inherit;font-weight:bold;color:inherit;background:none;border:0;padding:.4rem .6rem;width:100%;
text-align:inherit;cursor:pointer}
th[aria-sort=ascending] button::after{content:" ↑"}th[aria-sort=descending] button::after{content:" ↓"}
th:first-child{text-align:left;position:sticky;left:0;background:inherit}
thead th:first-child{z-index:2;background:var(--page)}tbody tr{background:var(--page)}
tbody tr:nth-child(even){background:var(--band)}
.tasks{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(20rem,100%),1fr));gap:1rem 2rem}
.bars{list-style:none;margin:0;padding:0;font-size:.85rem}
.bars li{display:grid;grid-template-columns:8.5rem 1fr 3.6rem;gap:.5rem;align-items:center;line-height:1.45}
.bars span{overflow-wrap:anywhere}.bars output{text-align:right;font-variant-numeric:tabular-nums}
.bar{position:relative;height:.75rem;background:var(--band);overflow:hidden}.bar i{position:absolute;top:0;bottom:0}
.bar .whisker{top:42%;bottom:42%;background:var(--ink);opacity:.75}
summary{cursor:pointer;padding:.3rem 0}summary h2,summary h3{display:inline}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.8rem}dt{font-weight:bold;margin-top:.4rem}dd{margin-left:0}"""
_SORT = """for (const button of document.querySelectorAll('thead button')) button.onclick = () => {
  const th = button.parentElement, table = th.closest('table'), body = table.tBodies[0], i = th.cellIndex
  const up = th.getAttribute('aria-sort') !== 'ascending', sign = up ? 1 : -1
  for (const other of table.tHead.rows[0].cells) other.removeAttribute('aria-sort')
  th.setAttribute('aria-sort', up ? 'ascending' : 'descending')
  const value = row => { const text = row.cells[i].dataset.v; return text === '' || isNaN(text) ? text : +text }
  const order = (x, y) => x === '' ? (y === '' ? 0 : 1) : y === '' ? -1 :
    typeof x === typeof y ? sign * (x > y ? 1 : x < y ? -1 : 0) : typeof x === 'number' ? -1 : 1
  const rows = [...body.rows].sort((a, b) => order(value(a), value(b)))
  rows.forEach(row => body.append(row))
}"""


def mean(rows: Iterable[Row], key: str) -> float | None:
    """Returns the mean of a column over the rows that have it; None if none has."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


def page(title: str, header: Row, rows: list[Row]) -> str:
    """Returns the whole HTML file."""
    means = summarise(rows)
    looks = plots.styles(row["method"] for row in rows)
    sections = (
        f"<header><h1>{html.escape(title)}</h1>{_about(header, rows)}</header><main>",
        _pictures(means, looks), _tasks(rows, looks),
        "<h2>Means over tasks, contexts and seeds</h2><p class='soft'>A click on a title sorts; the best figure of a "
        f"column is bold.</p>{table(means, 'means', looks)}", _glossary(means),
        f"<details><summary><h2>All cells</h2></summary>{table(rows, 'all cells', looks)}</details>",
        "<details><summary><h2>Configuration</h2></summary>"
        f"<pre>{html.escape(json.dumps(header, indent=1))}</pre></details></main>",
    )
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<style>{_STYLE}</style></head><body>{''.join(sections)}<script>{_SORT}</script></body></html>")


def _about(header: Row, rows: list[Row]) -> str:
    """Returns a line that says what was measured, and one that says where."""
    def some(key: str) -> list:
        return list(dict.fromkeys(row[key] for row in rows if row.get(key) is not None))

    config = header.get("config", {})
    parts = [f"{len(some('method'))} methods", f"tasks: {', '.join(map(str, some('task')))}",
             f"contexts of {', '.join(f'{length:,}' for length in some('context'))} tokens",
             f"budgets: {', '.join(map(str, some('budget'))) or 'all tokens'}",
             f"model: {config.get('model') or 'the reference model'}", f"store: {', '.join(some('store')) or '-'}"]
    where = [str(header[key]) for key in ("processor", "device", "commit") if header.get(key)]
    return (f"<p>{html.escape('; '.join(parts))}.</p>"
            + (f"<p class='soft'>Measured on {html.escape(', '.join(where))}.</p>" if where else ""))


def comparable(rows: Sequence[Row]) -> list[list[Row]]:
    """Returns the rows in groups, in each of which means of methods are over the same samples.

    They have one length and one position of the question, and the same methods and budgets took each task.
    """
    takers: dict[tuple, set[tuple]] = {}
    for row in rows:
        takers.setdefault(same_samples(row), set()).add((row["method"], row["budget"]))
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        key = row["context"], row.get("question"), frozenset(takers[same_samples(row)])
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Returns one row per method and budget, from rows that are `comparable`: means over cells, each of which counts
    alike."""
    keys = [key for key, _ in COLUMNS if key not in _NO_MEAN]
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["budget"]), []).append(row)
    return [{"method": method, "budget": budget, **{key: mean(group, key) for key in keys},
             "interval": _together(group), "delta_accuracy_interval": _beside(group)}
            for (method, budget), group in groups.items()]


def same_samples(row: Row) -> tuple:
    """Returns what cells of the same samples have in common."""
    return row["task"], row["context"], row["seed"], row.get("question"), tuple(row.get("drawn", ()))


def _beside(group: Sequence[Row]) -> tuple[float, float] | None:
    """Returns the interval of the mean difference of several cells to the full cache; None if there are none."""
    known = [row for row in group if row.get("delta_accuracy_interval") is not None]
    return of_mean([row["delta_accuracy"] for row in known],
                   [row["delta_accuracy_interval"] for row in known]) if known else None


def _together(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Returns Wilson's interval of the mean of several cells; None if the numbers of their samples are not known.

    It is that of as many samples as would give such a mean the same variance, were all cells' shares equal.
    """
    asked = [row for row in rows if row.get("accuracy") is not None]
    counts = [row.get("independent_samples", row.get("samples", 0)) for row in asked]
    if not counts or not all(counts):
        return None
    return wilson(sum(row["accuracy"] for row in asked) / len(asked),
                  len(asked) ** 2 / sum(1 / count for count in counts))


# ----------------------------------------------------------------------------------------- tables


def table(rows: list[Row], name: str, looks: dict[str, dict[str, str]]) -> str:
    """Returns an HTML table of the columns that any row has, in a region of its own that scrolls."""
    used = [(key, title) for key, title in COLUMNS if any(row.get(key) is not None for row in rows)]
    best = {key: choose(values) for key, choose in _BEST.items()
            if (values := [row[key] for row in rows if row.get(key) is not None and row["budget"] is not None])}
    head = "".join(f'<th scope="col"><button type="button">{html.escape(title)}</button></th>' for _, title in used)
    body = "".join(f"<tr>{''.join(_cell(key, row, best, looks) for key, _ in used)}</tr>" for row in rows)
    return (f'<div class="scroll" role="region" tabindex="0" aria-label="{html.escape(name)}">'
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>")


def _cell(key: str, row: Row, best: dict[str, float], looks: dict[str, dict[str, str]]) -> str:
    value = row.get(key)
    if key == "method":
        text = html.escape(str(value))
        return f'<th scope="row" data-v="{text}">{_sign(looks[str(value)])} {text}</th>'
    if value is None:
        return '<td data-v="">-</td>'
    if isinstance(value, (tuple, list)):
        return f'<td data-v="{value[0]}">{" .. ".join(f"{x:.3f}" for x in value)}</td>'
    text = html.escape(str(value))
    kind = ' class="long"' if key == "refused" else ' class="best"' if value == best.get(key) else ""
    shown = f"{value / 1024:,.0f}" if key in _IN_KIB else f"{value:{_FORMS.get(key, '.3f')}}" if isinstance(
        value, float) else text
    return f'<td{kind} data-v="{text}">{shown}</td>'


def _sign(look: dict[str, str]) -> str:
    """Returns the colour and the marker that a method has in the plots."""
    return f'<span aria-hidden="true" style="color:{look["color"]}">{_SIGNS[look["marker"]]}</span>'


def _glossary(rows: list[Row]) -> str:
    used = [(_MEANINGS[key], title) for key, title in COLUMNS
            if key in _MEANINGS and any(row.get(key) is not None for row in rows)]
    entries = "".join(f"<dt>{html.escape(title)}</dt><dd>{html.escape(meaning)}</dd>" for meaning, title in used)
    return f"<details><summary>What the columns mean</summary><dl>{entries}</dl></details>"


# ------------------------------------------------------------------------------------------- bars


def _tasks(rows: list[Row], looks: dict[str, dict[str, str]]) -> str:
    """Returns, for each budget, bars of every task beside those of the methods without a budget."""
    budgets = sorted({row["budget"] for row in rows if row["budget"] is not None}) or [None]
    counts = {budget: len({row["method"] for row in rows if row["budget"] == budget and "refused" not in row})
              for budget in budgets}
    first = max(budgets, key=lambda budget: counts[budget])
    parts = []
    for budget in budgets:
        mine = [row for row in rows if row["budget"] in (None, budget)]
        cards = "".join(_bars(task, [row for row in mine if row["task"] == task], looks)
                        for task in dict.fromkeys(row["task"] for row in mine))
        name = "all tokens" if budget is None else f"budget {budget}"
        parts.append(f"<details{' open' if budget == first else ''}><summary><h3>{name}</h3></summary>"
                     f'<div class="tasks">{cards}</div></details>')
    return f"<h2>Tasks</h2><p class='soft'>Thin lines are 95 % intervals.</p>{''.join(parts)}"


def _bars(task: str, rows: list[Row], looks: dict[str, dict[str, str]]) -> str:
    """Returns the bars of one task, the best first: means over contexts and seeds."""
    of_method: dict[str, list[Row]] = {}
    for row in rows:
        of_method.setdefault(row["method"], []).append(row)
    key = "accuracy" if any("accuracy" in row for row in rows) else "delta_nll"
    bars = [(method, value, _around(group, key)) for method, group in of_method.items()
            if (value := mean(group, key)) is not None]
    if not bars:
        return ""
    ends = [end for _, value, around in bars for end in (value, *(around or ()))]
    low, high = (0.0, 1.0) if key == "accuracy" else (min(0.0, *ends), max(1e-9, *ends))
    bars.sort(key=lambda bar: bar[1], reverse=key == "accuracy")
    lines = "".join(_bar(method, value, around, looks[method], low, high) for method, value, around in bars)
    unit = "share of right answers" if key == "accuracy" else "ΔNLL, nats per token; less is better"
    return f'<section><h3>{html.escape(task)}</h3><p class="soft">{unit}</p><ul class="bars">{lines}</ul></section>'


def _around(rows: Sequence[Row], key: str) -> tuple[float, float] | None:
    """Returns the interval of a bar; of several losses none is known."""
    if key == "accuracy":
        return _together(rows)
    return rows[0].get("delta_nll_interval") if len(rows) == 1 else None


def _bar(name: str, value: float, around: Sequence[float] | None, look: dict[str, str], low: float, high: float) -> str:
    def span(start: float, end: float) -> str:
        left, right = (100 * (edge - low) / (high - low) for edge in (min(start, end), max(start, end)))
        return f"left:{left:.2f}%;width:{right - left:.2f}%"

    whisker = f'<i class="whisker" style="{span(*around)}"></i>' if around is not None else ""
    text = f"{value:.3f}" if low < 0 or high != 1 else f"{100 * value:.0f} %"
    return (f"<li><span>{html.escape(name)}</span><div class='bar' aria-hidden='true'>"
            f'<i style="background:{look["color"]};{span(0.0, value)}"></i>{whisker}</div><output>{text}</output></li>')


# ------------------------------------------------------------------------------------------ plots


def pareto(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points (cost, gain) that no other beats in both, by cost."""
    front: list[tuple[float, float]] = []
    for cost, gain in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or gain > front[-1][1]:
            front.append((cost, gain))
    return front


def _pictures(rows: list[Row], looks: dict[str, dict[str, str]]) -> str:
    """Returns the plots, each for wide and for narrow pages."""
    made = (
        ("Accuracy against reading", "On the Pareto front, no other point has as much accuracy for less reading. "
         "Thin lines join the budgets of a method; bars are 95 % intervals.",
         lambda size: _scatter(rows, "bytes_read_per_token", "KiB read per token", looks, size)),
        ("Accuracy against memory", "The same, against what one sequence's cache keeps in memory.",
         lambda size: _scatter(rows, "resident_bytes", "KiB resident", looks, size)),
        ("Recall against the budget", "Share of the keys with the largest products that were attended.",
         lambda size: _recall(rows, looks, size)),
    )
    parts = []
    for title, caption, draw in made:
        wide, narrow = draw(_WIDE), draw(_NARROW)
        if wide is not None:
            parts.append(f"<h2>{title}</h2><figure><figcaption>{caption}</figcaption>"
                         f'<div class="wide">{_svg(wide, title)}</div>'
                         f'<div class="narrow">{_svg(narrow, f"{title}, narrow")}</div></figure>')
    return "".join(parts)


def _scatter(rows: list[Row], cost: str, title: str, looks: dict[str, dict[str, str]],
             size: tuple[float, float]) -> Figure | None:
    """Plots accuracy against a cost: a line for each method, the Pareto front, and a name for each method and for each
    point on the front."""
    shown = [row for row in rows if row.get("accuracy") is not None and row.get(cost) is not None]
    if not shown:
        return None
    figure, (axes,) = plots.panels(1, size=size)
    at = {id(row): (row[cost] / 1024, row["accuracy"]) for row in shown}
    front = pareto(list(at.values()))
    stairs = _stairs(front, 2 * max(x for x, _ in at.values()) + 1)
    axes.plot(*zip(*stairs, strict=True), color="black", linewidth=1.2, label="Pareto front", zorder=1.5)
    for method, look in looks.items():
        line = sorted((row for row in shown if row["method"] == method), key=lambda row: row["budget"] or 0)
        if line:
            axes.plot(*zip(*(at[id(row)] for row in line), strict=True), label=method, markersize=6,
                      **{**look, "linewidth": 0.7})
    best = [row for row in shown if at[id(row)] in front]
    known = [row for row in best if row["interval"]]
    for row in known:
        plots.bars(axes, *([value] for value in (*at[id(row)], *row["interval"])), looks[row["method"]]["color"])
    plots.decades(axes, [x for x, _ in at.values()])
    axes.set(xlabel=title, ylabel="accuracy", ylim=(-0.04, 1.06))
    plots.legend(figure)
    _name(axes, best, [row for row in shown if row not in best], at, looks, stairs)
    return figure


def _stairs(front: list[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    """Returns the corners of the line below which points are beaten, from the cheapest one to the cost `end`."""
    corners = front[:1]
    for cost, gain in front[1:]:
        corners += [(cost, corners[-1][1]), (cost, gain)]
    return [*corners, (end, corners[-1][1])]


def _name(axes: Axes, best: list[Row], others: list[Row], at: dict[int, tuple[float, float]],
          looks: dict[str, dict[str, str]], stairs: list[tuple[float, float]]) -> None:
    """Names the points on the front, and one of each other method while there is room; the legend has all."""
    named = [(*at[id(row)], f"{row['method']} {row['budget'] or ''}".strip()) for row in best]
    for method in looks:
        mine = [row for row in others if row["method"] == method]
        if mine and method not in {row["method"] for row in best}:
            named.append((*at[id(max(mine, key=lambda row: at[id(row)][1]))], method))
    plots.name_points(axes, named, [at[id(row)] for row in others], stairs)


def _recall(rows: list[Row], looks: dict[str, dict[str, str]], size: tuple[float, float]) -> Figure | None:
    """Plots recall of the true top-k against the budget."""
    shown = [row for row in rows if row.get("recall") is not None and row["budget"]]
    if not shown:
        return None
    figure, (axes,) = plots.panels(1, size=size)
    plots.curves(axes, shown, "budget", "recall", looks=looks)
    plots.steps(axes, [row["budget"] for row in shown])
    plots.shares(axes)
    axes.set(xlabel="budget, tokens", ylabel="recall of the true top-k")
    plots.legend(figure)
    return figure


def _svg(figure: Figure, title: str) -> str:
    """Returns a figure as inline SVG without background, black parts in the colour of the page's text."""
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set_alpha(0.0)
    file = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(file, format="svg")
    text = file.getvalue()[file.getvalue().index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r' id="(?:figure|axes|patch|matplotlib|xtick|ytick|line2d|text|legend|LineCollection|\w+Collection)'
                  r'\.?[\w.]*_\d+"', "", text)
    text = re.sub(r' xmlns(?::xlink)?="[^"]*"', "", text).replace("#000000", "currentColor")
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
