"""IceCache's experiments: passkeys, a task suite, the DCI-tree alone, hit rates of pages, and times.

Each part logs its rows as they are measured; rows that the workdir has are skipped.
"""

import functools
from collections.abc import Callable, Iterator

import ml_collections
import numpy as np
from matplotlib.figure import Figure

import kvjax
from experiments import common, plots
from experiments.board import depths, evaluate, grid, leaderboard
from experiments.board.exams import Exams
from experiments.icecache import times, tree
from experiments.results import Run
from kvjax.eval import metrics
from kvjax.eval.tasks import asking, needles

Row = dict


# ------------------------------------------------------------------------------------ passkey grid


def passkey(llm: kvjax.LLM, config: ml_collections.ConfigDict) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Yields Figure 6: right answers over depth at every length and budget, beside the full cache and exact top-k."""
    stream = common.held_out_tokens(llm)
    for length in config.lengths:
        samples = functools.cache(
            lambda length=length: common.draw_task(llm, stream, "passkey", length, config.samples, config.seed)
        )
        methods = {"full": kvjax.Full()}
        for budget in config.budgets:
            shared = {"budget": budget, "window": config.window}
            methods |= {
                f"icecache@{budget}": kvjax.IceCache(**shared, beam=config.beam, dense_layers=0),
                f"icecache@{budget}_reuse3": kvjax.IceCache(**shared, beam=config.beam, dense_layers=1, reuse=3),
                f"oracle@{budget}": kvjax.Oracle(**shared),
            }
        for name, method in methods.items():
            head = {"task": "passkey", "method": name, "context": length, "budget": method.budget}
            yield head, lambda method=method, samples=samples: evaluate.retrieval_row(llm, method, samples(), config)


# ------------------------------------------------------------------------------------- task suite


def suite(llm: kvjax.LLM, config, directory) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Yields the cells of the leaderboards, after checking all of them."""
    grids = [(Exams(llm, board), list(grid.cells(board))) for board in boards(config)]
    for exams, cells in grids:
        leaderboard.check_fit(exams, cells)
    for exams, cells in grids:
        for cell in cells:
            yield cell.head, lambda exams=exams, cell=cell: leaderboard.measure(exams, cell, directory / "store")


def boards(config) -> list[ml_collections.ConfigDict]:
    """Returns the settings of the leaderboards that have methods: `config.suite`, and the same with the changes of
    `config.suite_once`."""
    both = (ml_collections.ConfigDict({**config.suite, **chosen}) for chosen in ({}, config.suite_once))
    return [board for board in both if board.methods]


def shares(rows: list[Row]) -> Iterator[Row]:
    """Yields for each method and budget the score over all tasks and seeds, beside the full cache's on the same
    samples."""
    scores = {_exam(row): row["scores"] for row in rows if row["part"] == "suite" and row["method"] == "full"}
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if row["part"] == "suite" and "scores" in row and _exam(row) in scores:
            groups.setdefault((row["method"], row["budget"], row["context"]), []).append(row)
    for (method, budget, context), group in groups.items():
        mine, full = ([score for row in group for score in table(row)]
                      for table in (lambda row: row["scores"], lambda row: scores[_exam(row)]))
        yield {"part": "suite", "task": "all", "method": method, "budget": budget, "context": context,
               "accuracy": float(np.mean(mine)), **evaluate.share_of(mine, full)}


def _exam(row: Row) -> tuple:
    return row["task"], row["context"], row["seed"]


# ------------------------------------------------------------------------------- hit rate of pages


def pages(llm: kvjax.LLM, config) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Yields the share of the true top 16 and of the attention mass that the loaded pages hold, in all layers of one
    text."""
    size = config.key_tokens + config.key_steps
    text = needles.random_span(np.random.default_rng(config.seed), common.held_out_tokens(llm), size)
    for budget in config.budgets:
        shared = {"budget": budget, "window": config.window}
        for method in (
            kvjax.IceCache(**shared, beam=config.beam, dense_layers=0), kvjax.Quest(**shared, page=8),
            kvjax.Quest(**shared, page=16), kvjax.Oracle(**shared),
        ):
            label = common.label(method) + (f"_page{method.page}" if hasattr(method, "page") else "")
            head = {"task": "pages", "method": label, "context": config.key_tokens, "budget": budget}
            yield head, lambda method=method: _hit_rate(llm, method, text, config)


def _hit_rate(llm: kvjax.LLM, method, text: list[int], config) -> Row:
    capacity = asking.rounded(len(text) + 8)
    reading = llm.read(text[: config.key_tokens])
    cache = llm.prefill(reading, method=method, capacity=capacity)
    probe = metrics.Probe(cache, reading, k=16)
    result = llm.generate(text[config.key_tokens :], cache, max_new_tokens=1, observer=probe)
    return {"recall": probe.quality.recall, "attention_mass": probe.quality.attention_mass,
            "attended_tokens": result.usage.attended_tokens, "resident_bytes": cache.resident_bytes,
            "occupancy": times.occupancy(cache.plan, result.cache.state)}


# --------------------------------------------------------------------------------------------- run


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Measures every part; rows that the workdir has are skipped."""
    all_boards = boards(config)
    for board in all_boards:
        leaderboard.check(board)
    common.check_counts(config, samples=1, batch=1, budgets=1, lengths=1, repeats=1, steps=2, long_steps=1, queries=1,
                        key_tokens=1, key_steps=1)
    common.check_names(config, "timed", times.TIMED)
    common.check_names(config, "trees", tree.SETTINGS)
    llm = common.load_model(config.model)
    for board in all_boards:
        common.check_model(llm, board.methods)
    parts = {
        "passkey": lambda: passkey(llm, config), "suite": lambda: suite(llm, config, run.path),
        "dci": lambda: tree.rows(llm, config), "pages": lambda: pages(llm, config),
        "tt2t": lambda: times.second_token(config, run.path),
        "breakdown": lambda: times.breakdown(config, run.path),
        "tpot": lambda: times.per_token(config),
    }
    common.check_names(config, "parts", parts)
    run = Run(config, workdir, ("parts",))
    rows = run.logged()
    for part in config.parts:
        for head, measured in parts[part]():
            head = {"part": part, **head}
            if not any(head.items() <= row.items() for row in rows):
                rows.append({"store": "memory", "seed": config.seed, **head, **measured()})
                run.log(**rows[-1])
    run.summary([*rows, *shares(rows), *times.growth(rows, config.growth)])
    figure = plot(rows)
    if figure is not None:
        plots.save(figure, run.path / "icecache.png")


def plot(rows: list[Row]) -> Figure | None:
    """Plots what was measured: passkeys by depth (Figure 6), the tree alone, pages, and times (Figures 7 a and 8); None
    for rows of other parts alone."""
    grid = [row for row in rows if row["part"] == "passkey"]
    tree_rows = [row for row in rows if row["part"] == "dci" and row["built"] == 1]
    alone = [row for row in tree_rows if row["source"] != "real"]
    loaded = [row for row in rows if row["part"] == "pages"]
    second = [row for row in rows if row["part"] == "tt2t"]
    timed = [row for row in rows if row["part"] == "tpot"]
    shown = [(some, *how) for some, *how in (
        (alone, "context", "recall_16", _tree, "points", "recall of the true top 16"),
        (alone, "context", "evaluations", _tree, "points", "evaluations per query"),
        (loaded, "budget", "recall", _unbudgeted, "budget, tokens", "pages: recall of the true top 16"),
        (loaded, "budget", "attention_mass", _unbudgeted, "budget, tokens", "pages: attention mass"),
        (second, "context", "pipelined_s", "method", "prompt, tokens", "seconds to the second token"),
        (timed, "context", "token_ms", lambda row: f"{row['method']}, {row['task']}", "context", "ms per token"),
    ) if some]
    if not shown and not grid:
        return None
    figure, panels = plots.panels(len(shown) + bool(grid))
    for axes, (some, x, y, by, xlabel, ylabel) in zip(panels, shown, strict=False):
        plots.curves(axes, some, x, y, by)
        plots.steps(axes, [row[x] for row in some])
        axes.set(xlabel=xlabel, ylabel=ylabel)
        if y in ("evaluations", "token_ms"):
            plots.logarithmic(axes)
    if grid:
        depths.heatmap(panels[-1], grid, "passkeys found")
    return figure


def _tree(row: Row) -> str:
    return f"{row['source']}, {row['method']}"


def _unbudgeted(row: Row) -> str:
    return row["method"].replace(f"@{row['budget']}", "")
