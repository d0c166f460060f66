"""Hit rate of the residency policies against cache size, on the requests of a real decode, beside Belady's optimum.

The reference model decodes held-out library text, teacher-forced, with all blocks in memory: the blocks that a step
needs do not depend on those resident. Every step's needed blocks are recorded for each layer, sequence and head with
blocks of its own, with the rows in each block and the blocks written. The recording is then replayed through
`residency.plan`, the function that serves real decoding, for every policy and number of slots. Slots are empty at the
start, so that first reads count.
"""

import functools

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import kvjax
from experiments import common, plots
from experiments.kvswap.belady import fewest_misses
from experiments.results import Run
from kvjax.cache import residency
from kvjax.errors import ConfigError
from kvjax.eval.tasks import needles
from kvjax.inference import decode
from kvjax.inference.plan import Plan, State, copy_state, on_store, store_geometry
from kvjax.typing import Array, Int32, pytree

_EXTRAS = ("label",)  # of a method's settings


@pytree
class Trace:
    """Requests of a decode to a store. N streams are layers x sequences x heads with blocks of their own; E is the most
    blocks written at once."""

    need: Int32[Array, "T N M1"]  # blocks needed by each step, NB = none
    count: Int32[Array, "T N NB"]  # valid rows of each block at that time
    written: Int32[Array, "T N E"]  # blocks written after it, NB = none


def record(llm: kvjax.LLM, cache: kvjax.Cache, tokens: np.ndarray) -> Trace:
    """Feeds tokens[B, T] one by one and records the blocks that each step needs."""
    state, steps = copy_state(cache.state), []
    before = _tables(cache.plan, state)
    for column in tqdm(tokens.T, desc="record", disable=None):
        state = decode.step(cache.plan, llm.params, state, column, donate=True).state
        after = _tables(cache.plan, state)
        steps.append((after["loaded"], before["count"], np.any(after["pos"] != before["pos"], axis=-1)))
        before = after
    need, count, changed = (np.stack(part) for part in zip(*steps, strict=True))
    return Trace(need, count, _listed(changed))


def _tables(plan: Plan, state: State) -> dict[str, np.ndarray]:
    """Returns tables of the layers whose blocks a store would hold, as streams: one for each head with blocks of its
    own."""
    heads = plan.layers[-1].spec.block_heads
    stored = [layer.state for i, layer in enumerate(state.layers) if on_store(plan, i)]
    parts = {name: np.stack([np.asarray(getattr(layer, name)) for layer in stored])
             for name in ("loaded", "count", "pos")}
    return {name: part[:, :, :heads].reshape(-1, *part.shape[3:]) for name, part in parts.items()}


def _listed(changed: np.ndarray) -> np.ndarray:
    """Returns the numbers of the True entries of changed[T, N, NB], ascending, padded with NB: int32[T, N, E]."""
    most, blocks = max(1, int(changed.sum(-1).max())), changed.shape[-1]
    numbers = np.where(changed, np.arange(blocks, dtype=np.int32), np.int32(blocks))
    return np.sort(numbers, axis=-1)[..., :most]


@functools.partial(jax.jit, static_argnames=("slots", "policy"))
def replay(trace: Trace, *, slots: int, policy: str) -> Int32[Array, "T"]:
    """Returns the blocks read in each step when every stream has `slots` slots."""
    streams, num_blocks = trace.count.shape[1:]

    def step(table, now):
        plan = residency.plan(table, now.need, now.count, policy)
        table = residency.note_written(plan.success, residency.locate(plan.success, now.written))
        return table, jnp.sum(plan.read < num_blocks, dtype=jnp.int32)

    return jax.lax.scan(step, residency.empty(streams, slots, num_blocks), trace)[1]


def best_possible(trace: Trace, slots: int) -> int:
    """Returns the blocks read under Belady's optimum, over all streams."""
    num_blocks = trace.count.shape[-1]
    need = np.asarray(trace.need)
    return sum(fewest_misses(need[:, stream], slots, num_blocks) for stream in range(need.shape[1]))


def draw_text(llm: kvjax.LLM, config: ml_collections.ConfigDict) -> np.ndarray:
    """Returns tokens[B, context + steps] of held-out library text, each sequence from a random place."""
    rng = np.random.default_rng(config.seed)
    stream = common.held_out_tokens(llm)
    start = llm.encode("", start=True)
    size = config.context + config.steps - len(start)
    rows = [[*start, *needles.random_span(rng, stream, size)] for _ in range(config.batch)]
    return np.asarray(rows, np.int32)


def measure(llm: kvjax.LLM, settings, config: ml_collections.ConfigDict) -> list[dict]:
    """Returns one row per policy and number of slots."""
    method, tokens = common.make_method(settings, _EXTRAS), draw_text(llm, config)
    cache = llm.prefill(tokens[:, : config.context].tolist(), method=method, capacity=config.context + config.steps)
    trace = record(llm, cache, tokens[:, config.context :])
    needed = int(np.count_nonzero(trace.need < trace.count.shape[-1]))
    block_bytes = store_geometry(cache.plan).block_bytes
    head = {"method": common.label_of(settings), "store": "replay", "task": "residency", "context": config.context,
            "steps": config.steps, "budget": method.budget, "seed": config.seed, "blocks_needed": needed,
            "blocks_in_use": float(np.mean(np.count_nonzero(trace.count[-1], axis=-1)))}
    on_device, rows = jax.device_put(trace), []
    for slots in sorted({int(trace.need.shape[-1] * times) for times in config.times_needed}):
        missed = {policy: int(replay(on_device, slots=slots, policy=policy).sum()) for policy in residency.POLICIES}
        missed["belady"] = best_possible(trace, slots)
        stream_bytes = slots * block_bytes
        rows += [{**head, "policy": policy, "slots": slots, "hit_rate": 1 - count / needed,
                  "reads_per_token": count / tokens.shape[0] / config.steps,
                  "bytes_read_per_token": count * block_bytes / tokens.shape[0] / config.steps,
                  "resident_bytes": stream_bytes * trace.need.shape[1] // tokens.shape[0]}
                 for policy, count in missed.items()]
    return rows


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError if nothing could be recorded or replayed."""
    if min(config.steps, config.context, config.batch) < 1:
        raise ConfigError(f"context={config.context}, steps={config.steps} and batch={config.batch} must be positive")
    if not config.times_needed or min(config.times_needed) < 1:
        raise ConfigError(f"times_needed={tuple(config.times_needed)} must have numbers of at least 1: a step needs "
                          "all of its blocks at once")


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Records and replays every method that the workdir does not have yet."""
    methods = common.by_label(config.methods)
    common.make_methods(config.methods, _EXTRAS)
    check(config)
    llm = common.load_model(config.model)
    common.check_model(llm, config.methods)
    for settings in config.methods:
        common.check_fit(llm.config, settings, [config.context] * config.batch, config.context + config.steps)
    run = Run(config, workdir, ("methods",))
    rows = run.logged()
    done = {row["method"] for row in rows}
    for settings in [settings for label, settings in methods.items() if label not in done]:
        for row in measure(llm, settings, config):
            rows.append(row)
            run.log(**row)
    run.summary(rows)
    plots.save(plot(rows), run.path / "residency.png")
    print_table(rows)


def plot(rows: list[dict]) -> Figure:
    """Plots hit rate against slots, a panel per method."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure, panels = plots.panels(len(methods))
    looks = plots.styles(row["policy"] for row in rows)
    looks["belady"]["linestyle"] = "--"
    for axes, method in zip(panels, methods, strict=True):
        mine = [row for row in rows if row["method"] == method]
        plots.curves(axes, mine, "slots", "hit_rate", "policy", looks=looks)
        plots.steps(axes, [row["slots"] for row in mine])
        plots.shares(axes)
        axes.set(title=f"{method}, {mine[0]['blocks_in_use']:.0f} blocks in use", xlabel="slots per KV head",
                 ylabel="hit rate")
    return figure


def print_table(rows: list[dict]) -> None:
    """Prints the hit rates, a line per method and number of slots."""
    policies = [*residency.POLICIES, "belady"]
    print(f"{'method':>14}{'slots':>7}" + "".join(f"{policy:>9}" for policy in policies))
    for method, slots in dict.fromkeys((row["method"], row["slots"]) for row in rows):
        rate = {row["policy"]: row["hit_rate"] for row in rows if (row["method"], row["slots"]) == (method, slots)}
        print(f"{method:>14}{slots:>7}" + "".join(f"{rate[policy]:9.3f}" for policy in policies))
