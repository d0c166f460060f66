"""Layouts on flash compared: the same tokens decoded over each, with bytes and requests read, written and moved.

The reference model decodes held-out text (teacher-forced) with its cache on a `FlashStore` of every layout. All layouts
give equal bits; a digest of the logits in each row shows it. Figures that correspond to DynaKV's:

  entries per access (Figure 12)  An entry is one token's key and value of one KV head in one layer. Every
      `probe_every` tokens, all blocks that the step needed are read once more from the store, as if none were in
      memory. The entries of those blocks that the requests returned, over the number of requests, are the average
      continuous access. The requests of decoding itself (`reads_per_token`) are for blocks that are not in memory,
      which are fewer and so less often neighbours.
  bytes moved by updates (Figure 13)  Entries that were on flash before a token and lie elsewhere after it. The
      cluster-by-cluster layout packs the clusters of a stream without gaps, so that an insertion or a split shifts
      everything behind it. No store implements it: its moves are computed, exactly, from the place of each token
      before and after every step. `packed_stream` takes every stream for a file of its own, the most favourable
      reading; `packed_file` packs the streams of the cache one after the other into one file.

Nothing here is timed.
"""

import dataclasses
import hashlib
import os
import pathlib

import jax.numpy as jnp
import ml_collections
import numpy as np
from tqdm import tqdm

import kvjax
from experiments import common
from experiments.results import Run
from experiments.speed import timing
from kvjax.inference import decode
from kvjax.inference.plan import Plan, Slots, State, on_store, store_geometry
from kvjax.store.flash.layout import SEQUENTIAL, check_layout
from kvjax.store.interface import Branch
from kvjax.store.stats import Stats


class Updates:
    """Follows every token through the blocks of a store, and through the packed layout, which exists only here.

    Attributes:
      inserted: entries that were written for the first time.
      moved: entries whose block or row changed.
      packed_stream, packed_file: entries whose offset in the packed layout changed.
    """

    def __init__(self, pos: np.ndarray, tokens: int):
        """Starts from a table of positions.

        Args:
          pos: int32[streams, NB, C], position of the token in each row, below `tokens`; -1 = empty.
          tokens: T, upper bound of positions.
        """
        self.inserted = self.moved = self.packed_stream = self.packed_file = 0
        self._tokens = tokens
        self._count = (pos >= 0).sum(-1)
        self._order = [np.flatnonzero(count).tolist() for count in self._count]
        self._home, self._offset, self._length = self._where(pos)

    def see(self, pos: np.ndarray) -> None:
        """Counts the changes of the table since the last call."""
        count = (pos >= 0).sum(-1)
        for stream, block in np.argwhere((count > 0) & (self._count == 0)).tolist():
            self._born(stream, block, pos[stream, block])
        for stream, block in np.argwhere((count == 0) & (self._count > 0)).tolist():
            self._order[stream].remove(block)  # merged into another
        self._count = count
        home, offset, length = self._where(pos)
        old = (self._home >= 0) & (home >= 0)
        start, was = (np.cumsum(x)[:, None] - x[:, None] for x in (length, self._length))
        self.inserted += int(((self._home < 0) & (home >= 0)).sum())
        self.moved += int((old & (home != self._home)).sum())
        self.packed_stream += int((old & (offset != self._offset)).sum())
        self.packed_file += int((old & (offset + start != self._offset + was)).sum())
        self._home, self._offset, self._length = home, offset, length

    def _born(self, stream: int, block: int, pos: np.ndarray) -> None:
        """Inserts a block in the packed order: the second half of a split behind the first, a cluster of new tokens at
        the end."""
        homes = self._home[stream, pos[pos >= 0]]
        parents = homes[homes >= 0] // pos.size
        order = self._order[stream]
        order.insert(order.index(int(parents[0])) + 1 if parents.size else len(order), block)

    def _where(self, pos: np.ndarray):
        """Returns home[streams, T] (block * C + row) and packed offset[streams, T] of every token (-1 = none), and
        entries per stream."""
        start = np.zeros_like(self._count)
        for stream, order in enumerate(self._order):
            start[stream, order] = np.cumsum(self._count[stream, order]) - self._count[stream, order]
        stream, block, row = np.nonzero(pos >= 0)
        home, offset = np.full((2, pos.shape[0], self._tokens), -1, np.int64)
        home[stream, pos[stream, block, row]] = block * pos.shape[2] + row
        offset[stream, pos[stream, block, row]] = start[stream, block] + row
        return home, offset, self._count.sum(-1)


@dataclasses.dataclass
class Probe:
    """Statistics of reading all blocks that a step needed, with nothing in memory.

    Attributes:
      stats: of these reads, without what the writer did meanwhile.
      blocks, entries: asked for. A few of them wait to be written, and so do not come from flash.
    """

    stats: Stats = dataclasses.field(default_factory=Stats)
    blocks: int = 0
    entries: int = 0

    def read(self, branch: Branch, plan: Plan, state) -> None:
        """Reads the blocks of the newest step again, a layer at a time, and counts the entries returned."""
        before = branch.stats()
        for i, layer_cache in enumerate(state.layers):
            if not on_store(plan, i):
                continue
            block = np.asarray(layer_cache.pool.own(layer_cache.state.loaded))
            slot = np.broadcast_to(np.arange(block.shape[-1], dtype=np.int32), block.shape)
            slots = np.zeros((*block.shape, *layer_cache.pool.rows.shape[-2:]), branch.geometry.numpy_dtype)
            if not branch.read_into(i, branch.generation, block, slot, slots):
                raise branch.failure(f"layer {i}")
            self.blocks += int((block < branch.geometry.num_blocks).sum())
            self.entries += int(slots.any(axis=-1).sum())
        done = _combine(branch.stats(), before, -1)
        done = dataclasses.replace(done, rows_written=0, blocks_written=0, bytes_written=0)
        self.stats = _combine(self.stats, done)


def _combine(one: Stats, other: Stats, sign: int = 1) -> Stats:
    """Returns one + sign * other, field by field."""
    names = [field.name for field in dataclasses.fields(Stats)]
    return Stats(**{name: getattr(one, name) + sign * getattr(other, name) for name in names})


def tables(plan: Plan, state: State) -> np.ndarray:
    """Returns the positions of all rows of the layers on the store, int32[streams, NB, C]; streams are the heads with
    blocks of their own. The array is a copy."""
    heads = plan.layers[-1].spec.block_heads
    stored = [layer.state for i, layer in enumerate(state.layers) if on_store(plan, i)]
    parts = [np.asarray(layer.pos[:, :heads]) for layer in stored]
    return np.concatenate([part.reshape(-1, *part.shape[2:]) for part in parts])


def measure(llm: kvjax.LLM, layout: str, tokens: np.ndarray, config: ml_collections.ConfigDict,
            path: pathlib.Path) -> dict:
    """Returns one row: decodes tokens[B, context + steps] over a store of this layout."""
    method = common.make_method(config.method)
    store = kvjax.FlashStore(file=path, layout=layout, threads=1, staging_bytes=config.staging_bytes)
    context, steps = config.context, config.steps
    cache = llm.prefill(tokens[:, :context].tolist(), method=method, store=store, capacity=context + steps,
                        slots=Slots(count=config.slots or None))
    branch, state = cache.branch, cache.state
    updates, probe, digest = Updates(tables(cache.plan, state), context + steps), Probe(), hashlib.sha256()
    before, moved = branch.stats(), []
    for i in tqdm(range(steps), desc=layout, disable=None):
        done = decode.step(cache.plan, llm.params, state, jnp.asarray(tokens[:, context + i]), donate=True)
        state = done.state
        digest.update(np.asarray(done.logits).tobytes())
        moved.append(timing.moved(done))
        updates.see(tables(cache.plan, state))
        if i % config.probe_every == 0:
            probe.read(branch, cache.plan, state)
    branch.flush()
    used = _combine(_combine(branch.stats(), before, -1), probe.stats, -1)
    row_bytes = store_geometry(cache.plan).row_bytes
    space = space_row(path, int((tables(cache.plan, state) >= 0).sum()), row_bytes)
    branch.close()
    head = {"layout": layout, "method": common.label(method), "store": "flash", "task": "layouts", "context": context,
            "budget": method.budget, "seed": 0, "tokens": steps * len(tokens), "logits_sha256": digest.hexdigest()[:16]}
    return {**head, "hit_rate": timing.came_back(moved), **access_row(probe, row_bytes),
            **traffic_row(used, updates, layout, steps * len(tokens), row_bytes), **space}


def access_row(probe: Probe, row_bytes: int) -> dict[str, float]:
    """Returns Figure 12: entries and bytes of one contiguous access when nothing is in memory."""
    stats = probe.stats
    returned = probe.entries / probe.blocks * stats.blocks_read
    return {"entries_per_access": returned / stats.reads, "bytes_per_access": stats.bytes_read / stats.reads,
            "blocks_per_access": stats.blocks_read / stats.reads,
            "useful_share": returned * row_bytes / stats.bytes_read}


def traffic_row(used: Stats, updates: Updates, layout: str, tokens: int, row_bytes: int) -> dict[str, float]:
    """Returns the reads and writes of decoding, and Figure 13: bytes moved by updates."""
    # In token order, every entry written beside the new ones counts as moved.
    moved = used.rows_written - updates.inserted if layout == SEQUENTIAL else updates.moved
    return {
        "reads_per_token": used.reads / tokens, "bytes_read_per_token": used.bytes_read / tokens,
        "bytes_written_per_token": used.bytes_written / tokens,
        "write_amplification": used.bytes_written / (updates.inserted * row_bytes),
        "moved_bytes_per_token": moved * row_bytes / tokens,
        "packed_stream_moved_bytes_per_token": updates.packed_stream * row_bytes / tokens,
        "packed_file_moved_bytes_per_token": updates.packed_file * row_bytes / tokens,
    }


def space_row(path: pathlib.Path, entries: int, row_bytes: int) -> dict[str, float]:
    """Returns the unused share of the space that the file occupies, and the share of holes in its range of offsets."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # delayed allocation: the kernel may not have assigned blocks yet
        status = os.fstat(file.fileno())
    occupied = status.st_blocks * 512
    return {"file_bytes": status.st_size, "occupied_bytes": occupied,
            "fragmentation": 1 - entries * row_bytes / occupied, "holes": 1 - occupied / status.st_size}


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError for settings with which nothing can be measured."""
    common.check_some(config, "layouts")
    common.check_counts(config, batch=1, context=1, steps=1, slots=0, probe_every=1, staging_bytes=1)
    for layout in config.layouts:
        check_layout(layout)
    common.make_method(config.method)


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Measures every layout; rows that the workdir has are skipped."""
    check(config)
    llm = common.load_model(config.model)
    common.check_model(llm, [config.method])
    common.check_fit(llm.config, config.method, [config.context] * config.batch, config.context + config.steps,
                     slots=Slots(count=config.slots or None))
    tokens = common.held_out_rows(llm, config.batch, config.context + config.steps)
    run = Run(config, workdir, ("layouts",))
    rows = run.logged()
    for layout in config.layouts:
        if layout not in {row["layout"] for row in rows}:
            path = run.path / f"{layout}.kv"
            rows.append(measure(llm, layout, tokens, config, path))
            path.unlink()
            run.log(**rows[-1])
    run.summary(rows)
    print_table(rows)


def print_table(rows: list[dict]) -> None:
    """Prints the main figures, a line per layout."""
    print(f"{'layout':>14}{'entries':>9}{'KiB':>7}{'reads':>8}{'KiB read':>10}{'write':>7}{'slack':>7}{'holes':>7}"
          f"{'KiB moved':>11}{'  packed: stream':>15}{'file':>9}  logits\n{'':>14}{'per access':>16}{'per token':>18}"
          f"{'ampl.':>7}{'':>14}{'per token':>11}{'x as many':>15}")
    for row in rows:
        moved = row["moved_bytes_per_token"]
        packed = [row[f"packed_{unit}_moved_bytes_per_token"] for unit in ("stream", "file")]
        ratios = [f"{bytes_ / moved:,.0f}" if moved else "-" for bytes_ in packed]
        print(f"{row['layout']:>14}{row['entries_per_access']:9.1f}{row['bytes_per_access'] / 1024:7.1f}"
              f"{row['reads_per_token']:8.1f}{row['bytes_read_per_token'] / 1024:10.0f}"
              f"{row['write_amplification']:7.1f}{row['fragmentation']:7.0%}{row['holes']:7.0%}{moved / 1024:11.2f}"
              f"{ratios[0]:>15}{ratios[1]:>9}  {row['logits_sha256']}")
