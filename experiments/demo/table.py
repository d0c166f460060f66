"""The table and the picture of the main job."""

import pathlib

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import common, plots
from experiments.demo.job import Job
from experiments.demo.memory_limit import MIB

COLUMNS = (
    ("method", "{:<26}"), ("right", "{:>6}"), ("tokens_per_s", "{:>9}"), ("wait_share", "{:>7}"),
    ("bytes_read_per_token", "{:>15}"), ("memory_bytes", "{:>10}"), ("slots", "{:>7}"), ("answers", "  {}"),
)
TITLES = ("method", "right", "tokens/s", "waits", "MiB read/token", "MiB held", "slots", "answers")


def show(row: dict) -> dict:
    """Returns a row as the table prints it."""
    return {
        **row, "bytes_read_per_token": f"{row['bytes_read_per_token'] / MIB:.2f}",
        "memory_bytes": f"{row['memory_bytes'] / MIB:.1f}",
        "tokens_per_s": _or_dash(row["tokens_per_s"], "{:.1f}"), "wait_share": _or_dash(row["wait_share"], "{:.0%}"),
        "slots": _or_dash(row["slots"], "{}"), "answers": " ".join(row["answers"].split()),
    }


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def reads_of(row: dict) -> str:
    """Names what the reads of a row came from, as times depend on it."""
    if "emulated" in row.get("disk", ""):
        return f"from an emulated device, {row['disk'].partition(' ')[0]}, which answers by a model of its speed"
    if common.check_store(row["store"])[0] != "flash":
        return "from memory"
    return ("from this machine's disk, past the page cache (O_DIRECT)" if row["direct"] else
            "through the page cache, as the file system refuses O_DIRECT, so that times are those of memory")


def title_of(rows: list[dict]) -> str:
    """Returns the sentence above table and picture."""
    limit, sizes = rows[0]["limit_bytes"], sorted({row["cache_bytes"] for row in rows})
    size = " to ".join(f"{size / MIB:.1f}" for size in (sizes[:1] + sizes[-1:] if len(sizes) > 1 else sizes))
    return (f"{rows[0]['context']:,} tokens, {size} MiB of keys and values on flash; "
            + (f"limit {limit / MIB:.1f} MiB of memory" if limit else "no limit of memory"))


def print_head(job: Job, row: dict) -> None:
    """Prints what the table is about."""
    print(f"\n{title_of([row])}\nreads are {reads_of(row)}; \"waits\" is their share of the time\n"
          f"answers expected: {' | '.join(answer or '?' for answer in job.answers)}\n")
    print("".join(form.format(title) for (_, form), title in zip(COLUMNS, TITLES, strict=True)))


def plot(rows: list[dict], path: pathlib.Path) -> None:
    """Draws speed, bytes read and memory of each method as bars, one colour a method."""
    figure = Figure(figsize=(8.2, 1.2 + 0.42 * len(rows)), layout="constrained")
    figure.suptitle(title_of(rows), fontsize=10)
    panels = figure.subplots(1, 3, sharey=True)
    values = (
        ("tokens a second", [row["tokens_per_s"] or 0.0 for row in rows], "{:,.0f}"),
        ("MiB read from flash a token", [row["bytes_read_per_token"] / MIB for row in rows], "{:,.2f}"),
        ("MiB of memory held, at most", [row["memory_bytes"] / MIB for row in rows], "{:,.1f}"),
    )
    marks = {"all keys and values": max(row["cache_bytes"] for row in rows) / MIB,
             "limit": rows[0]["limit_bytes"] / MIB}
    for axes, (title, numbers, form) in zip(panels, values, strict=True):
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right"]].set_visible(False)
        most = max(numbers + (list(marks.values()) if axes is panels[2] else [])) or 1.0
        axes.set_xlim(0, 1.2 * most)
        _bars(axes, [row["name"] for row in rows], numbers, form, 0.3 * most)
    names = [row["method"] if row["accuracy"] is None else f"{row['method']}\n{row['right']} right" for row in rows]
    panels[0].set_yticks(range(len(rows)), names)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    for name, place in marks.items():
        if place:
            panels[2].axvline(place, color="black", linewidth=1, linestyle="--" if name == "limit" else ":")
            panels[2].annotate(name, (place, len(rows) - 0.55), xytext=(2, 0), textcoords="offset points",
                               rotation=90, ha="left", va="bottom", fontsize=8)
    figure.savefig(path, dpi=200)


def _bars(axes: Axes, names: list[str], numbers: list[float], form: str, wide: float) -> None:
    """Draws a bar for each number, and the number in it, or beside a bar that is shorter than `wide`."""
    colors = plots.styles(names)
    for place, (name, number) in enumerate(zip(names, numbers, strict=True)):
        again = name in names[:place]  # the same method with other settings
        axes.barh(place, number, color=colors[name]["color"], height=0.66, alpha=0.55 if again else 1.0)
        inside = number >= wide
        axes.annotate(form.format(number), (number, place), xytext=(-3 if inside else 3, 0), fontsize=8, va="center",
                      textcoords="offset points", ha="right" if inside else "left",
                      color="white" if inside and not again else "black")
