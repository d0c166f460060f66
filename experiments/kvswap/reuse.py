"""Share of the groups needed by KVSwap that are still in its reuse buffer, for each kind of text (its Table 5).

The model decodes texts of each kind, the groups it selects are recorded (`experiments.speed.replay`), and a first-in,
first-out buffer is simulated (`kvjax.calibration.tuner.fifo`). Slots are given as multiples of the selected groups;
each text, layer and head has a buffer of its own, empty at first.
"""

import ml_collections
import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from experiments import common, plots
from experiments.results import Run
from experiments.speed import replay
from kvjax.calibration.tuner import fifo
from kvjax.errors import ConfigError


def overlap(need: np.ndarray) -> float:
    """Returns the share of need[steps, streams, M] that was also needed in the step before (KVSwap, section 3.4.2)."""
    again = (need[1:, :, :, None] == need[:-1, :, None, :]).any(-1)
    return float(again[need[1:] >= 0].mean())


def frequent(need: np.ndarray, share: float = 0.8) -> float:
    """Returns, of the groups that are ever in need[steps, streams, M], the smallest share that makes up `share` of it
    (Figure 8)."""
    fewest = []
    for stream in need.swapaxes(0, 1):
        often = np.sort(np.bincount(stream[stream >= 0]))[::-1]
        fewest.append((1 + np.searchsorted(np.cumsum(often), share * often.sum())) / np.count_nonzero(often))
    return float(np.mean(fewest))


def record(llm, kind: str, settings, selected: int, config: ml_collections.ConfigDict) -> np.ndarray:
    """Returns the groups that a method needs on texts of a kind when it selects `selected` tokens: int32[steps, texts,
    streams, M]."""
    method = common.make_method(settings, ("label",))
    how = ml_collections.ConfigDict({**config.replay.to_dict(), "kinds": (kind,)})
    texts = replay.draw_texts(llm, how, config.texts)
    block = replay.record(llm, replay.selecting(method, selected), texts, how.steps, selected // method.group).block
    return block.swapaxes(1, 2).reshape(how.steps, config.texts, -1, block.shape[-1])


def measure(llm, kind: str, settings, selected: int, config: ml_collections.ConfigDict) -> list[dict]:
    """Returns a row per size of the buffer: the mean over texts, and how far they differ."""
    need, how, rows = record(llm, kind, settings, selected, config), config.replay, []
    steps, texts, _, groups = need.shape
    head = {"method": common.label_of(settings), "store": "replay", "task": "reuse", "kind": kind, "budget": selected,
            "context": how.tokens - steps, "steps": steps, "texts": texts, "seed": how.seed,
            "overlap": overlap(need.reshape(steps, -1, groups)), "frequent": frequent(need.reshape(steps, -1, groups))}
    for times in config.times_selected:
        slots = int(times * groups)
        rates = [fifo.rate(need[:, text], slots, config.warm_up) for text in range(texts)]
        rows.append({**head, "times_selected": times, "slots": slots, "reuse_rate": float(np.mean(rates)),
                     "min": min(rates), "max": max(rates), "std": float(np.std(rates))})
    return rows


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError if nothing could be recorded or simulated."""
    for settings in config.methods:
        common.make_method(settings, ("label",))
        replay.check({**settings, "replay": True}, config)
    if not config.times_selected or min(config.times_selected) < 1:
        raise ConfigError(f"times_selected={tuple(config.times_selected)} must be numbers of at least 1")
    if not 0 <= config.warm_up < config.replay.steps or config.texts < 1:
        raise ConfigError(f"warm_up={config.warm_up} must be below replay.steps={config.replay.steps}, and "
                          f"texts={config.texts} at least 1")


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Records and simulates every method, size and kind of text that the workdir does not have yet."""
    check(config)
    llm, run = common.load_model(config.model), Run(config, workdir, ("methods", "selected"))
    rows = run.logged()
    done = {(row["method"], row["budget"], row["kind"]) for row in rows}
    for settings in config.methods:
        for selected in config.selected:
            for kind in config.replay.kinds:
                if (common.label_of(settings), selected, kind) in done:
                    continue
                for row in measure(llm, kind, settings, selected, config):
                    rows.append(row)
                    run.log(**row)
    run.summary(rows)
    plots.save(plot(rows), run.path / "reuse.png")
    print_table(rows)


def plot(rows: list[dict]) -> Figure:
    """Plots the share that comes back against the size of the buffer, a panel per method and selection, with the 95 %
    interval over texts."""
    groups = list(dict.fromkeys((row["method"], row["budget"]) for row in rows))
    figure, panels = plots.panels(len(groups))
    for axes, (method, selected) in zip(panels, groups, strict=True):
        mine = [row for row in rows if (row["method"], row["budget"]) == (method, selected)]
        plots.curves(axes, mine, "times_selected", "reuse_rate", "kind", _interval)
        plots.shares(axes)
        axes.set(title=f"{method}, {selected} of {mine[0]['context']:,} tokens selected",
                 xlabel="buffer, times the selected groups", ylabel="share of groups that come back")
    return figure


def _interval(row: dict) -> tuple[float, float] | None:
    """Returns Student's interval of the mean over texts, from their standard deviation."""
    if row["texts"] < 2:
        return None
    half = float(stats.t.ppf(0.975, row["texts"] - 1)) * row["std"] / (row["texts"] - 1) ** 0.5
    return row["reuse_rate"] - half, row["reuse_rate"] + half


def print_table(rows: list[dict]) -> None:
    """Prints the reuse in %, a line per row."""
    print(f"{'method':>12}{'selected':>10}{'kind':>10}{'slots':>7}{'overlap':>9}{'frequent':>9}{'reuse':>9}"
          f"{'min':>9}{'max':>9}{'std':>9}")
    for row in rows:
        cells = "".join(f"{100 * row[key]:9.1f}" for key in ("overlap", "frequent", "reuse_rate", "min", "max", "std"))
        print(f"{row['method']:>12}{row['budget']:>10}{row['kind']:>10}{row['slots']:7}{cells}")
