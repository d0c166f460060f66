"""Importance of each delimiter to a model, by kind of text (DynSplit-KV, section 3).

Four results: the table of Appendix B.1 for each kind of text, the distance between the kinds (Figure 3 b), the number
of tokens after which the scores have converged, and the loss of the method when the order of its delimiters is reversed
(Figure 3 d). The last takes longest; a workdir that has it is not measured again.
"""

import itertools
import pathlib
from collections.abc import Collection

import ml_collections
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import kvjax
from experiments import common, plots
from experiments.board import evaluate
from experiments.results import Run
from experiments.texts import KINDS, Texts
from kvjax.calibration.boundaries import Importance, boundary_scores
from kvjax.errors import ConfigError
from kvjax.methods.shared.delimiter_texts import delimiter_texts
from kvjax.methods.shared.delimiters import DelimiterCounts, Delimiters


def tallies(llm: kvjax.LLM, kind: str, config) -> list[DelimiterCounts]:
    """Returns the scores of one kind of text after each checkpoint's number of texts."""
    texts, rule = Texts(llm, config.seed), Importance(**config.importance)
    tally, snapshots = DelimiterCounts(llm.config.vocab_size), []
    for number in tqdm(range(config.texts), desc=kind, disable=None):
        tokens = np.asarray(texts.draw(kind, number, 0, config.length))
        tally.add(tokens, boundary_scores(llm.config, llm.params, tokens, rule))
        if number + 1 in config.checkpoints:
            snapshots.append(tally.copy())
    return snapshots


def table_rows(kind: str, table: Delimiters, tally: DelimiterCounts, config) -> list[dict]:
    """Returns one row for each delimiter with at least `config.least` occurrences, the most frequent first."""
    error, weight = tally.standard_error(), table.weights()
    columns = zip(table.tokens, table.texts, table.scores, table.counts, strict=True)
    rows = [
        {"task": f"table/{kind}", "text": text, "token": token, "weight": float(weight[token]), "score": score,
         "standard_error": float(error[token]), "count": count}
        for token, text, score, count in columns if count >= config.least
    ]
    return sorted(rows, key=lambda row: -row["count"])


def spread_row(tables: dict[str, Delimiters], config) -> dict:
    """Returns how far the weights of one delimiter differ between kinds of text, over those that are frequent in
    all."""
    common_to_all = np.min([table.counts for table in tables.values()], axis=0) >= config.least
    tokens = np.asarray(next(iter(tables.values())).tokens)[common_to_all]
    if not len(tokens):
        raise ConfigError(f"no delimiter occurs {config.least} times in every kind of text; raise texts or length")
    weights = np.stack([table.weights()[tokens] for table in tables.values()])
    apart, ranks = np.ptp(weights, axis=0), np.argsort(np.argsort(weights, axis=1), axis=1)
    return {
        "task": "spread", "delimiters": len(tokens), "mean": float(apart.mean()), "largest": float(apart.max()),
        "largest_text": dict(zip(*_names(tables), strict=True))[int(tokens[apart.argmax()])],
        "rank_correlation": _mean_correlation(ranks) if len(tokens) > 1 else float("nan"),
    }


def _mean_correlation(ranks: np.ndarray) -> float:
    """Returns the correlation of the rows of ranks[N, X], mean over all pairs."""
    return float(np.corrcoef(ranks)[np.triu_indices(len(ranks), 1)].mean())


def _names(tables):
    table = next(iter(tables.values()))
    return table.tokens, table.texts


def convergence_rows(kind: str, snapshots: list[DelimiterCounts], tokens: Collection[int], config) -> list[dict]:
    """Returns the distance of the scores after a few texts from the final ones, over those of the given delimiters that
    are frequent in the end."""
    final, rows = snapshots[-1], []
    frequent = np.isin(np.arange(len(final.count)), sorted(tokens)) & (final.count >= 4 * config.least)
    for texts, tally in zip(config.checkpoints, snapshots, strict=True):
        known = frequent & (tally.count >= config.least)
        error = np.abs(tally.mean() - final.mean())[known]
        rows.append({
            "task": f"convergence/{kind}", "tokens": texts * config.length, "delimiters": int(known.sum()),
            "mean_error": float(error.mean()) if known.any() else None,
            "largest_error": float(error.max()) if known.any() else None,
        })
    return rows


def control_rows(llm: kvjax.LLM, tables: dict[str, pathlib.Path], config, run: Run) -> list[dict]:
    """Returns the rows of the method with each table on the same samples; rows that the workdir has are read from
    it."""
    control = config.control
    rows = [row for row in run.logged() if row["task"].startswith("control/")]
    done = {(row["task"], row["method"], row["context"]) for row in rows}
    settings = ml_collections.ConfigDict({**control.to_dict(), "seed": config.seed})
    stream = common.held_out_tokens(llm)
    for (order, path), task, length in itertools.product(tables.items(), control.tasks, control.lengths):
        wanted = {**control.method.to_dict(), "table": str(path)}
        method = common.make_method(wanted, ("dtype",))
        head = {"task": f"control/{task}", "method": f"{common.label(method)} {order}", "context": length}
        if tuple(head.values()) not in done:
            measured = evaluate.measure(llm, wanted, task, length, stream, settings)
            rows.append({**head, "store": "memory", "budget": method.budget, "seed": config.seed, **measured})
            run.log(**rows[-1])
    return rows


def check(config) -> None:
    """Raises ConfigError for kinds or numbers that make no experiment."""
    if not config.kinds or set(config.kinds) - set(KINDS):
        raise ConfigError(f"kinds={tuple(config.kinds)} must be some of {', '.join(KINDS)}")
    if list(config.checkpoints) != sorted(set(config.checkpoints)) or config.checkpoints[-1] != config.texts:
        raise ConfigError(f"checkpoints={tuple(config.checkpoints)} must rise and end with texts={config.texts}")


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Scores every kind of text, writes the tables, then runs the control."""
    check(config)
    llm, run = common.load_model(config.model), Run(config, workdir)
    names, together = delimiter_texts(llm.tokenizer.tokenizer), DelimiterCounts(llm.config.vocab_size)
    tables, rows = {}, []
    for kind in config.kinds:
        snapshots = tallies(llm, kind, config)
        together.merge(snapshots[-1])
        tables[kind] = snapshots[-1].table(llm.identity, names, config.least)
        tables[kind].save(run.path / f"delimiters_{kind}.json")
        shown = table_rows(kind, tables[kind], snapshots[-1], config)
        print_table(kind, shown[: config.shown])
        rows += shown + convergence_rows(kind, snapshots, names, config)
    rows.append(spread_row(tables, config))
    table = together.table(llm.identity, names, config.least)
    paths = {"estimated": run.path / "delimiters.json", "reversed": run.path / "delimiters_reversed.json"}
    table.save(paths["estimated"])
    table.reversed().save(paths["reversed"])
    print_findings(rows)
    control = control_rows(llm, paths, config, run)
    run.summary(rows + control)
    plots.save(plot(rows, config.kinds, config.shown), run.path / "delimiters.png")
    print_control(control)


def plot(rows: list[dict], kinds: Collection[str], shown: int) -> Figure:
    """Plots the scores of the most frequent delimiters of each kind of text with their 95 % intervals, and how scores
    converge."""
    figure, panels = plots.panels(len(kinds) + 1, size=(3.8, max(3.2, 0.8 + 0.17 * shown)))
    for axes, kind in zip(panels[:-1], kinds, strict=True):
        table = [row for row in rows if row["task"] == f"table/{kind}"][:shown]
        plots.dots(axes, table, "score", lambda row: repr(row["text"]), _interval, label=kind)
        axes.set(title=f"{kind}, the most frequent first", xlabel="importance")
    converging = [row for row in rows if row["task"].startswith("convergence/")]
    plots.curves(panels[-1], converging, "tokens", "mean_error", lambda row: row["task"].partition("/")[2])
    plots.steps(panels[-1], [row["tokens"] for row in converging])
    panels[-1].set(title="convergence", xlabel="tokens", ylabel="mean distance from the final scores")
    return figure


def _interval(row: dict) -> tuple[float, float]:
    half = 1.96 * row["standard_error"]
    return row["score"] - half, row["score"] + half


def print_table(kind: str, rows: list[dict]) -> None:
    """Prints the table of Appendix B.1, a line per delimiter."""
    print(f"{kind:>16}  weight  score       count")
    for row in rows:
        score = f"{row['score']:.3f} ±{row['standard_error']:.3f}"
        print(f"{row['text']!r:>16}  {row['weight']:6.2f}  {score}  {row['count']}")


def print_findings(rows: list[dict]) -> None:
    """Prints convergence and spread, a line each."""
    for row in rows:
        if not row["task"].startswith("table/"):
            print("  ".join(f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
                            for name, value in row.items()))


def print_control(rows: list[dict]) -> None:
    """Prints the scores of the method with the estimated and with the reversed order, a line each."""
    for row in sorted(rows, key=lambda row: (row["task"], row["context"], row["method"])):
        measures = (f"{name} {row[name]:.3f}" for name in ("accuracy", "nll", "delta_nll") if name in row)
        print(f"{row['task']:>20}{row['context']:>7,}  {row['method']:32}" + "  ".join(measures))
