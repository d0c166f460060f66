"""Samples of a part of the leaderboard's grid, cut into batches that fit in memory, and their contexts as read once."""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Iterator, Sequence

import ml_collections
import numpy as np

from experiments import common
from experiments.board import grid
from experiments.board.grid import Cell
from experiments.speed import timing
from kvjax.cache.read import choose
from kvjax.errors import BudgetTooSmall, ConfigError
from kvjax.eval import tasks
from kvjax.eval.metrics import Probe
from kvjax.eval.tasks import Continuation, Sample, asking
from kvjax.eval.tasks.asking import Questions
from kvjax.inference import dense_prefill
from kvjax.inference.cache import Cache
from kvjax.inference.dense_prefill import Activations, PromptActivations
from kvjax.inference.memory import FLASH, HOST
from kvjax.inference.plan import Plan, Slots, bytes_of, make_plan, outline, store_geometry
from kvjax.inference.progress import CLOCK
from kvjax.inference.usage import Usage
from kvjax.llm import LLM

_LAYERS_AT_WORK = 3  # layers whose activations and blocks exist twice while a cache is filled


@dataclasses.dataclass(frozen=True)
class Batch:
    """Samples of one exam that share a cache, in one sequence each, or in one for several questions."""

    exam: tuple[str, int, int]  # task, length and seed
    span: tuple[int, int]  # numbers of its first sample and of the one after its last
    items: tuple[Questions, ...] | tuple[Continuation, ...]  # for each sequence

    @functools.cached_property
    def contexts(self) -> list[tuple[int, ...]]:
        """Token ids of each sequence's context."""
        return [tuple(_first(item).context) for item in self.items]

    @functools.cached_property
    def different(self) -> int:
        """Number of different contexts."""
        return len(set(self.contexts))

    @functools.cached_property
    def decoded(self) -> int:
        """Tokens of the longest text that is decoded before questions."""
        return max(len(item[0].decoded) if isinstance(item, tuple) else 0 for item in self.items)

    @functools.cached_property
    def steps(self) -> int:
        """Most tokens that are decoded one after the other."""
        if isinstance(self.items[0], Continuation):
            return max(len(item.tokens) for item in self.items)
        rounds = asking.rounds(self.items)
        return self.decoded + sum(max(map(asking.length, asked)) - self.decoded for asked in rounds)


def _first(item: Questions | Continuation) -> Sample | Continuation:
    return item if isinstance(item, Continuation) else item[0]


@dataclasses.dataclass
class Tally:
    """Measurements on a batch of contexts: cost of a token, and with a probe the quality and the time of a
    selection."""

    batch: int
    places: dict[str, float]  # bytes of a sequence's cache by place
    fill_s: float  # in which the cache was filled, without compiling
    probe: Probe | None = None
    select_ms: float | None = None

    def done(self, usages: Sequence[Usage]) -> dict:
        """Returns the cost per token of one sequence over all rounds, and with a probe the quality."""
        quality = {**dataclasses.asdict(self.probe.quality), "select_ms": self.select_ms} if self.probe else {}
        return {**common.cost_of(usages), **self.places, **quality}


class Exams:
    """Samples of one part of the grid, drawn once for all methods, and the contexts as the model has read them."""

    def __init__(self, llm: LLM, config: ml_collections.ConfigDict, stream: np.ndarray | None = None):
        self.llm, self.config = llm, config
        self.stream = common.held_out_tokens(llm) if stream is None else stream
        self.drawn = functools.cache(self._draw)
        self.capacity = functools.cache(self._capacity)
        self.need = functools.cache(self._need)
        self.kept: dict[tuple, PromptActivations] = {}
        self.read_s = 0.0  # seconds of the last reading, without compiling

    def _draw(self, task: str, context: int, seed: int) -> Sequence[Sample] | Sequence[Continuation]:
        config, continues = self.config, tasks.find(task)[0].continues
        count = config.continuations if continues else config.samples
        named = grid.with_folder(task, config.get("data", ""))
        samples = common.draw_task(self.llm, self.stream, named, context, count, seed, config.perplexity_tokens)
        if continues:
            return samples
        if config.max_new_tokens:
            most = config.max_new_tokens
            samples = [dataclasses.replace(one, max_new_tokens=min(most, one.max_new_tokens)) for one in samples]
        samples = _by_length(asking.tokenised(self.llm, samples))
        return asking.within_prompt(samples) if config.question == "within" else samples

    def _asked(self, context: int) -> list[Sample | Continuation]:
        """Returns all samples of one length."""
        return [sample for task in self.config.tasks for seed in self.config.seeds
                for sample in self.drawn(task, context, seed)]

    def prompts(self, context: int) -> list[int]:
        """Returns the tokens of each prompt of one length."""
        return [len(sample.context) for sample in self._asked(context)]

    def _capacity(self, context: int) -> int:
        """Returns the tokens of the longest prompt of one length with its questions and answers, rounded up.

        All tasks of one length have the same, so that a method with a budget is compiled once.
        """
        return asking.rounded(max(
            len(sample.context) + (len(sample.tokens) if isinstance(sample, Continuation) else asking.length(sample))
            for sample in self._asked(context)
        ))

    # --------------------------------------------------------------------------------------- memory

    def _need(self, context: int) -> int:
        """Returns the most bytes that one sequence of this length takes with any of the methods: its activations, its
        cache with the fork that decodes (two after a decoded text), the copies of the probe, and what filling it
        holds."""
        padded = _padded(max(self.prompts(context)))
        kinds = {(cell.label, cell.budget): cell for cell in grid.cells(self.config) if cell.context == context}
        caches = [self._cache_bytes(cell) for cell in kinds.values()]
        copies = 3 if any(isinstance(one, Sample) and one.decoded for one in self._asked(context)) else 2
        reading, config = self._reading_bytes(padded), self.llm.config
        probed = 2 * config.num_kv_heads * config.head_dim * self._itemsize * config.num_layers if (
            self.config.recall_k) else 0
        filling = _LAYERS_AT_WORK * (reading + max(caches)) // config.num_layers
        return reading + copies * max(caches) + probed * max(padded, self.capacity(context)) + filling

    @property
    def _itemsize(self) -> int:
        return self.llm.params["norm"]["scale"].dtype.itemsize  # matrices may have fewer bits

    def _reading_bytes(self, padded: int) -> int:
        """Returns the bytes of the activations of one sequence of so many tokens."""
        config = self.llm.config
        hidden, row = config.hidden_size, 2 * config.num_kv_heads * config.head_dim
        return padded * self._itemsize * ((hidden + row) * config.num_layers + hidden)

    def _cache_bytes(self, cell: Cell) -> int:
        """Returns the bytes of one sequence in the cell's cache, in memory and in a store in memory; 0 if its budget is
        too small."""
        try:
            plan, slots, kind = self._plan(cell), self._slots(cell), common.check_store(self.config.store)[0]
            stored = kind != "memory"
            outlines = tuple(outline(plan, i, stored, slots or Slots()) for i in range(len(plan.layers)))
        except BudgetTooSmall:
            return 0
        geometry = store_geometry(plan)
        return bytes_of(outlines) + (geometry.total_blocks * geometry.block_bytes if kind == "host" else 0)

    def _plan(self, cell: Cell) -> Plan:
        """Returns the plan of one sequence in the cell's cache."""
        dtype = common.dtype_of(dict(cell.settings))
        return make_plan(self.llm.config, cell.method, 1, self.capacity(cell.context), dtype)

    def _slots(self, cell: Cell) -> Slots | None:
        return common.slots_of({**dict(cell.settings), "budget": cell.budget}, self.config.store)

    def size(self, context: int) -> int:
        """Returns the most sequences of a batch of this length; raises ConfigError if not even one fits in
        `hold_bytes`."""
        need, most = self.need(context), self.config.hold_bytes
        if need > most:
            raise ConfigError(
                f"a sequence of {context:,} tokens takes {need / 2**20:,.0f} MiB with the largest of the methods, and "
                f"hold_bytes={most} is {most / 2**20:,.0f} MiB; raise it, shorten the lengths, or leave out methods "
                "that keep everything")
        return min(self.config.batch, most // need)

    def held(self, context: int) -> int:
        """Returns the most bytes that activations and caches of a batch of this length take; where contexts are
        repeated, they are also held once more while this is done."""
        reading = self._reading_bytes(_padded(max(self.prompts(context))))
        batches = [batch for task in self.config.tasks for seed in self.config.seeds
                   for batch in self.batches(task, context, seed)]
        return max(len(batch.items) * self.need(context)
                   + (batch.different * reading if batch.different < len(batch.items) else 0) for batch in batches)

    # -------------------------------------------------------------------------------------- batches

    def batches(self, task: str, context: int, seed: int) -> list[Batch]:
        """Returns the samples of an exam in batches of sequences that fit in memory together.

        Where contexts are fewer than the batch has room for, the questions about one are shared out among several
        sequences.
        """
        samples, size = self.drawn(task, context, seed), self.size(context)
        if tasks.find(task)[0].continues:
            cut = [tuple(samples[i : i + size]) for i in range(0, len(samples), size)]
        else:
            cut = [self._spread(batch, context) for batch in asking.batches(self.llm, samples, size)]
        counts = [sum(1 if isinstance(item, Continuation) else len(item) for item in items) for items in cut]
        ends = list(itertools.accumulate(counts))
        return [Batch((task, context, seed), (end - count, end), items)
                for items, count, end in zip(cut, counts, ends, strict=True)]

    def _spread(self, batch: Sequence[Questions], context: int) -> tuple[Questions, ...]:
        """Shares out the questions of a batch among as many sequences as fit beside the activations of its contexts;
        not those about a decoded text, which each sequence would have to decode."""
        if batch[0][0].decoded:
            return tuple(batch)
        spare = self.config.hold_bytes - len(batch) * self._reading_bytes(_padded(max(self.prompts(context))))
        return asking.spread(batch, max(len(batch), min(self.config.batch, spare // self.need(context))))

    def read(self, contexts: Sequence[tuple[int, ...]], context: int) -> PromptActivations:
        """Returns the contexts read densely for caches of this length, each of them once.

        The result is kept for the next method as long as it fits beside a batch in `hold_bytes`.
        """
        capacity = self.capacity(context)
        key = capacity, tuple(contexts)
        known = self.kept.pop(key, None)
        room = self.config.hold_bytes - len(contexts) * self.need(context)
        while self.kept and sum(kept.nbytes for kept in self.kept.values()) > room:
            del self.kept[next(iter(self.kept))]  # the one that was used longest ago
        self.kept[key] = self._read(contexts, capacity) if known is None else known
        return self.kept[key]

    def _read(self, contexts: Sequence[tuple[int, ...]], capacity: int) -> PromptActivations:
        rows = list(dict.fromkeys(contexts))
        with timed() as clock:
            reading = self.llm.read([list(row) for row in rows], capacity=capacity)
        self.read_s = clock.seconds
        return _repeated(reading, [rows.index(row) for row in contexts])

    @contextlib.contextmanager
    def cached(self, cell: Cell, batch: Batch, directory: pathlib.Path, probed: bool):
        """Yields the contexts of a batch in the cell's cache, on its store, and a `Tally`, with a probe if asked."""
        settings, count = dict(cell.settings), len(batch.items)
        store, reading = common.make_store(self.config.store, directory), self.read(batch.contexts, cell.context)
        with timed() as clock:
            cache = self.llm.prefill(
                reading, method=cell.method, store=store, capacity=self.capacity(cell.context),
                dtype=common.dtype_of(settings), slots=self._slots(cell),
            )
        try:
            memory = cache.memory()
            places = {"resident_bytes": cache.resident_bytes, "host_bytes": memory.at(HOST),
                      "flash_bytes": memory.at(FLASH)}
            tally = Tally(count, {place: taken / count for place, taken in places.items()}, clock.seconds)
            if probed:
                tally.probe = Probe(cache, reading, self.config.recall_k, self.config.recall_every)
                tally.select_ms = select_ms(cache)
            yield cache, tally
        finally:
            cache.close()


@dataclasses.dataclass
class Timed:
    """Seconds of a block of statements, without those of compiling."""

    seconds: float = 0.0


@contextlib.contextmanager
def timed() -> Iterator[Timed]:
    """Yields a `Timed` that has its seconds once the block has ended."""
    clock, started, compiled = Timed(), time.perf_counter(), CLOCK.seconds
    yield clock
    clock.seconds = max(0.0, time.perf_counter() - started - (CLOCK.seconds - compiled))


def _padded(tokens: int) -> int:
    """Returns the length to which a prompt is padded."""
    return dense_prefill.pad(np.zeros((1, tokens), np.int32)).shape[1]


def _by_length(samples: Sequence[Sample]) -> list[Sample]:
    """Returns tokenised samples with contexts of like padded length as neighbours; those of one context stay
    together."""
    groups = [list(group) for _, group in itertools.groupby(samples, asking.told)]
    groups.sort(key=lambda group: _padded(len(group[0].context)))
    return [sample for group in groups for sample in group]


def _repeated(reading: PromptActivations, rows: Sequence[int]) -> PromptActivations:
    """Returns the activations of these rows; rows may repeat."""
    if rows == list(range(len(reading.length))):
        return reading
    which, layers = list(rows), list[Activations]()
    for layer in reading.layers:
        x = layers[-1].out if layers else np.asarray(layer.x)[which]  # an output is the next layer's input, held once
        key, value, out = (np.asarray(table)[which] for table in (layer.key, layer.value, layer.out))
        layers.append(Activations(x, key, value, out))
    return dataclasses.replace(reading, tokens=reading.tokens[which], length=reading.length[which],
                               layers=tuple(layers))


def select_ms(cache: Cache) -> float:
    """Returns the median milliseconds in which one layer selects its blocks, for all sequences of a batch."""
    plan, layer = next((plan, layer) for plan, layer in zip(cache.plan.layers, cache.state.layers, strict=True)
                     if not plan.follows and plan.method == cache.plan.layers[-1].method)
    config = cache.plan.config
    shape = (cache.plan.batch, config.num_heads, config.head_dim)
    q = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return timing.median_ms(choose, plan, layer.state, q)
