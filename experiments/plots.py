"""Shared look of all pictures: a colour and a marker for each method, intervals, labels that stay clear, and saving.

A figure has panels side by side and one legend below them, so that nothing is hidden. Colours are those of Okabe and
Ito (2008) without yellow, with grey and Tol's purple; labels of one colour differ in marker and line.
"""

import collections
import functools
import itertools
import pathlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy import stats

Row = dict[str, Any]
Key = str | Callable[[Row], Any]
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#808080", "#AA4499")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
LINES = ("-", "--", ":", "-.")
# Place n has colour n mod 8 and marker n div 8. A method keeps its place, and a new one comes last. The first eight are
# those most often seen together.
PLACES = (
    "dynakv", "quest", "kvswap", "icecache", "dynsplit", "oracle", "full", "streaming_llm",
    "random", "infinigen", "loki", "shadowkv", "pqcache", "arkvale", "h2o", "magicpig",
    "rle", "clusterkv", "infllm", "omnikv", "sentencekv", "snapkv", "chunkkv",
)
_DPI = 120
_PANEL = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
          "axes.titlesize": 10, "axes.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8}


# ------------------------------------------------------------------------------------------ styles


def method_of(label: str) -> str | None:
    """Returns the method with which a label begins, such as "kvswap" for "kvswap, 4 bits"; None if there is none."""
    starts = (name for name in PLACES if label.startswith(name) and not label[len(name) :][:1].isalnum())
    return max(starts, key=len, default=None)


def styles(labels: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns colour, marker and line of each label of a figure, all different for up to eight labels of a colour.

    A method has the same style in every figure; its variants share its colour. Other labels take colours that no label
    before them has, the first one tried being told by their text.
    """
    labels, chosen = list(dict.fromkeys(labels)), {}
    of_color: collections.Counter[str] = collections.Counter()
    for label in sorted(labels, key=lambda label: (method_of(label) is None, method_of(label) != label)):
        place = PLACES.index(name) if (name := method_of(label)) else _free_place(label, of_color)
        color = COLORS[place % len(COLORS)]
        mine = [look for look in chosen.values() if look["color"] == color]
        own = {"color": color, **_DEFAULTS[name]} if name else None
        chosen[label] = own if own and own not in mine else _another(color, mine)
        of_color[color] += 1
    return {label: chosen[label] for label in labels}


_DEFAULTS = {name: {"marker": MARKERS[place // len(COLORS)], "linestyle": "-"} for place, name in enumerate(PLACES)}


def _free_place(label: str, of_color: collections.Counter[str]) -> int:
    """Returns the place of a colour that the fewest labels have, the first one from a place told by the text."""
    start = zlib.crc32(label.encode())
    return min(range(start, start + len(COLORS)), key=lambda place: of_color[COLORS[place % len(COLORS)]])


def _another(color: str, mine: Sequence[dict[str, str]]) -> dict[str, str]:
    """Returns a style with the first marker that no label of the colour has, and another line."""
    used = {look["marker"] for look in mine}
    free = [marker for marker in MARKERS if marker not in used]
    return {"color": color, "marker": (free or MARKERS)[0], "linestyle": LINES[len(mine) % len(LINES)]}


# ----------------------------------------------------------------------------------------- figures


def panels(count: int, columns: int = 3, size: tuple[float, float] = (4.2, 3.2)) -> tuple[Figure, list[Axes]]:
    """Returns a figure with `count` panels of `size` inches, at most `columns` side by side."""
    lines = -(-count // columns)
    columns = -(-count // lines)  # four panels are two by two
    figure = Figure(figsize=(max(5.0, size[0] * columns), size[1] * lines), layout="constrained")
    FigureCanvasAgg(figure)
    with mpl.rc_context(_PANEL):
        axes = [figure.add_subplot(lines, columns, i + 1) for i in range(count)]
    for panel in axes:
        panel.set_axisbelow(True)
    return figure, axes


def save(figure: Figure, path: pathlib.Path) -> None:
    """Writes a figure to a file, with one legend of all panels below them."""
    legend(figure)
    figure.savefig(path, dpi=_DPI)


def legend(figure: Figure) -> None:
    """Puts one legend of all panels below them, in as many columns as fit; a figure that has one keeps it."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not handles or figure.legends:
        return
    inches = 0.6 + 0.075 * max(map(len, handles))  # of a column: line, gap and text
    columns = max(1, min(len(handles), int(figure.get_figwidth() / inches)))
    lines = -(-len(handles) // columns)
    figure.set_figheight(figure.get_figheight() + 0.18 * lines)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def steps(axes: Axes, values: Iterable[float], name: str = "x") -> None:
    """Ticks an axis at the values that were measured, on a logarithmic scale if they are far apart."""
    ticks = sorted({float(value) for value in values})
    if not ticks:
        return
    axis = getattr(axes, f"{name}axis")
    wide = ticks[0] > 0 and ticks[-1] >= 6 * ticks[0]
    if wide:
        getattr(axes, f"set_{name}scale")("log", base=2)
    where = np.log2(ticks) if wide else np.asarray(ticks)
    apart, kept = 0.09 * max(float(np.ptp(where)), 1e-9), [len(ticks) - 1]
    for i in range(len(ticks) - 2, -1, -1):
        if where[kept[-1]] - where[i] >= apart:
            kept.append(i)
    axis.set_ticks([ticks[i] for i in kept], [short(ticks[i]) for i in kept])
    axis.set_minor_locator(mpl.ticker.NullLocator())


def logarithmic(axes: Axes) -> None:
    """Gives y a logarithmic scale with plain numbers; figures that are not positive are left out."""
    axes.set_yscale("log", nonpositive="mask")
    axes.yaxis.set_major_formatter(mpl.ticker.LogFormatter())
    axes.yaxis.set_minor_formatter(mpl.ticker.LogFormatter(minor_thresholds=(1.5, 0.4)))
    axes.tick_params(axis="y", which="minor", labelsize=7)


def decades(axes: Axes, values: Iterable[float]) -> None:
    """Gives x a logarithmic scale with ticks at 1, 2 and 5 times the powers of ten; zero has a place of its own."""
    values = sorted(values)
    least = min((value for value in values if value > 0), default=1.0)
    most = max(values[-1], least)
    powers = [10.0**power for power in range(int(np.floor(np.log10(least))), int(np.ceil(np.log10(most))) + 1)]
    ticks = [times * power for power in powers for times in (1, 2, 5) if 0.7 * least <= times * power <= 1.4 * most]
    if most > 200 * least:
        ticks = [tick for tick in ticks if tick in powers] or ticks
    if values[0] <= 0:
        axes.set_xscale("symlog", linthresh=least, linscale=0.3)
        ticks = [0.0, *ticks]
        axes.set_xlim(-0.15 * least, 1.4 * most)
    else:
        axes.set_xscale("log")
        axes.set_xlim(0.7 * least, 1.4 * most)
    axes.xaxis.set_ticks(ticks, [short(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(mpl.ticker.NullLocator())


def short(number: float) -> str:
    """Returns a number as a tick shows it; multiples of 1,024 from 4,096 on as 4K."""
    if number >= 4096 and number % 1024 == 0:
        return f"{number / 1024:g}K"
    return f"{number:,.0f}" if number == int(number) else f"{number:g}"


def shares(axes: Axes) -> None:
    """Gives an axis of shares the range from 0 to 1."""
    axes.set_ylim(-0.03, 1.03)


# ------------------------------------------------------------------------------------------ curves


def get(row: Row, key: Key) -> Any:
    """Returns a field of a row, None if it has none, or what a function makes of the row."""
    return key(row) if callable(key) else row.get(key)


def student(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns Student's 95 % interval of the mean; None for a single value."""
    if len(values) < 2:
        return None
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def curves(axes: Axes, rows: Iterable[Row], x: Key, y: Key, by: Key = "method", interval: Key | None = None,
           looks: dict[str, dict[str, str]] | None = None) -> None:
    """Draws y against x, a line for each label.

    Args:
      axes: the panel.
      rows: results; those without x or y are left out.
      x, y: a field, or a function of a row.
      by: the label of a row.
      interval: the (low, high) of y in a row that stands alone at its x. Several rows at one x are drawn as their
        mean, with Student's interval.
      looks: the style of each label (`styles`), if other panels have other labels.
    """
    lines: dict[str, dict[float, list[Row]]] = {}
    for row in rows:
        if get(row, x) is not None and get(row, y) is not None:
            lines.setdefault(str(get(row, by)), {}).setdefault(get(row, x), []).append(row)
    looks = looks or styles(lines)
    for label, at in lines.items():
        points = []
        for place, some in sorted(at.items()):
            values = [get(row, y) for row in some]
            own = get(some[0], interval) if interval is not None and len(some) == 1 else student(values)
            points.append((place, float(np.mean(values)), *(own or (np.nan, np.nan))))
        line(axes, label, *zip(*points, strict=True), looks[label])


def line(axes: Axes, label: str, x: Sequence[float], y: Sequence[float], low: Sequence[float], high: Sequence[float],
         look: dict[str, str]) -> None:
    """Draws one line with its intervals: a band, or bars where there are too few points for one; NaN = no interval."""
    axes.plot(x, y, label=label, markersize=5, linewidth=1.5, **look)
    known = np.isfinite(low)
    if known.sum() > 2:
        axes.fill_between(x, low, high, color=look["color"], alpha=0.13, linewidth=0)
    elif known.any():
        bars(axes, x, y, low, high, look["color"])


def bars(axes: Axes, x: Sequence[float], y: Sequence[float], low: Sequence[float], high: Sequence[float],
         color: str) -> None:
    """Draws upright error bars, without their points."""
    ends = np.maximum(0, np.stack([np.subtract(y, low), np.subtract(high, y)]))
    axes.errorbar(x, y, yerr=ends, fmt="none", ecolor=color, elinewidth=1, capsize=3, alpha=0.7)


def spread(rows: Iterable[Row], *choices: tuple[str, Callable[[Row], str]]) -> tuple[str, Callable[[Row], str]] | None:
    """Returns the first of some (field, label of a row) with which a line has more than one point; None for none."""
    rows = list(rows)
    for field, by in choices:
        values: dict[str, set] = {}
        for row in rows:
            if row.get(field) is not None:
                values.setdefault(by(row), set()).add(row[field])
        if any(len(some) > 1 for some in values.values()):
            return field, by
    return None


def level(axes: Axes, row: Row, y: Key, label: str, interval: Key | None = None) -> None:
    """Draws a figure that does not depend on x as a dashed line across the panel, with its interval."""
    color, around = styles([label])[label]["color"], get(row, interval) if interval is not None else None
    axes.axhline(get(row, y), color=color, linestyle="--", linewidth=1.2, label=label)
    if around is not None:
        axes.axhspan(*around, color=color, alpha=0.1, linewidth=0)


def dots(axes: Axes, rows: Sequence[Row], y: Key, by: Key = "method", interval: Key | None = None,
         label: str | None = None) -> None:
    """Draws a dot for each row with its interval, one below the other, with names at the side; `label` gives all of
    them one style."""
    shown = [row for row in rows if get(row, y) is not None]
    looks = styles(label or str(get(row, by)) for row in shown)
    for place, row in enumerate(shown):
        look, value = looks[label or str(get(row, by))], get(row, y)
        around = get(row, interval) if interval is not None else None
        if around is not None:
            axes.plot(around, (place, place), color=look["color"], linewidth=1.5, alpha=0.6)
        axes.plot(value, place, color=look["color"], marker=look["marker"], markersize=6)
    axes.set_yticks(range(len(shown)), [str(get(row, by)) for row in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)


# ------------------------------------------------------------------------------------------ labels

Box = tuple[float, float, float, float]  # left, bottom, right, top


def place_boxes(points: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], inside: Box,
                clear: Sequence[Box]) -> list[tuple[float, float] | None]:
    """Finds a place for a label beside each point, clear of everything, near ones first.

    Args:
      points: the points, in pixels.
      sizes: width and height of each label.
      inside: the box that labels must not leave.
      clear: boxes that they must not touch.

    Returns:
      The lower left corner of each label; None where no place is free.
    """
    taken, corners = list(clear), []
    for (x, y), (width, height) in zip(points, sizes, strict=True):
        corner = next((place for place in _around(x, y, width, height)
                       if _free((*place, place[0] + width, place[1] + height), inside, taken)), None)
        corners.append(corner)
        if corner is not None:
            taken.append((*corner, corner[0] + width, corner[1] + height))
    return corners


def _around(x: float, y: float, width: float, height: float) -> Iterable[tuple[float, float]]:
    """Yields lower left corners of boxes around a point, the nearest first."""
    for distance in (0.45 * height, 1.0 * height, 1.8 * height, 2.8 * height, 4.0 * height):
        for angle in np.radians((20, -20, 160, -160, 90, -90, 50, -50, 130, -130)):
            right, up = float(np.cos(angle)), float(np.sin(angle))
            yield x + distance * right - width * (1 - right) / 2, y + distance * up - height * (1 - up) / 2


def _free(box: Box, inside: Box, taken: Iterable[Box]) -> bool:
    left, bottom, right, top = box
    if left < inside[0] or bottom < inside[1] or right > inside[2] or top > inside[3]:
        return False
    return all(right <= other[0] or other[2] <= left or top <= other[1] or other[3] <= bottom for other in taken)


def name_points(axes: Axes, named: Sequence[tuple[float, float, str]], others: Sequence[tuple[float, float]] = (),
                path: Sequence[tuple[float, float]] = (), size: float = 7.5) -> list[str]:
    """Writes names beside points, the first ones first, and a thin line to those that stand farther off.

    Limits, scales and the legend must be final.

    Args:
      axes: the panel.
      named: x, y and name of each point.
      others: points that names must not hide, beside those that have one.
      path: corners of a line that names must not hide.
      size: of the text, in points.

    Returns:
      The names for which there was no room.
    """
    figure = axes.figure
    figure.draw_without_rendering()  # the layout gives panels their places
    pixels = axes.transData.transform([(x, y) for x, y, _ in named] + list(others))
    renderer, scale = figure.canvas.get_renderer(), figure.dpi / 72
    measure = functools.partial(renderer.get_text_width_height_descent, prop=_font(size), ismath=False)
    sizes = [(measure(name)[0] + 3 * scale, measure(name)[1] + 2 * scale) for _, _, name in named]
    half, frame = 3.5 * scale, axes.get_window_extent(renderer).extents
    clear = [(x - half, y - half, x + half, y + half) for x, y in pixels]
    clear += [(x - 1, y - 1, x + 1, y + 1) for x, y in _along(axes.transData.transform(path))] if path else []
    corners = place_boxes(pixels[: len(named)].tolist(), sizes, tuple(frame), clear)
    back, left_out = axes.transData.inverted(), []
    for (x, y, name), pixel, corner, (width, height) in zip(named, pixels[: len(named)], corners, sizes, strict=True):
        if corner is None:
            left_out.append(name)
            continue
        middle = np.add(corner, (width / 2, height / 2))
        nearest = np.clip(pixel, corner, np.add(corner, (width, height)))
        text = axes.text(*back.transform(middle), name, fontproperties=_font(size), ha="center", va="center")
        text.set_in_layout(False)
        if np.hypot(*(nearest - pixel)) > 1.2 * height:
            ends = np.stack([(x, y), back.transform(nearest)]).T
            axes.plot(*ends, color="#808080", linewidth=0.6, alpha=0.7, zorder=1)
    return left_out


def _along(corners: np.ndarray) -> Iterable[tuple[float, float]]:
    """Yields points of a line, four pixels or less apart."""
    for start, end in itertools.pairwise(corners):
        yield from np.linspace(start, end, 2 + int(np.hypot(*(end - start)) / 4))


def _font(size: float) -> mpl.font_manager.FontProperties:
    return mpl.font_manager.FontProperties(size=size)
