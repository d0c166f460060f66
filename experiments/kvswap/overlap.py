"""Share of the store's reading that is hidden behind computing when the next layer's blocks are read ahead.

Two devices: a reader that sleeps, so slow that a layer's reads take a given share of a layer's computing, and the disk
under the workdir with O_DIRECT. The method looks ahead, so that exactly the prefetched blocks are read; its first layer
is dense, as it has no predecessor. Weights are random; keys are made up as in `experiments.speed.made_up`.
"""

import itertools
import time

import ml_collections
import numpy as np

import kvjax
from experiments import common
from experiments.results import Run
from experiments.speed import made_up, timing
from kvjax.inference import decode
from kvjax.inference.plan import Slots
from kvjax.methods import Quest
from kvjax.models.config import ModelConfig, RopeConfig
from kvjax.store.flash.store import FlashStore
from kvjax.store.io.system import SystemIO


class SleepingReader(SystemIO):
    """A device that answers every read from the page cache, `delay` seconds late."""

    asynchronous = False

    def __init__(self, delay: float):
        self._delay = delay

    def preadv(self, descriptor, views, offset):  # type: ignore[override]
        time.sleep(self._delay)
        return SystemIO.preadv(descriptor, views, offset)


def shape(layers: int, hidden: int) -> ModelConfig:
    """Returns a model's shape with heads of 64."""
    return ModelConfig(
        family="llama", vocab_size=4096, hidden_size=hidden, intermediate_size=4 * hidden, num_layers=layers,
        num_heads=hidden // 64, num_kv_heads=4, head_dim=64, max_position=131_072, tie_embeddings=True,
        rope=RopeConfig(theta=500_000.0),
    )


DEVICES = ("sleeping", "disk")


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError for unknown devices or drivers."""
    common.check_some(config, "devices", "drivers")
    common.check_names(config, "devices", DEVICES)
    for driver in config.drivers:
        decode.check_driver(driver)


def make_store(device: str, delay: float, threads: int, directory) -> FlashStore:
    """Makes a flash store on the device."""
    directory.mkdir(parents=True, exist_ok=True)
    store = FlashStore(directory=directory, direct=device == "disk", threads=threads)
    if device == "sleeping":
        store.system = SleepingReader(delay)
    return store


def decode_tokens(llm, method, config, driver: str, slots: Slots, store=None) -> dict[str, float]:
    """Returns medians over tokens after a warm-up, and the seconds of I/O and of waiting for it per token."""
    plan, state, branch, _ = made_up.filled_cache(llm, method, config.context, config.steps + 8, store, slots)
    tokens = np.random.default_rng(0).integers(0, llm.config.vocab_size, config.steps + 3)
    _, state = timing.time_tokens(llm, plan, state, tokens[:3], driver)
    before, moved = branch.stats() if branch is not None else None, []
    times, _ = timing.time_tokens(llm, plan, state, tokens[3:], driver, lambda done: moved.append(timing.moved(done)))
    row = {"ms_per_token": 1e3 * float(np.median(times))}
    if branch is not None:
        row |= timing.traffic_row(before, branch.stats(), moved, plan)
        branch.close()
    return row


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Measures one row per device, prefetch and driver; devices and drivers that the workdir has are skipped."""
    check(config)
    run, method = Run(config, workdir), Quest(lookahead=True, dense_layers=1, **config.method)
    done = {(row["device"], row["driver"]) for row in run.logged()}
    llm = kvjax.LLM(shape(config.layers, config.hidden), made_up.random_params(shape(config.layers, config.hidden)))
    compute = {driver: decode_tokens(llm, method, config, driver, Slots())["ms_per_token"] for driver in config.drivers}
    requests = config.method.max_blocks * llm.config.num_kv_heads
    delay = 1e-3 * config.io_share * min(compute.values()) / config.layers / -(-requests // config.threads)
    for device, driver in itertools.product(config.devices, config.drivers):
        if (device, driver) in done:
            continue
        both = {}
        for prefetch in ("off", "layer"):
            store = make_store(device, delay, config.threads, run.path / "store")
            both[prefetch] = decode_tokens(llm, method, config, driver, Slots(prefetch=prefetch), store)
        for prefetch, row in both.items():
            # Relative to the run without prefetch, as the end of an asynchronous read is only seen by waiting for it.
            hidden = 1 - row["wait_ms_per_step"] / both["off"]["wait_ms_per_step"]
            run.log(device=device, driver=driver, prefetch=prefetch, method="quest", context=config.context,
                    compute_ms_per_token=compute[driver], hidden_io_fraction=hidden, **row)
    run.summary(run.logged())
    print_table(run.logged())


def print_table(rows: list[dict]) -> None:
    """Prints the figures, a line per row."""
    print(f"{'device':>10}{'driver':>8}{'prefetch':>10}{'ms/token':>10}{'compute':>9}{'I/O':>8}{'waited':>8}{'hidden':>8}")
    for row in rows:
        print(f"{row['device']:>10}{row['driver']:>8}{row['prefetch']:>10}{row['ms_per_token']:10.1f}"
              f"{row['compute_ms_per_token']:9.1f}{row['io_ms_per_step']:8.1f}{row['wait_ms_per_step']:8.1f}"
              f"{row['hidden_io_fraction']:8.2f}")
