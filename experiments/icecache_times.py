"""IceCache's times: the second token of a prompt, a token's parts, and their growth with context and over a decode."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments import common, throughput
from kvjax import decode, planning, prefill
from kvjax.planning import Slots
from kvjax.tasks import asking

Row = dict


def label(method) -> str:
    """`common.label`, and for how many layers one selection serves."""
    return common.label(method) + (f"_reuse{method.reuse}" if method.reuse > 1 else "")


def second_token(config, directory) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Figure 7 a: reading a prompt into a store and decoding one token; layers indexed behind, or one by one."""
    model = functools.cache(lambda: throughput.make_model(config.model_shape))
    budget = max(config.budgets)
    for length in config.prompts:
        for method in (
            kvjax.full(), kvjax.quest(budget=budget), kvjax.dynakv(budget=budget, window=config.window),
            kvjax.icecache(budget=budget, beam=config.beam),
        ):
            head = {"task": "tt2t", "method": label(method), "context": length, "budget": method.budget}
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


def per_token(config) -> Iterator[tuple[Row, Callable[[], Row]]]:
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
    timed = {(row["method"], row["context"]): row for row in rows if row["part"] == "tpot"}
    for (method, context), row in timed.items():
        for name, short, long in pairs:
            if context == long and (method, short) in timed:
                ratio = row[name] / timed[method, short][name]
                yield {"task": "growth", "method": method, "context": long, "from_context": short, name: ratio}
