"""Time of run-length encoded keys: encoding a prompt, and one layer's token, beside the same cache without runs.

One layer in the model's shape; made-up keys stand in runs of equal ones. A token is appended and attends all others
(`kvjax.attend`) with the method `rle`, and with `full`, which is the same without the codec; "before RoPE" is with runs
of keys that are kept before rotation and rotated as they are used. "Append" is the encoding of the key alone: one
comparison with the open run, whatever the length. "Of a step" is the additional time of a token in a layer over one
layer's share of a decode step with the full cache in memory at that context; the source has 2.8 %. The limit is the
time to read keys and values at the memory's bandwidth.
"""

import statistics
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from matplotlib.figure import Figure

import kvjax
from experiments import plots
from experiments.results import Run
from experiments.speed import made_up, timing
from kvjax.cache.method import Method
from kvjax.inference.plan import Slots
from kvjax.models.config import ModelConfig
from kvjax.ops import rotary
from kvjax.ops import runs as rle
from kvjax.ops.runs import Runs, Tolerance

_WARM_UP = 2


def keys_in_runs(config: ModelConfig, tokens: int, run: int):
    """Returns keys [1, T, K, D] in runs, and values."""
    rng, shape = np.random.default_rng(0), (1, -(-tokens // run), config.num_kv_heads, config.head_dim)
    key = np.repeat(rng.standard_normal(shape, np.float32), run, axis=1)[:, :tokens]
    return jnp.asarray(key), jnp.asarray(rng.standard_normal(key.shape, np.float32))


def cached(config: ModelConfig, method: Method, key, value, more: int) -> kvjax.AttentionCache:
    """Returns a layer's cache of a prompt, with room for `more` tokens."""
    tokens, heads, size = key.shape[1:]
    cache = kvjax.init_cache(
        method, batch=1, kv_heads=heads, group=config.group, head_dim=size, capacity=tokens + more, rope=config.rope
    )
    return kvjax.prefill_cache(cache, key, value, jnp.asarray([tokens]))


def milliseconds(config: ModelConfig, step, cache, repeats: int) -> float:
    """Returns the median of a compiled step from (cache, q, key, value) to (out, cache), which gets its own cache
    back."""
    rng, times = np.random.default_rng(1), []
    q = jnp.asarray(rng.standard_normal((1, config.num_heads, config.head_dim)), jnp.float32)
    key = jnp.asarray(rng.standard_normal((1, config.num_kv_heads, config.head_dim)), jnp.float32)
    step = jax.jit(step, donate_argnums=0)
    for _ in range(repeats + _WARM_UP):
        start = time.perf_counter()
        _, cache = jax.block_until_ready(step(cache, q, key, key))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[_WARM_UP:])


def append(runs: Runs, q, key, value):
    """Encodes the key of a token, and does nothing else."""
    return (), jax.vmap(lambda head, key: rle.append(head, key, Tolerance()))(runs, key[0])


def without_runs(config: ModelConfig, tokens: int, repeats: int) -> float:
    """Returns the milliseconds of a token with `full`."""
    cache = cached(config, kvjax.Full(), *keys_in_runs(config, tokens, 1), repeats + _WARM_UP)
    return milliseconds(config, kvjax.attend, cache, repeats)


def with_runs(config: ModelConfig, key, value, run: int, repeats: int) -> dict[str, float]:
    """Returns the microseconds per prompt token of encoding one layer's keys, those of appending one, and the
    milliseconds of a token with keys after and before rotation."""
    more, length = repeats + _WARM_UP, jnp.int32(key.shape[1])
    slots = -(-key.shape[1] // run) + more
    encode = jax.jit(jax.vmap(lambda head: rle.encode(head, length, Tolerance(), slots)))
    encoded = timing.median_ms(encode, key[0].swapaxes(0, 1), repeats=5)
    # Rotated first, as a model's keys are; rotated back they are equal up to rounding.
    rotated = cached(config, kvjax.RLE(slots=slots), key, value, more)
    freqs, position = rotary.inverse_frequencies(config.head_dim, config.rope), jnp.arange(key.shape[1])[None]
    unrotated = cached(config, kvjax.RLE(slots=slots, before_rotation=True, tolerance=1e-3),
                       rotary.rotate(key, position, freqs), value, more)
    return {
        "encode_us": 1e3 * encoded / key.shape[1],
        "append_us": 1e3 * milliseconds(config, append, encode(key[0].swapaxes(0, 1)), repeats),
        "token_ms": milliseconds(config, kvjax.attend, rotated, repeats),
        "unrotated_ms": milliseconds(config, kvjax.attend, unrotated, repeats),
    }


def step_ms(llm, tokens: int, repeats: int) -> float:
    """Returns one layer's share of a decode step, in milliseconds."""
    plan, state, _, _ = made_up.filled_cache(llm, kvjax.Full(), tokens, repeats + 4, None, Slots(), copies=True)
    times, _ = timing.time_tokens(llm, plan, state, [0] * (repeats + 3), "fused")
    return 1e3 * float(np.median(times[3:])) / llm.config.num_layers


def measure(llm, tokens: int, config, bandwidth: float) -> Iterator[dict]:
    """Yields a row for each length of the runs."""
    plain, step = without_runs(llm.config, tokens, config.repeats), step_ms(llm, tokens, config.repeats)
    for run in config.runs:
        key, value = keys_in_runs(llm.config, tokens, run)
        row = with_runs(llm.config, key, value, run, config.repeats)
        shares = {f"{name}_of_step": (row[f"{name}_ms"] - plain) / step for name in ("token", "unrotated")}
        limit = 1e3 * value.nbytes * (1 + 1 / run) / bandwidth
        yield {"context": tokens, "run": run, **row, "plain_ms": plain, "step_ms": step, "limit_ms": limit, **shares}


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Measures every length that the workdir does not have yet."""
    llm, run, bandwidth = made_up.make_model(config.model), Run(config, workdir), timing.memory_bandwidth()
    rows = run.logged()
    for tokens in sorted(set(config.tokens) - {row["context"] for row in rows}):
        for row in list(measure(llm, tokens, config, bandwidth)):
            rows.append({"task": "overhead", "method": "rle", "store": "memory", "budget": None, "seed": 0, **row})
            run.log(**rows[-1])
    run.summary(rows)
    plots.save(plot(rows), run.path / "overhead.png")
    print(f"memory bandwidth of a matrix-vector product: {bandwidth / 1e9:.1f} GB/s")
    print_table(sorted(rows, key=lambda row: (row["context"], row["run"])))


def plot(rows: list[dict]) -> Figure:
    """Plots the times against the context, a line for each length of the runs."""
    shown = (("token_ms", "token of a layer, ms"), ("unrotated_ms", "the same, keys before RoPE, ms"),
             ("token_of_step", "beyond full, share of a step"), ("encode_us", "encoding, us per prompt token"),
             ("append_us", "appending a key, us"))
    figure, panels = plots.panels(len(shown))
    looks = plots.styles(map(_run, rows))
    for axes, (y, title) in zip(panels, shown, strict=True):
        plots.curves(axes, rows, "context", y, _run, looks=looks)
        if y in ("token_ms", "unrotated_ms"):
            plots.curves(axes, rows, "context", "plain_ms", lambda row: "full",
                         looks={"full": {**plots.styles(["full"])["full"], "linestyle": "--"}})
        plots.steps(axes, [row["context"] for row in rows])
        axes.set(xlabel="context, tokens", ylabel=title)
    return figure


def _run(row: dict) -> str:
    return f"runs of {row['run']}"


def print_table(rows: list[dict]) -> None:
    """Prints the figures, a line per row."""
    print(f"{'tokens':>7}{'run':>5}{'encode us/token':>17}{'append us':>11}{'token ms':>10}{'without':>9}{'limit':>7}"
          f"{'of a step':>11}{'before RoPE':>13}{'of a step':>11}")
    for row in rows:
        print(f"{row['context']:7,}{row['run']:5}{row['encode_us']:17.2f}{row['append_us']:11.0f}{row['token_ms']:10.2f}"
              f"{row['plain_ms']:9.2f}{row['limit_ms']:7.2f}{row['token_of_step']:11.1%}{row['unrotated_ms']:13.2f}"
              f"{row['unrotated_of_step']:11.1%}")
