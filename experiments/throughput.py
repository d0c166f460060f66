"""Decode speed of methods x stores x contexts, beside the physical limits of the machine.

Caches are filled with made-up keys in clumps that drift along the sequence (random weights make no
meaningful ones), so that a context of any length costs no dense prefill. Every figure is a median
over steps after a warm-up; compile time is apart. Limits are measured in the same run: memory
bandwidth by a matrix-vector product, disk bandwidth by raw threaded reads of the store's block size.
"""

import dataclasses
import functools
import importlib.util
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

import kvjax
from experiments import common, raw_disk, replay
from experiments.replay import Replay
from experiments.results import Run
from kvjax import decode, layer, packing, parking, planning, prefill
from kvjax.cache import Fresh
from kvjax.errors import ConfigError
from kvjax.layer import LayerCache, Prompts
from kvjax.models import hf_config
from kvjax.models.config import ModelConfig, RopeConfig
from kvjax.models.transformer import Transformer, apply_rows
from kvjax.planning import Slots, State
from kvjax.pool import Line
from kvjax.store import base, fifo
from kvjax.store.callbacks import default_backend
from kvjax.store.slots import SlotPool

_GRID = ("models", "methods", "contexts", "batches", "stores", "transformers")
_EXTRAS = ("label", "slots", "dtype", "replay", "only")  # of a method's settings
_DTYPES = ("float32", "bfloat16", "float16")  # of weights
COMMITS = 26  # tokens that a layer's commit is timed with; the first compiles
_LATE = 0.2  # of an emulated device's commands; beyond it, times are more the host's than the device's
_SHAPES = {  # hidden size, query heads, head size and MLP size, 0 without
    "llama-1b-4l": (2048, 32, 64, 8192), "llama-3b-4l": (3072, 24, 128, 8192), "llama-8b-4l": (4096, 32, 128, 14_336),
    "cache-path": (2048, 32, 64, 0), "cache-path-8b": (4096, 32, 128, 0),
}
_WARM_UP = 4  # steps that no median counts, the one that compiles included


def shape(name: str) -> ModelConfig:
    """The random-weight shapes: Llama-3.2-1B and 3B and Llama-3-8B cut to 4 layers and a small vocabulary; "cache-path"
    is without MLP."""
    if name not in _SHAPES:
        raise ConfigError(f"unknown shape {name!r}; use reference, {', '.join(_SHAPES)}")
    hidden, heads, head_dim, mlp = _SHAPES[name]
    return ModelConfig(
        family="llama", vocab_size=4096, hidden_size=hidden, intermediate_size=mlp or 8192, num_layers=4,
        num_heads=heads, num_kv_heads=8, head_dim=head_dim, max_position=131_072, tie_embeddings=True, use_mlp=mlp > 0,
        rope=RopeConfig(theta=500_000.0),
    )


def model_config(name: str) -> ModelConfig:
    """Of what `make_model` makes, without its weights. Raises ConfigError for an unknown name."""
    return hf_config.read_config(common.REFERENCE) if name == "reference" else shape(name)


def make_model(name: str, dtype: str = "float32") -> kvjax.LLM:
    """The reference model, or a shape with random weights; `dtype` is that of its weights."""
    if name == "reference":
        return common.load_model("", dtype)
    return kvjax.LLM(shape(name), random_params(shape(name), dtype))


def random_params(config: ModelConfig, dtype: str = "float32"):
    """Normal weights of the size that keeps activations steady, norms around one."""
    token = jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), token, token)["params"]
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(0)
    made = [rng.standard_normal(leaf.shape, np.float32) * 0.02 + (leaf.ndim == 1) for leaf in leaves]
    made = [jnp.asarray(one, dtype) for one in made]
    return jax.tree.unflatten(tree, made)


def made_up_keys(config: ModelConfig, tokens: int, seed: int, run: float = 1.0):
    """Keys and values `[1, T, K, D]` of one layer: clumps of nearby keys that drift. `run` neighbours on average are of
    one clump."""
    rng = np.random.default_rng(seed)
    heads, size = config.num_kv_heads, config.head_dim
    centres = rng.standard_normal((256, heads, size), np.float32)
    clump = rng.integers(0, 256, tokens)
    if run > 1:
        clump = clump[np.cumsum(rng.random(tokens) < 1 / run) - 1]
    key = centres[clump] + 0.4 * rng.standard_normal((tokens, heads, size), np.float32)
    key += np.linspace(0, 0.5, tokens, dtype=np.float32)[:, None, None]
    return jnp.asarray(key[None]), jnp.asarray(rng.standard_normal((1, tokens, heads, size), np.float32))


def filled_cache(
    llm, method, context: int, steps: int, store, slots: Slots, batch: int = 1, dtype: str = "float32",
    copies: bool = False, run: float = 1.0,
):
    """A plan and a state that holds `context` made-up tokens per sequence; seconds per layer of index building.

    With `copies`, and in memory only, layers that are planned alike are copies of the first of them. `run`: see
    `made_up_keys`.
    """
    plan = planning.make_plan(llm.config, method, batch, context + steps, dtype)
    branch = store.create(planning.geometry(plan), "throughput") if store is not None else None
    layers, seconds, length = [], [], jnp.full(batch, context, jnp.int32)
    for i in range(llm.config.num_layers):
        twin = plan.layers.index(plan.layers[i])
        if copies and twin < i:
            layers.append(jax.tree.map(jnp.copy, layers[twin]))
            continue
        made = [made_up_keys(llm.config, context, i + b * llm.config.num_layers, run) for b in range(batch)]
        key, value = (jnp.concatenate(rows) for rows in zip(*made, strict=True))
        started = time.perf_counter()
        leader = layers[-1].state if plan.layers[i].follows else None
        layers.append(jax.block_until_ready(
            prefill.fill(plan, i, Prompts(key, value, length), leader, branch, slots)
        ))
        seconds.append(time.perf_counter() - started)
    if branch is not None:
        branch.settle()  # reads wait for what is still being written, which is nothing in most of a decode
    line = Line(jnp.int32(branch.handle if branch else -1), jnp.int32(0))
    layers = parking.park_all(slots.park, layers) if slots.park else tuple(layers)
    return plan, State(layers, length, line), branch, float(np.min(seconds))


def time_tokens(llm, plan, state, tokens, driver: str, observe: Callable[[decode.Step], None] | None = None):
    """Seconds of decoding each of `tokens`, and the state after them; the first one may compile.

    `observe` is called after each token, apart from the time.
    """
    times = []
    for token in tokens:
        started = time.perf_counter()
        fed = jnp.full(plan.batch, token, jnp.int32)
        done = decode.step(plan, llm.params, state, fed, driver=driver, donate=True)
        state = jax.block_until_ready((done.state, done.logits))[0]
        times.append(time.perf_counter() - started)
        if observe is not None:
            observe(done)
    return np.asarray(times), state


def needed_and_read(done: decode.Step) -> tuple[int, int]:
    """Blocks that a token needed of a store in all layers, and those of them that were read."""
    layers = zip(done.reports, done.state.layers, strict=True)
    traffic = jax.device_get([report.traffic for report, one in layers if isinstance(one.pool, SlotPool)])
    return sum(int(one.requested.sum()) for one in traffic), sum(int(one.missed.sum()) for one in traffic)


def came_back(traffic: list[tuple[int, int]]) -> float:
    """Share of the blocks needed that were not read, given `needed_and_read` of tokens."""
    needed, read = np.sum(traffic, axis=0)
    return 1.0 - float(read) / max(1, int(needed))


@jax.jit
def _fetch(pool, need, count, number, line):
    return pool.fetch(need, count, number, line)


@functools.partial(jax.jit, static_argnums=0)
def _whole_read(layer_plan, cache, q, key, value, at, number, line):
    return layer.read(layer_plan, cache, q, key, value, at, number, line)[0]


def call_ms(function, *args, repeats: int = 25) -> np.ndarray:
    """Milliseconds of each call of a compiled function, warm."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(1e3 * (time.perf_counter() - started))
    return np.asarray(times)


def median_ms(function, *args, repeats: int = 25) -> float:
    """Median milliseconds of a compiled function, warm."""
    return float(np.median(call_ms(function, *args, repeats=repeats)))


def parts(llm, plan, state: State, branch) -> dict[str, float]:
    """Milliseconds of one layer's select, fetch, attend and commit; the store is not to be used afterwards."""
    last = max(i for i, one in enumerate(plan.layers) if not one.follows)  # followers do not select
    rng, one, layer_plan = np.random.default_rng(0), state.layers[last], plan.layers[last]
    config, number = llm.config, jnp.int32(last)
    q = jnp.asarray(rng.standard_normal((plan.batch, config.num_heads, config.head_dim), np.float32))
    key = jnp.asarray(rng.standard_normal((plan.batch, config.num_kv_heads, config.head_dim), np.float32))
    line, at = state.line, state.length
    choice = layer.choose(layer_plan, one.state, q)
    pool, slot, _, _ = _fetch(one.pool, choice.need, one.state.count, number, line)
    cache = dataclasses.replace(one, pool=pool)
    found = {
        "select_ms": median_ms(layer.choose, layer_plan, one.state, q),
        "attend_ms": median_ms(layer.answer, layer_plan, cache, choice, q, key, key, slot, at),
        "layer_read_ms": median_ms(_whole_read, layer_plan, cache, q, key, key, at, number, line),
    }
    if isinstance(pool, SlotPool):
        found["plan_ms"] = median_ms(jax.jit(SlotPool.plan), pool, choice.need, one.state.count)
    if branch is not None:
        found["fetch_ms"] = cold_fetch_ms(one, choice.need, number, line, branch)
    fresh = layer.read(layer_plan, cache, q, key, key, at, number, line, choice)[2]
    return found | {"commit_ms": commit_ms(layer_plan, cache, fresh, at, number, line, branch)}


def commit_ms(layer_plan, cache: LayerCache, fresh: Fresh, at, number, line: Line, branch) -> float:
    """One layer's end of a token: its key is placed, clusters are adapted, the store commits. Median of tokens that
    follow each other."""
    write = jax.jit(layer.write, static_argnums=0, donate_argnums=1)
    cache, gate, times = jax.tree.map(jnp.copy, cache), jnp.ones(at.shape, bool), []
    for i in range(COMMITS):
        started, now = time.perf_counter(), dataclasses.replace(line, generation=line.generation + i)
        cache = jax.block_until_ready(write(layer_plan, cache, fresh, at + i, gate, number, now))[0]
        if branch is not None:
            branch.commit(int(now.generation))
        times.append(1e3 * (time.perf_counter() - started))
    return float(np.median(times[1:]))


def cold_fetch_ms(cache: LayerCache, need, number, line, branch, repeats: int = 15) -> dict[str, float]:
    """One layer's fetch with no block resident: whole call, and the share inside the store's read."""
    empty, count = cache.pool.emptied(), cache.state.count
    donated = jax.jit(lambda pool, need: pool.fetch(need, count, number, line)[:3], donate_argnums=0)
    jax.block_until_ready(donated(jax.tree.map(jnp.copy, empty), need))
    calls, inside = [], []
    for _ in range(repeats):
        fresh = jax.block_until_ready(jax.tree.map(jnp.copy, empty))
        before, started = branch.stats(), time.perf_counter()
        jax.block_until_ready(donated(fresh, need))
        calls.append(1e3 * (time.perf_counter() - started))
        after = branch.stats()
        inside.append(1e3 * (after.read_seconds - before.read_seconds))
    blocks = int(jnp.sum(cache.pool.own(need) < count.shape[-1]))  # of the store: one where heads share it
    size = (after.bytes_read - before.bytes_read) / max(1, blocks)
    return {"call": float(np.median(calls)), "store": float(np.median(inside)), "blocks": blocks, "block_bytes": size}


def memory_bandwidth() -> float:
    """Bytes per second of a product of 256 MiB of f32 with one vector, row by row: what decoding is bound by.

    The fastest of some: a limit is what can be had, not what was left by whatever else ran.
    """
    matrix, vector = jnp.ones((8192, 8192)), jnp.ones((1, 8192))
    return matrix.nbytes / (1e-3 * float(np.min(call_ms(jax.jit(apply_rows), matrix, vector, repeats=31))))


def weight_bytes(llm) -> int:
    """Bytes of weights that one token reads: all but the embedding rows it does not use."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params))
    return total if llm.config.tie_embeddings else total - llm.params["embedding"]["embedding"].nbytes


def kv_bytes(config: ModelConfig, tokens: float, dtype: str = "float32") -> float:
    """Bytes of keys and values of `tokens` tokens in all layers."""
    vector = packing.width(dtype, config.head_dim) * base.DTYPES[packing.stored_type(dtype)].itemsize
    return 2.0 * config.num_layers * config.num_kv_heads * vector * tokens


def time_drivers(llm, plan, state: State, config):
    """A row of times, the state after them, and `needed_and_read` of every token. Seconds of `config.outputs` tokens
    count every one but the first, which compiles."""
    row, traffic = {}, []
    tokens = np.random.default_rng(0).integers(llm.config.vocab_size, size=config.steps + 1).tolist()
    for driver in config.drivers:
        (compiled, *times), state = time_tokens(
            llm, plan, state, tokens, driver, lambda done: traffic.append(needed_and_read(done))
        )
        row |= {f"{driver}_{tokens}_s": float(np.sum(times[:tokens])) for tokens in config.get("outputs", ())}
        times = 1e3 * np.asarray(times[_WARM_UP - 1 :])
        row |= {f"{driver}_ms": float(np.median(times)), f"{driver}_p90_ms": float(np.percentile(times, 90)),
                f"{driver}_compile_s": compiled}
    return row, state, traffic


def room(config) -> int:
    """Tokens that follow the made-up ones in a sequence."""
    return len(config.drivers) * (config.steps + 1) + COMMITS


def measure(llm, name: str, settings, store_name: str, context: int, batch: int, config, path, bandwidth) -> dict:
    """One row; store and recordings are under `path`."""
    method, directory = replay.make(settings, config, llm.config, context, path / "recordings"), path / "store"
    staging = {"staging_bytes": config.staging_mib << 20} if "staging_mib" in config else {}
    store = common.make_store(store_name, directory, **staging)
    slots, dtype = common.make_slots(settings, config.slots), common.dtype_of(settings)
    plan, state, branch, build = filled_cache(
        llm, method, context, room(config), store, slots, batch, dtype, run=config.get("clump_run", 1.0)
    )
    state = replay.stagger(method, state) if isinstance(method, Replay) else state
    resident, before = planning.resident_bytes(state), branch.stats() if branch is not None else None
    commands = common.commands_of(store)
    row, state, traffic = time_drivers(llm, plan, state, config)
    best = min(row[f"{driver}_ms"] for driver in config.drivers)
    attended = min(method.budget or context, context)
    limit = 1e3 * (weight_bytes(llm) + batch * kv_bytes(llm.config, attended, dtype)) / bandwidth
    after, disk = branch.stats() if branch is not None else None, common.disk_of(store, commands)
    if branch is not None:
        row["store_bytes"] = branch.held_bytes
    if config.get("temporaries", False):
        row["temporary_bytes"] = decode.temporary_bytes(plan, llm.params, state)
    row |= parts(llm, plan, state, branch)
    row |= {"tokens_per_s": batch * 1e3 / best, "limit_ms": limit, "times_limit": best / limit}
    if branch is not None:
        row |= traffic_row(before, after, len(traffic), batch) | reuse_row(method, plan, slots, context, traffic)
        row |= disk | fetch_row(store, row.pop("fetch_ms"), directory)
        branch.close()
    head = {"model": name, "method": common.label_of(settings), "store": store_name, "context": context}
    return {**head, "task": "throughput", "budget": method.budget, "seed": 0, "resident_bytes": resident,
            "batch": batch, "index_build_s": build, "block_ms": best / llm.config.num_layers, **row}


def traffic_row(before: base.Stats, after: base.Stats, steps: int, batch: int = 1) -> dict:
    """What the store did for each of so many steps, of a token in each sequence; useful bytes are those of the blocks
    without padding.

    A step waits for `wait_ms_per_step` of the device's `io_ms_per_step`: the rest is hidden behind computing. Of
    `store_ms_per_step`, inside the store's reads, what is no waiting is finding, verifying and copying.
    """
    seconds, tokens = max(after.io_seconds - before.io_seconds, 1e-9), steps * batch
    return {
        "bytes_read_per_token": (after.bytes_read - before.bytes_read) / tokens,
        "useful_bytes_per_read": (after.bytes_useful - before.bytes_useful) / max(1, after.reads - before.reads),
        "bytes_put_per_token": (after.bytes_put - before.bytes_put) / tokens,
        "reads_per_token": (after.reads - before.reads) / tokens,
        "mispredicted_per_token": (after.mispredicted - before.mispredicted) / tokens,
        "store_ms_per_step": 1e3 * (after.read_seconds - before.read_seconds) / steps,
        "io_ms_per_step": 1e3 * seconds / steps,
        "wait_ms_per_step": 1e3 * (after.wait_seconds - before.wait_seconds) / steps,
        "effective_bandwidth": (after.bytes_useful - before.bytes_useful) / seconds,
    }


def reuse_row(method, plan: planning.Plan, slots: Slots, context: int, traffic: list[tuple[int, int]]) -> dict:
    """Share of the needed blocks that were not read, after the warm-up; of a replay over a FIFO also what it has to be,
    by the recording alone."""
    row = {"reuse_rate": came_back(traffic[_WARM_UP:])}
    if isinstance(method, Replay) and slots.keep and slots.policy == "fifo":
        need = replay.asked(method, len(plan.layers), context, plan.batch, len(traffic))
        count = slots.count or plan.layers[-1].spec.max_blocks + 1
        row["recorded_reuse_rate"] = fifo.rate(need, count, skip=_WARM_UP)
    return row


def fetch_row(store, fetch: dict, directory) -> dict:
    """One layer's cold fetch; of a store on disk beside raw reads of as many blocks of as many pages on average."""
    row = {
        "fetch_ms": fetch["call"], "fetch_in_store_ms": fetch["store"], "fetch_blocks": fetch["blocks"],
        "fetch_beyond_store_us": 1e3 * (fetch["call"] - fetch["store"]), "block_bytes": fetch["block_bytes"],
    }
    if not isinstance(store, kvjax.FlashStore):
        return row
    size = base.PAGE_BYTES * max(1, round(fetch["block_bytes"] / base.PAGE_BYTES))
    raw = raw_disk.read_seconds(directory, size, fetch["blocks"], threads=4, system=store.system)
    return {**row, "raw_read_ms": 1e3 * raw}


def transformers_row(llm, name: str, context: int, steps: int) -> dict | None:
    """The same checkpoint decoded by transformers over as long a cache; None where it is not installed."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        return None
    if not llm.config.use_mlp or jax.tree.leaves(llm.params)[0].dtype != jnp.float32:
        return None  # there is no such transformers model, and the others are compared in f32
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    with tempfile.TemporaryDirectory() as directory:
        kvjax.save(llm, directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    cache = DynamicCache()
    for i in range(llm.config.num_layers):
        key, value = (torch.tensor(np.asarray(x)).swapaxes(1, 2) for x in made_up_keys(llm.config, context, i))
        cache.update(key, value, i)
    times = []
    with torch.no_grad():
        for i in range(steps):
            position = torch.tensor([[context + i]])
            started = time.perf_counter()
            model(input_ids=torch.tensor([[i % 7]]), past_key_values=cache, position_ids=position)
            times.append(1e3 * (time.perf_counter() - started))
    found = float(np.median(times[3:]))
    return {"model": name, "method": "transformers", "store": "memory", "context": context, "task": "throughput",
            "budget": None, "seed": 0, "batch": 1, "torch_ms": found, "tokens_per_s": 1e3 / found,
            "threads": torch.get_num_threads()}


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError or PromptError on settings with which nothing could be measured."""
    common.check_some(config, "models", "methods", "stores", "drivers")
    common.check_counts(config, steps=_WARM_UP, batches=1, contexts=1, slots=0)  # fewer steps would all be warm-up
    for settings in common.by_label(config.methods).values():
        common.make_method(settings, _EXTRAS)
        common.make_slots(settings, config.slots)
        replay.check(settings, config)
    if config.get("dtype", "float32") not in _DTYPES:
        raise ConfigError(f"dtype={config.dtype!r} is no type of weights; use one of {', '.join(_DTYPES)}")
    for store, driver in itertools.product(config.stores, config.drivers):
        common.check_store(store)
        decode.check_driver(driver)
    for name in config.models:
        check_fit(model_config(name), config)


def check_fit(model: ModelConfig, config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError or PromptError where a method, its type or slots do not fit the model or a context."""
    for context, batch, store, settings in _combinations(config):
        slots = None if store == "memory" else common.make_slots(settings, config.slots)
        common.check_fit(model, settings, [context] * batch, context + room(config), slots=slots)
        replay.check_context(settings, context)


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Measures every combination; re-running skips the rows that are there."""
    check(config)
    replay.check_model(config)
    run = Run(config, workdir, _GRID)
    rows, bandwidth = run.logged(), memory_bandwidth()
    done = {_key(row) for row in rows}
    print(f"memory bandwidth of a matrix-vector product: {bandwidth / 1e9:.1f} GB/s; callbacks: {default_backend()}")
    for name in config.models:
        llm = make_model(name, config.get("dtype", "float32"))
        for context, batch, store, settings in _combinations(config):
            head = {"model": name, "method": common.label_of(settings), "store": store, "context": context}
            if _key({**head, "batch": batch}) not in done:
                row = measure(llm, name, settings, store, context, batch, config, run.path, bandwidth)
                rows.append({**row, "memory_bandwidth": bandwidth})
                run.log(**rows[-1])
        for context in config.contexts if config.transformers else ():
            if (name, "transformers", "memory", context, 1) not in done:
                other = transformers_row(llm, name, context, config.steps)
                if other is not None:
                    rows.append(other)
                    run.log(**other)
    run.summary(rows)
    print_table(rows)


def _key(row: dict) -> tuple:
    return row["model"], row["method"], row["store"], row["context"], row["batch"]


def _combinations(config) -> Iterator[tuple]:
    """(context, batch, store, settings) of every row; "only" of a method's settings has the contexts, batches and
    stores that it is measured with, where these are not all."""
    for context, batch, store, settings in itertools.product(
        config.contexts, config.batches, config.stores, config.methods
    ):
        only = settings.get("only", {})
        row = {"contexts": context, "batches": batch, "stores": store}
        if all(value in only.get(name, (value,)) for name, value in row.items()):
            yield context, batch, store, settings


def print_table(rows: list[dict]) -> None:
    """The figures that matter, a line per row."""
    width = 2 + max((len(row["method"]) for row in rows), default=6)
    print(f"{'model':>12}{'method':>{width}}{'store':>24}{'context':>9}{'batch':>6}{'ms/token':>10}{'limit':>8}{'select':>8}"
          f"{'attend':>8}{'commit':>8}{'fetch':>8}{'raw':>8}{'wait':>8}{'reuse %':>8}{'late %':>8}{'KV MiB':>9}"
          f"{'store MiB':>10}")
    for row in rows:
        cells = [row.get(key) for key in ("limit_ms", "select_ms", "attend_ms", "commit_ms", "fetch_ms",
                                          "raw_read_ms", "wait_ms_per_step")]
        cells.extend(100 * row[key] if key in row else None for key in ("reuse_rate", "late_share"))
        shown = "".join(f"{cell:8.2f}" if cell is not None else f"{'-':>8}" for cell in cells)
        resident = f"{row['resident_bytes'] / 2**20:9.1f}" if "resident_bytes" in row else f"{'-':>9}"
        resident += f"{row['store_bytes'] / 2**20:10.1f}" if "store_bytes" in row else f"{'-':>10}"
        print(f"{row['model']:>12}{row['method']:>{width}}{row['store']:>24}{row['context']:>9,}{row['batch']:>6}"
              f"{1e3 / row['tokens_per_s']:10.2f}{shown}{resident}")
    if any(row.get("late_share", 0.0) > _LATE for row in rows):
        print(f"late % above {100 * _LATE:.0f}: the disk under an emulated device is slower than that device; put "
              "--workdir on a RAM disk (docs/store.md), or other work away")
