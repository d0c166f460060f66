"""Pictures of the experiments: panels have a line or a dot for each label, at the measured values, with intervals."""

import itertools

import numpy as np
import pytest

from experiments.board import pictures as of_boards
from experiments.dynakv import adaptive_prefill
from experiments.dynsplit import delimiters
from experiments.icecache import paper
from experiments.kvswap import residency, reuse, tune
from experiments.rle import overhead, savings
from experiments.shift import pictures as of_shift
from experiments.speed import pictures as of_speed
from experiments.training import train_lm, train_svd
from kvjax.eval.intervals import wilson

SIZES = (1024, 4096, 16384)


def labels(axes) -> set[str]:
    return set(axes.get_legend_handles_labels()[1])


def points(axes, label: str) -> list[list[float]]:
    (line,) = (line for line in axes.lines if line.get_label() == label)
    return line.get_xydata().tolist()


def scored(method: str, context: int, budget: int | None, share: float, task: str = "needle") -> dict:
    return {"method": method, "task": task, "context": context, "budget": budget, "accuracy": share,
            "interval": wilson(share, 32)}


def test_scores_go_over_contexts_with_their_intervals():
    rows = [scored(method, size, None, share) for method, share in (("full", 1.0), ("quest@64", 0.5)) for size in SIZES]
    (axes,) = of_boards.scores(rows).axes
    assert labels(axes) == {"full", "quest@64"} and points(axes, "quest@64") == [[size, 0.5] for size in SIZES]
    assert len(axes.collections) == 2 and axes.get_xscale() == "log"


def test_scores_go_over_budgets_if_a_method_has_several_and_the_whole_cache_is_a_level():
    rows = [scored("full", 2048, None, 0.9), *(scored(f"quest@{n}", 2048, n, n / 256) for n in (64, 128, 256))]
    (axes,) = of_boards.scores(rows).axes
    assert labels(axes) == {"full", "quest"} and points(axes, "quest") == [[64, 0.25], [128, 0.5], [256, 1.0]]
    (level,) = (line for line in axes.lines if line.get_label() == "full")
    assert list(level.get_ydata()) == [0.9, 0.9]


def test_scores_where_nothing_varies_are_dots_with_names():
    names, head = ("G=1", "G=4"), {"task": "perplexity", "context": 2048, "budget": 64}
    rows = [scored(name, 2048, 64, 0.5) for name in names] + [{**head, "method": name, "nll": 3.0} for name in names]
    answers, loss = of_boards.scores(rows).axes
    assert [text.get_text() for text in answers.get_yticklabels()] == ["G=1", "G=4"]
    assert answers.get_xlim()[0] <= 0 and answers.get_xlim()[1] >= 1 and loss.get_xlabel() == "loss, nats per token"


def test_a_generation_is_drawn_window_by_window():
    rows = [{"method": "quest", "start": start, "stop": start + 8, "nll": 1.0, "agreement": 0.9, "repeats": 0.1}
            for start in (0, 8, 16)]
    for axes, value in zip(of_boards.drift(rows).axes, (1.0, 0.9, 0.1), strict=True):
        assert points(axes, "quest") == [[8, value], [16, value], [24, value]]


def timed(method: str, store: str, context: int, batch: int = 1, budget: int | None = None, **more) -> dict:
    return {"model": "llama", "method": method, "store": store, "context": context, "batch": batch, "budget": budget,
            "tokens_per_s": 100.0 * batch, "limit_ms": 1.0, **more}


@pytest.mark.parametrize(("rows", "x", "y"), [
    ([timed("quest@512", "memory", size) for size in SIZES], list(SIZES), 10.0),
    ([timed("quest@512", "memory", 1024, batch) for batch in (1, 4)], [1, 4], None),
    ([timed(f"quest@{n}", "memory", 1024, budget=n) for n in (64, 128)], [64, 128], 10.0),
])
def test_times_go_over_what_varies(rows, x, y):
    (axes,) = of_speed.throughput(rows).axes
    lines = [line for line in axes.lines if line.get_linestyle() == "-"]
    assert [list(line.get_xdata()) for line in lines] == [x]
    if y is not None:
        np.testing.assert_allclose(lines[0].get_ydata(), y)


def test_times_have_a_panel_for_each_store_and_one_for_many_tokens():
    rows = [timed("dynakv", store, size, fused_256_s=1.0, fused_512_s=2.5) for store in ("memory", "flash")
            for size in SIZES[:1]]
    *stores, outputs = of_speed.throughput(rows).axes
    assert [axes.get_title() for axes in stores] == ["llama, memory", "llama, flash"]
    assert points(outputs, "dynakv, flash, fused") == [[256, 1.0], [512, 2.5]]


def test_memory_and_answers_of_chunks_are_apart():
    head = {"method": "dynakv@64", "context": 2048}
    rows = [{**head, "task": "accuracy", "chunk": chunk, "accuracy": 0.5, "interval": (0.4, 0.6), "nll": 2.0,
             "prefill_s": 1.0} for chunk in (0, 64)]
    rows += [{**head, "task": "memory", "chunk": 64, "peak_bytes": 2 << 20, "resident_bytes": 1 << 20}]
    answers, _, _, peak, kept = adaptive_prefill.plot(rows).axes
    assert points(answers, "dynakv@64, context 2,048") == [[64, 0.5], [2048, 0.5]]
    assert points(peak, "dynakv@64, 64 at a time") == [[2048, 2.0]]
    assert points(kept, "dynakv@64, 64 at a time") == [[2048, 1.0]]


def test_reuse_has_the_interval_over_texts():
    rows = [{"method": "kvswap", "budget": 25, "context": 1792, "kind": "code", "times_selected": times, "texts": 16,
             "reuse_rate": times / 10, "std": 0.1} for times in (1.0, 2.0, 4.0)]
    (axes,) = reuse.plot(rows).axes
    assert points(axes, "code") == [[1, 0.1], [2, 0.2], [4, 0.4]]
    low = axes.collections[0].get_paths()[0].vertices[:, 1].min()
    np.testing.assert_allclose(low, 0.1 - 2.131 * 0.1 / np.sqrt(15), atol=1e-4)


def test_the_optimum_of_residency_is_dashed():
    rows = [{"method": "quest", "policy": policy, "slots": slots, "hit_rate": 0.5, "blocks_in_use": 9}
            for policy in ("lru", "belady") for slots in (4, 8)]
    (axes,) = residency.plot(rows).axes
    assert {line.get_label(): line.get_linestyle() for line in axes.lines} == {"lru": "-", "belady": "--"}


def test_a_tuning_has_a_line_for_each_batch():
    times, settings = {"compute_ms": 1.0, "fetch_ms": 2.0}, {"group": 4, "sigma": 8, "reuse_tokens": 16}
    rows = [{"batch": batch, "context": size, "resident_bytes": 3 << 20, **times, **settings}
            for batch in (1, 8) for size in SIZES]
    values = [points(axes, "batch 8")[0][1] for axes in tune.plot(rows).axes]
    assert values == [1.0, 2.0, 3.0, 4, 8, 16]


def test_savings_stand_over_their_cost_for_each_kind_of_text():
    rows = [{"task": f"{task}/{kind}", "method": "rle_after", "context": 512, measure: value, "saved": value,
             "relative_delta_nll": 2 * value, "relative_error": 0.01}
            for task in ("runs", "likelihood") for kind in ("chat", "code")
            for measure, value in (("absolute", 0.0), ("absolute", 0.1), ("relative", 0.1))]
    panels = savings.plot(rows, ("chat", "code")).axes
    assert [axes.get_title().split(",")[0] for axes in panels] == ["chat", "code", "chat", "code"]
    assert points(panels[0], "after RoPE, absolute") == [[0, 0], [0.1, 0.1]]
    assert points(panels[3], "after RoPE, absolute") == [[0, 0], [0.1, 0.2]]


def test_the_cost_of_runs_stands_beside_the_cache_without_them():
    rows = [{"context": size, "run": run, "token_ms": 2.0, "unrotated_ms": 3.0, "plain_ms": 1.0, "token_of_step": 0.1,
             "encode_us": 5.0, "append_us": 6.0} for size in SIZES for run in (1, 8)]
    token, unrotated, of_step, *_ = overhead.plot(rows).axes
    assert labels(token) == labels(unrotated) == {"runs of 1", "runs of 8", "full"}
    assert labels(of_step) == {"runs of 1", "runs of 8"}


def test_delimiters_have_intervals_and_convergence():
    rows = [{"task": "table/code", "text": text, "score": 0.5, "standard_error": 0.1} for text in "ab"]
    rows += [{"task": "convergence/code", "tokens": n, "mean_error": 1 / n} for n in (1, 2)]
    table, convergence = delimiters.plot(rows, ("code",), 1).axes
    assert [text.get_text() for text in table.get_yticklabels()] == ["'a'"]
    assert list(table.lines[0].get_xdata()) == [0.5 - 0.196, 0.5 + 0.196]
    assert points(convergence, "code") == [[1, 1], [2, 0.5]]


def test_icecache_has_only_panels_of_parts_that_were_measured():
    tree = [{"part": "dci", "task": "dci", "method": "shipped", "source": source, "built": built, "context": size,
             "recall_16": 0.9, "evaluations": 100.0}
            for source in ("clustered", "real") for built in (1.0, 0.5) for size in SIZES]
    asked = [{"part": "passkey", "task": "passkey", "method": "full", "context": 512, "by_depth": [(0.5, 1.0)]}]
    recall, evaluations, grid = paper.plot(tree + asked).axes
    assert labels(recall) == labels(evaluations) == {"clustered, shipped"} and len(grid.images) == 1


def test_training_has_losses_and_exact_answers():
    lines = [{"step": step, "text_loss": 3.0, "answer_loss": 0.0} for step in (1, 2)]
    lines += [{"step": step, "exact_1_of_128": 0.5, "exact_4_of_128": 0.1} for step in (1, 2, 3)]
    left, right = train_lm.plot(lines).axes
    assert labels(left) == {"text loss"} and labels(right) == {"128 tokens"}
    low, high = wilson(0.5, train_lm.ASKED)
    band = right.collections[0].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose([band.min(), band.max()], [low, high])


def test_adapters_have_a_column_for_each_pair_of_texts():
    measures = dict.fromkeys(("reconstruction_error", "score_error", "divergence", "recall", "attention_mass"), 0.5)
    rows = [{"method": form, "ratio": ratio, "fitted_on": fitted, "task": tried, **measures}
            for form, ratio in itertools.product(("joint", "per_head"), (4, 8))
            for fitted, tried in itertools.product(("code", "prose"), repeat=2)]
    panels = train_svd.plot(rows).axes
    assert len(panels) == 5 * 4 and panels[1].get_title() == "code → prose"
    assert all(labels(axes) == {"joint", "per_head"} for axes in panels)


def test_shift_is_the_mean_over_kinds_of_text_with_its_interval():
    rows = [{"method": "adaptive", "decoded": decoded, "recall": 0.5 + shift, "divergence": 0.2}
            for decoded in (0, 64, 128) for shift in (-0.1, 0.1)]
    recall, *_ = of_shift._curves(rows).axes
    np.testing.assert_allclose(points(recall, "adaptive"), [[0, 0.5], [64, 0.5], [128, 0.5]])
    assert len(recall.collections) == 1
