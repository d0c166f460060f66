"""IceCache: passkey grid, the DCI-tree alone, hit rate of its pages, time to the second token, decode time.

Each part writes its rows as it goes; a row that the workdir already has is not measured again.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from matplotlib.figure import Figure

import kvjax
from experiments import common, evaluate, throughput
from experiments.results import Run
from kvjax import dci, decode, metrics, planning, prefill
from kvjax.dci.tree import most_levels, occupancy
from kvjax.errors import ConfigError
from kvjax.planning import Slots
from kvjax.tasks import asking, needles

Row = dict


# ------------------------------------------------------------------------------------ passkey grid


def passkey(llm: kvjax.LLM, config: ml_collections.ConfigDict) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Figure 6: right answers over depth, at every length and budget, beside the full cache and exact top-k."""
    stream = common.held_out_tokens(llm)
    for length in config.lengths:
        samples = functools.cache(
            lambda length=length: common.draw_task(llm, stream, "passkey", length, config.samples, config.seed)
        )
        methods = [kvjax.full()]
        for budget in config.budgets:
            methods += [
                kvjax.icecache(budget=budget, window=config.window, beam=config.beam),
                kvjax.icecache(budget=budget, window=config.window, beam=config.beam, reuse=3),
                kvjax.oracle(budget=budget, window=config.window, dense_layers=2),
            ]
        for method in methods:
            head = {"task": "passkey", "method": _label(method), "context": length, "budget": method.budget}
            yield head, lambda method=method, samples=samples: evaluate.retrieval_row(llm, method, samples(), config)


def _label(method) -> str:
    return common.label(method) + (f"_reuse{method.reuse}" if method.reuse > 1 else "")


# --------------------------------------------------------------------------------- the tree alone


def real_keys(llm: kvjax.LLM, config) -> tuple[np.ndarray, np.ndarray]:
    """Keys [N, T, D] of a prompt and queries [N, Q, D] of the tokens after it, of every layer and KV head."""
    stream = common.held_out_tokens(llm)
    size = config.key_tokens + config.key_steps
    text = needles.random_span(np.random.default_rng(config.seed), stream, size)
    reading = llm.read(text[: config.key_tokens])
    cache = llm.prefill(reading, method=kvjax.full(), capacity=size + 8)
    asked: list[np.ndarray] = []
    llm.generate(
        text[config.key_tokens :], cache, max_new_tokens=1,
        observer=lambda step, _: asked.append(np.stack([np.asarray(report.q)[0] for report in step.reports])),
    )
    key = np.concatenate([layer.key[0, : config.key_tokens].swapaxes(0, 1) for layer in reading.layers])
    query = np.stack(asked).transpose(1, 2, 0, 3, 4)  # layers, KV heads, steps, query heads, D
    return key, query.reshape(len(key), -1, key.shape[-1])


def made_up_points(kind: str, points: int, queries: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys [1, T, 64] and queries [1, Q, 64]: `clustered` around 256 centres, or `uniform` in a cube."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((1, queries, 64), np.float32)
    if kind == "uniform":
        return rng.uniform(-1, 1, (1, points, 64)).astype(np.float32), query
    centre = rng.standard_normal((256, 64), np.float32)
    noise = 0.4 * rng.standard_normal((points, 64), np.float32)
    return (centre[rng.integers(0, 256, points)] + noise)[None], query


SEARCHES = {  # label -> (projections, visited share of all points, or None: all of the beam's pages)
    "exact": (0, None),
    "pdci32": (32, 0.15),
    "pdci48": (48, 0.165),
}


def tree_alone(llm: kvjax.LLM, config) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Recall against brute force, share of points visited, comparisons and occupancy, for each way to search."""
    sources = [("real", config.key_tokens), *((kind, n) for kind in ("clustered", "uniform") for n in config.points)]
    keys = functools.cache(lambda: real_keys(llm, config))
    for kind, points in sources:
        for name in SEARCHES:
            def measured(kind=kind, points=points, name=name):
                found = keys() if kind == "real" else made_up_points(kind, points, config.queries, config.seed)
                return _mean([_searched(*pair, name, config.beam) for pair in zip(*found, strict=True)])

            yield {"task": "dci", "method": name, "source": kind, "context": points}, measured


def _searched(key: np.ndarray, query: np.ndarray, name: str, beam: int) -> Row:
    points, (projections, share) = len(key), SEARCHES[name]
    ratio = 1 / 32 if share else 1 / 16  # the points of upper levels are visited beside that share
    shape = dci.Shape(-(-2 * points // 8) + 1, 8, key.shape[-1], ratio, most_levels(points, ratio), projections)
    wide = max(beam, points // 16) if share else beam
    search = dci.Search(wide, 4 * wide, share and round(share * points))
    return {k: float(v) for k, v in _search(shape, search, jnp.asarray(key), jnp.asarray(query)).items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _search(shape: dci.Shape, search: dci.Search, key, query):
    """Figures of one head's tree, means over queries."""
    points = key.shape[0]
    level = dci.draw_levels(jax.random.key(1), jnp.arange(points), shape.ratio, shape.levels)
    tree, page, row = dci.build(shape, jax.random.key(0), key, jnp.ones(points, bool), level)
    number = jnp.full(shape.points, points, jnp.int32).at[page * shape.rows + row].set(jnp.arange(points))

    def one(q):
        found = dci.query(shape, search, tree, dci.transform_query(q[None]))
        at = number.at[found.point.reshape(-1)].get(mode="fill", fill_value=points)
        hit = jnp.zeros(points, bool).at[at].set(True, mode="drop")
        top = jax.lax.top_k(key @ q, min(256, points))[1]
        recalls = {f"recall_{k}": jnp.mean(hit[top[:k]]) for k in (16, 64, 256)}
        return {**recalls, "visited": jnp.sum(hit), "bounds": jnp.sum(found.count) * (shape.projections > 0)}

    found = jax.tree.map(jnp.mean, jax.lax.map(one, query))
    return {**found, "visited_share": found["visited"] / points, "occupancy": occupancy(tree)}


def _mean(rows: list[Row]) -> Row:
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


# ------------------------------------------------------------------------------- hit rate of pages


def pages(llm: kvjax.LLM, config) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Share of the true top 16 and of the attention mass that the loaded pages hold, in all layers of one text."""
    size = config.key_tokens + config.key_steps
    text = needles.random_span(np.random.default_rng(config.seed), common.held_out_tokens(llm), size)
    for budget in config.budgets:
        shared = {"budget": budget, "window": config.window}
        for method in (
            kvjax.icecache(**shared, beam=config.beam, dense_layers=0), kvjax.quest(**shared, page=8),
            kvjax.quest(**shared, page=16), kvjax.oracle(**shared),
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
            "attended_tokens": result.usage.attended_tokens, "resident_bytes": cache.resident_bytes}


# ------------------------------------------------------------------------- time to the second token


def time_to_second_token(config, directory) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Figure 7 a: reading a prompt into a store and decoding one token; layers indexed behind, or one by one."""
    model = functools.cache(lambda: throughput.make_model(config.model_shape))
    budget = max(config.budgets)
    for length in config.prompts:
        for method in (
            kvjax.full(), kvjax.quest(budget=budget), kvjax.dynakv(budget=budget, window=config.window),
            kvjax.icecache(budget=budget, beam=config.beam),
        ):
            head = {"task": "tt2t", "method": _label(method), "context": length, "budget": method.budget}
            yield head, lambda method=method, length=length: _second_token(model(), method, length, config, directory)


def _second_token(llm: kvjax.LLM, method, length: int, config, directory) -> Row:
    """Seconds, medians of warm runs taken in turns, and those of reading the prompt without any cache."""
    tokens = jnp.asarray(np.random.default_rng(config.seed).integers(0, llm.config.vocab_size, (1, length)), jnp.int32)
    store, seconds = common.make_store("flash", directory / "store"), {"pipelined": [], "serial": [], "dense": []}
    for _ in range(config.repeats + 1):
        for kind, times in seconds.items():
            started = time.perf_counter()
            if kind == "dense":
                jax.block_until_ready([one.out for one in prefill.read(llm.config, llm.params, tokens)][-1])
            else:
                _ask(llm, method, tokens, store, kind == "pipelined")
            times.append(time.perf_counter() - started)
    return {"store": "flash", **{f"{kind}_s": float(np.median(times[1:])) for kind, times in seconds.items()}}


def _ask(llm: kvjax.LLM, method, tokens, store, pipelined: bool) -> None:
    """Reads one prompt into the store, decodes a token, and gives everything back."""
    length = tokens.shape[1]
    plan = planning.make_plan(llm.config, method, 1, asking.rounded(length + 8))
    branch = store.create(planning.geometry(plan), "tt2t")
    state, logits = prefill.prefill(
        plan, llm.params, tokens, jnp.full(1, length, jnp.int32), branch, pipelined=pipelined
    )
    done = decode.step(plan, llm.params, state, jnp.argmax(logits, axis=-1).astype(jnp.int32), driver="fused")
    jax.block_until_ready(done.logits)
    branch.close()


# ---------------------------------------------------------------------------------- time per token


def time_per_token(config) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Figure 8, and the growth over the decode with the index updated and frozen; made-up keys, in memory.

    No layer is dense: two of 32 are in the paper, but would be half of this model and hide what is measured. One
    layer's index is built and copied for the others, as building one of 256K tokens takes minutes.
    """
    model = functools.cache(lambda: throughput.make_model(config.model_shape))
    shared = {"budget": max(config.budgets), "beam": config.beam, "dense_layers": 0}
    methods = {
        "full": kvjax.full(),
        "icecache": kvjax.icecache(**shared),
        "icecache_frozen": kvjax.icecache(**shared, update=False),
        "icecache_reuse3": kvjax.icecache(**shared | {"dense_layers": 1}, reuse=3),
    }
    for context, label in itertools.product(config.contexts, config.timed):
        head = {"task": "tpot", "method": label, "context": context, "budget": methods[label].budget}
        yield head, lambda method=methods[label], context=context: _timed(model(), method, context, config.steps)


def _timed(llm: kvjax.LLM, method, context: int, steps: int) -> Row:
    """Milliseconds of a token: median, of the first and the last quarter, and of one layer's parts."""
    started = time.perf_counter()
    plan, state, _, build = throughput.filled_cache(
        llm, method, context, 2 * steps + 4, None, Slots(), copies=True
    )
    filled = time.perf_counter() - started
    resident = planning.resident_bytes(state)
    seconds, state = throughput.time_tokens(llm, plan, state, [i % 7 for i in range(steps + 1)], "fused")
    times, quarter = 1e3 * seconds[1:], max(1, steps // 4)
    return {
        "token_ms": float(np.median(times)), "first_quarter_ms": float(np.median(times[:quarter])),
        "last_quarter_ms": float(np.median(times[-quarter:])), "resident_bytes": resident, "index_build_s": build,
        "fill_s": filled, **throughput.parts(llm, plan, state, None),
    }


def growth(rows: list[Row], pairs) -> Iterator[Row]:
    """How many times as long a step takes at the longer of two contexts, for each (figure, context, context)."""
    timed = {(row["method"], row["context"]): row for row in rows if row["task"] == "tpot"}
    for (method, context), row in timed.items():
        for name, short, long in pairs:
            if context == long and (method, short) in timed:
                ratio = row[name] / timed[method, short][name]
                yield {"task": "growth", "method": method, "context": long, "from_context": short, name: ratio}


# --------------------------------------------------------------------------------------------- run


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Measures every part; re-running skips the rows that are there."""
    llm = common.load_model(config.model)
    parts = {
        "passkey": lambda: passkey(llm, config), "dci": lambda: tree_alone(llm, config),
        "pages": lambda: pages(llm, config), "tt2t": lambda: time_to_second_token(config, run.path),
        "tpot": lambda: time_per_token(config),
    }
    unknown = set(config.parts) - set(parts)
    if unknown:
        raise ConfigError(f"unknown parts {sorted(unknown)}; use some of {', '.join(parts)}")
    run = Run(config, workdir)
    rows = run.logged()
    for part in config.parts:
        for head, measured in parts[part]():
            if not any(head.items() <= row.items() for row in rows):
                rows.append({**head, "store": "memory", "seed": config.seed, **measured()})
                run.log(**rows[-1])
    run.summary([*rows, *growth(rows, config.growth)])
    plot(rows).savefig(run.path / "icecache.png", dpi=100)


def plot(rows: list[Row]) -> Figure:
    """Points visited per query against the points of the tree, and time per token against context."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _curves(left, [row for row in rows if row["task"] == "dci" and row["source"] != "real"], "visited", "source")
    left.set(title="keys compared per query", xlabel="points", xscale="log", yscale="log")
    _curves(right, [row for row in rows if row["task"] == "tpot"], "token_ms", "task")
    right.set(title="ms per token", xlabel="context", xscale="log", yscale="log")
    return figure


def _curves(axes, rows: list[Row], name: str, group: str) -> None:
    for label in sorted({(row[group], row["method"]) for row in rows}):
        mine = sorted((row["context"], row[name]) for row in rows if (row[group], row["method"]) == label)
        axes.plot(*zip(*mine, strict=True), "o-", label=" ".join(label))
    if rows:
        axes.legend(fontsize=8)
