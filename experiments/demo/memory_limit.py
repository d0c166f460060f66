"""The limit of memory: what a cache over a store takes, and how many slots are left for it."""

import math

import ml_collections

import kvjax
from experiments import common
from experiments.demo.job import Job, capacity
from kvjax.errors import ConfigError
from kvjax.inference.plan import Plan, bytes_of, check_plan, make_plan, outline, store_geometry
from kvjax.store.io.workers import ArenaStack

EXTRAS = ("label", "slots", "dtype")  # of a method's settings
MIB = 2**20
STAGING_BYTES = 3 << 19  # so that no write is in the way of an answer's reads, and memory has a bound
THREADS = 1
# What the store's thread reads into where an asynchronous read was cut short, or met a block that had just been moved.
_ARENA_BYTES = 2 * ArenaStack.MAX_BYTES
_MEMORY = 20.0  # MiB for the needles: full attention takes up to 19.5, its slots for one layer and what reads land in
_TABLE_BYTES = 64  # of the store's tables for each block, at most


def limit_of(config: ml_collections.ConfigDict) -> int:
    """Returns the bytes that a method's cache may take; 0 = no limit."""
    if config.memory < 0:
        return 0 if config.prompt_file or common.check_store(config.store)[0] != "flash" else round(_MEMORY * MIB)
    return round(config.memory * MIB)


def store_bytes_at_most(plan: Plan) -> int:
    """Returns a bound of the memory that the store takes: tables, rows to be written, and what reads land in."""
    geometry = store_geometry(plan)
    step = max(min(layer.spec.num_blocks, layer.spec.max_blocks + 1) for layer in plan.layers)
    fetches = 1 + (geometry.layers if plan.method.lookahead else 0)  # at a time; each layer may be guessed ahead
    blocks = geometry.layers * geometry.batch * geometry.kv_heads * geometry.num_blocks
    landing = fetches * geometry.batch * geometry.kv_heads * step * geometry.extent_bytes
    return _TABLE_BYTES * blocks + STAGING_BYTES + _ARENA_BYTES + landing


def resident_bytes(plan: Plan, slots: kvjax.Slots) -> int:
    """Returns the bytes that a cache over a store takes in memory with these slots."""
    return bytes_of(tuple(outline(plan, i, True, slots) for i in range(len(plan.layers))))


def fit_slots(plan: Plan, limit: int, label: str) -> kvjax.Slots:
    """Chooses as many slots as a memory limit leaves.

    Where not even the slots of one step fit for each layer, all layers share those of one and nothing is kept between
    steps (FlexGen).

    Args:
      plan: static part of the cache.
      limit: bytes.
      label: name of the method, for the error.

    Returns:
      The slots.

    Raises:
      ConfigError: the method needs more memory.
    """
    left, specs = limit - store_bytes_at_most(plan), [layer.spec for layer in plan.layers]
    least, most = (max(getattr(spec, name) for spec in specs) + 1 for name in ("max_blocks", "num_blocks"))
    kept = resident_bytes(plan, kvjax.Slots(count=least))
    if kept <= left:
        each = resident_bytes(plan, kvjax.Slots(count=least + 1)) - kept
        return kvjax.Slots(count=max(least, min(most, least + (left - kept) // each)))
    shared = kvjax.Slots(keep=False)
    needed = min(kept, resident_bytes(plan, shared)) + limit - left
    if needed > limit:
        raise ConfigError(f"{label} needs {_rounded_up(needed):.1f} MiB and the limit is {limit / MIB:.1f}; raise "
                          "--config.memory, or leave the method out")
    return shared


def _rounded_up(size: int) -> float:
    """Returns MiB that are enough for a size in bytes, with one decimal."""
    return math.ceil(10 * size / MIB) / 10


def slots_for(llm: kvjax.LLM, job: Job, settings, config: ml_collections.ConfigDict) -> kvjax.Slots | None:
    """Returns a method's slots: its own, or as many as fit the limit; None for the default.

    Raises:
      ConfigError: the method cannot be kept below the limit.
    """
    slots, limit = common.slots_of(settings, config.store), limit_of(config)
    if not limit:
        return slots
    plan = make_plan(llm.config, common.make_method(settings, EXTRAS), 1, capacity(llm, job, config),
                     common.dtype_of(settings))
    if slots is None:
        return fit_slots(plan, limit, common.label_of(settings))
    check_plan(plan, True, slots)
    needed = resident_bytes(plan, slots) + store_bytes_at_most(plan)
    if needed > limit:
        raise ConfigError(f"{common.label_of(settings)} needs {_rounded_up(needed):.1f} MiB with its slots and the "
                          f"limit is {limit / MIB:.1f}; raise --config.memory, or leave its slots out")
    return slots
