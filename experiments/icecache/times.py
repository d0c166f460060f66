"""IceCache's times: the second token of a prompt, and the parts of a token with their growth."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments import common
from experiments.speed import layer_times, made_up, timing
from kvjax.eval.tasks import asking
from kvjax.inference import decode, dense_prefill, prefill
from kvjax.inference.plan import Slots, bytes_of, make_plan, store_geometry

Row = dict


def second_token(config, directory) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Yields Figure 7 a: the time to read a prompt into a store and decode one token, with layers indexed in the
    background or one by one."""
    model = functools.cache(lambda: made_up.make_model(config.model_shape))
    shared = {"budget": max(config.budgets), "dense_layers": 1}  # the same for all, as the variant that reuses needs it
    methods = {
        "full": kvjax.Full(), "quest": kvjax.Quest(**shared), "dynakv": kvjax.DynaKV(**shared, window=config.window),
        "icecache": kvjax.IceCache(**shared, beam=config.beam),
        "icecache_reuse3": kvjax.IceCache(**shared, beam=config.beam, reuse=3),
    }
    for length, (name, method) in itertools.product(config.prompts, methods.items()):
        head = {"task": "tt2t", "method": name, "context": length, "budget": method.budget}
        yield head, lambda method=method, length=length: _second_token(model(), method, length, config, directory)


def _second_token(llm: kvjax.LLM, method, length: int, config, directory) -> Row:
    """Returns the seconds, medians of warm alternating runs, and those of reading the prompt without any cache."""
    tokens = jnp.asarray(np.random.default_rng(config.seed).integers(0, llm.config.vocab_size, (1, length)), jnp.int32)
    store, seconds = common.make_store("flash", directory / "store"), {"pipelined": [], "serial": [], "dense": []}
    for _ in range(config.repeats + 1):
        for kind, times in seconds.items():
            started = time.perf_counter()
            if kind == "dense":
                jax.block_until_ready([layer.out for layer in dense_prefill.read(llm.config, llm.params, tokens)][-1])
            else:
                _ask(llm, method, tokens, store, kind == "pipelined")
            times.append(time.perf_counter() - started)
    return {"store": "flash", **{f"{kind}_s": float(np.median(times[1:])) for kind, times in seconds.items()}}


def _ask(llm: kvjax.LLM, method, tokens, store, pipelined: bool) -> None:
    """Reads one prompt into the store, decodes a token, and closes the branch."""
    length = tokens.shape[1]
    plan = make_plan(llm.config, method, 1, asking.rounded(length + 8))
    branch = store.create(store_geometry(plan), "tt2t")
    state, logits = prefill.prefill(
        plan, llm.params, tokens, jnp.full(1, length, jnp.int32), branch, pipelined=pipelined
    )
    done = decode.step(plan, llm.params, state, jnp.argmax(logits, axis=-1).astype(jnp.int32), driver="fused")
    jax.block_until_ready(done.logits)
    branch.close()


# ---------------------------------------------------------------------------------- time per token


TIMED = ("full", "icecache", "icecache_frozen", "icecache_reuse3")  # the choices of `config.timed`


def per_token(config) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Yields Figure 8, and the growth over the decode with the index updated and frozen; keys are made up, blocks are
    in memory.

    No layer is dense: the paper has two of 32, which would be half of this model and hide the measured part. One
    layer's index is built and copied to the others, as building one of 256K tokens takes minutes.
    """
    model = functools.cache(lambda: made_up.make_model(config.model_shape))
    shared = {"budget": max(config.budgets), "beam": config.beam, "dense_layers": 0}
    methods = dict(zip(TIMED, (
        kvjax.Full(), kvjax.IceCache(**shared), kvjax.IceCache(**shared, update=False),
        kvjax.IceCache(**shared | {"dense_layers": 1}, reuse=3),
    ), strict=True))
    jobs = [("tpot", *combination, config.steps) for combination in itertools.product(config.contexts, config.timed)]
    jobs += [("decode", config.long_context, name, config.long_steps) for name in ("icecache", "icecache_frozen")]
    for task, context, name, steps in jobs:
        head = {"task": task, "method": name, "context": context, "budget": methods[name].budget}
        yield head, lambda args=(methods[name], context, steps): _timed(model(), *args)


def _timed(llm: kvjax.LLM, method, context: int, steps: int) -> Row:
    """Returns the milliseconds of a token: median, of the first and the last quarter, and of one layer's parts."""
    started = time.perf_counter()
    plan, state, _, build = made_up.filled_cache(
        llm, method, context, steps + 2 + layer_times.COMMITS, None, Slots(), copies=True
    )
    filled = time.perf_counter() - started
    resident = bytes_of(state.layers)
    seconds, state = timing.time_tokens(llm, plan, state, [i % 7 for i in range(steps + 1)], "fused")
    times, quarter = 1e3 * seconds[1:], max(1, steps // 4)
    first, last = (float(np.median(part)) for part in (times[:quarter], times[-quarter:]))
    return {
        "token_ms": float(np.median(times)), "first_quarter_ms": first, "last_quarter_ms": last,
        "last_over_first": last / first, "resident_bytes": resident, "occupancy": occupancy(plan, state),
        "index_build_s": build, "fill_s": filled, **layer_times.parts(llm, plan, state, None),
    }


def occupancy(plan, state) -> float:
    """Returns the share of rows with a token among those of blocks in use, in the last layer."""
    count = state.layers[-1].state.count
    return float(jnp.sum(count) / jnp.maximum(jnp.sum(count > 0) * plan.layers[-1].spec.block_rows, 1))


def breakdown(config, directory) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Yields Figure 7 c: one layer's query, loading of all selected pages from flash, and attention; one layer is
    dense."""
    model = functools.cache(lambda: made_up.make_model(config.model_shape))
    shared = {"budget": max(config.budgets), "dense_layers": 1}
    methods = {
        "quest": kvjax.Quest(**shared), "icecache": kvjax.IceCache(**shared, beam=config.beam),
        "icecache_reuse3": kvjax.IceCache(**shared, beam=config.beam, reuse=3),
    }
    for name, method in methods.items():
        head = {"task": "breakdown", "method": name, "context": config.long_context, "budget": method.budget}
        yield head, lambda method=method: _loading(model(), method, config, directory)


def _loading(llm: kvjax.LLM, method, config, directory) -> Row:
    store = common.make_store("flash", directory / "store")
    plan, state, branch, _ = made_up.filled_cache(
        llm, method, config.long_context, config.steps + 1 + layer_times.COMMITS, store, Slots()
    )
    before, moved = branch.stats(), []
    seconds, state = timing.time_tokens(llm, plan, state, [i % 7 for i in range(config.steps)], "fused",
                                        lambda done: moved.append(timing.moved(done)))
    stats = timing.traffic_row(before, branch.stats(), moved, plan)
    row = {"store": "flash", "token_ms": 1e3 * float(np.median(seconds[1:])), **stats,
           **layer_times.parts(llm, plan, state, branch)}
    branch.close()
    return row | {f"fetch_{name}": value for name, value in row.pop("fetch_ms").items()}


def growth(rows: list[Row], pairs) -> Iterator[Row]:
    """Yields the ratio of a step's time at the longer of two contexts to that at the shorter, for each (figure, short,
    long)."""
    timed = {(row["method"], row["context"]): row for row in rows if row["task"] == "tpot"}
    for (method, context), row in timed.items():
        for name, short, long in pairs:
            if context == long and (method, short) in timed:
                ratio = row[name] / timed[method, short][name]
                yield {"task": "growth", "method": method, "context": long, "from_context": short, name: ratio}
