"""Plots of the distribution-shift experiment: curves over the decode, clusters in PCA space, co-retrieval."""

import pathlib

import ml_collections
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from experiments import plots

CURVES = (
    ("recall", "recall of the true top-k"), ("attention_mass", "attention mass"),
    ("output_error", "relative L2 error of the output"), ("divergence", "KL(dense || sparse), nats"),
    ("variance", "intra-cluster variance"), ("clusters", "clusters per head"),
    ("largest_cluster", "largest cluster, keys"), ("centroid_drift", "centroid drift / prompt variance"),
)


def plot_all(rows: list[dict], path: pathlib.Path, config: ml_collections.ConfigDict) -> None:
    """Writes every plot into the workdir."""
    for mode in config.modes:
        mine = [row for row in rows if row["task"].startswith(mode)]
        plots.save(_curves(mine), path / f"shift_{mode}.png")
        plots.save(_kinds(mine, config.kinds), path / f"kinds_{mode}.png")
        stored = {name: _windows(path / "windows", f"{mode}_{name}_{config.pca.kind}") for name in config.strategies}
        stored = {name: windows for name, windows in stored.items() if windows}
        if not stored:
            continue
        plots.save(_clusters(stored), path / f"clusters_{mode}.png")
        first = next(iter(stored))
        last = {kind: _windows(path / "windows", f"{mode}_{first}_{kind}")[-1][1]["pairs"] for kind in config.kinds}
        plots.save(_co_retrieval(last), path / f"co_retrieval_{mode}.png")


def _windows(directory: pathlib.Path, name: str) -> list[tuple[int, dict]]:
    """Returns the kept data of each window, in order: (decoded tokens before it, arrays)."""
    by_start = {int(file.stem.rsplit("_", 1)[1]): dict(np.load(file)) for file in directory.glob(f"{name}_*.npz")}
    return sorted(by_start.items())


def _curves(rows: list[dict]) -> Figure:
    """Plots each figure over the decoded tokens, one line per strategy: means over all texts, with Student's interval
    if there are several."""
    shown = [(name, title) for name, title in CURVES if any(name in row for row in rows)]
    figure, panels = plots.panels(len(shown), columns=4, size=(3.5, 2.9))
    looks = plots.styles(row["method"] for row in rows)
    for axes, (name, title) in zip(panels, shown, strict=True):
        if name in ("largest_cluster", "divergence"):
            plots.logarithmic(axes)
        plots.curves(axes, rows, "decoded", name, looks=looks)
        axes.set(title=title, xlabel="decoded tokens")
    return figure


def _kinds(rows: list[dict], kinds) -> Figure:
    """Plots the recall over the decoded tokens, a panel for each kind of text."""
    figure, panels = plots.panels(len(kinds), columns=4, size=(3.5, 2.9))
    looks = plots.styles(row["method"] for row in rows)
    for axes, kind in zip(panels, kinds, strict=True):
        mine = [row for row in rows if row["task"].endswith(f"/{kind}")]
        plots.curves(axes, mine, "decoded", "recall", looks=looks)
        axes.set(title=kind, xlabel="decoded tokens", ylabel="recall of the true top-k")
    return figure


def principal_axes(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and the first two principal axes [2, D] of the keys, the largest entry of each axis positive."""
    mean = keys.mean(0)
    axes = np.linalg.svd(keys - mean, full_matrices=False)[2][:2]
    return mean, axes * np.sign(axes[np.arange(2), np.abs(axes).argmax(1)])[:, None]


def _clusters(stored: dict[str, list[tuple[int, dict]]]) -> Figure:
    """Plots Figure 4: keys of one head in the plane of their two principal axes, coloured by cluster, and centroids."""
    columns = max(map(len, stored.values()))
    figure = Figure(figsize=(3 * columns, 3 * len(stored)), layout="constrained")
    grid = figure.subplots(len(stored), columns, squeeze=False, sharex=True, sharey=True)
    for line, (strategy, windows) in zip(grid, stored.items(), strict=True):
        mean, axes = principal_axes(windows[-1][1]["key"])
        for panel, (start, window) in zip(line, windows, strict=True):
            flat, inside = (window["key"] - mean) @ axes.T, window["cluster"] < window["none"]
            panel.scatter(*flat[inside].T, c=window["cluster"][inside] % 20, cmap="tab20", s=2, linewidths=0)
            numbers, size = np.unique(window["cluster"][inside], return_counts=True)
            centres = np.stack([flat[window["cluster"] == number].mean(0) for number in numbers])
            panel.scatter(*centres.T, s=size / 4, facecolors="none", edgecolors="black", linewidths=0.5)
            panel.set_title(f"{strategy}, {start} decoded: {len(numbers)} clusters", fontsize=8)
    return figure


def _co_retrieval(last: dict[str, np.ndarray]) -> Figure:
    """Plots Figure 7: P(ij) of the clusters that the last window retrieved, most frequent first, one panel per kind of
    text."""
    figure = Figure(figsize=(4 * len(last), 4), layout="constrained")
    for panel, (kind, pairs) in zip(figure.subplots(1, len(last), squeeze=False)[0], last.items(), strict=True):
        order = np.argsort(-pairs.sum(0), kind="stable")[: max(2, int((pairs.sum(0) > 0).sum()))]
        shown = pairs[np.ix_(order, order)]
        image = panel.imshow(shown, norm=LogNorm(vmin=max(shown[shown > 0].min(initial=1.0), 1e-6)), cmap="viridis")
        panel.set_title(f"co-retrieval, {kind}: {len(order)} clusters", fontsize=9)
        figure.colorbar(image, ax=panel, shrink=0.7)
    return figure
