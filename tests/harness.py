"""A one-layer simulation of decoding on made-up keys, with every place a token can be in laid open."""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import state as caching
from kvjax.cache.callbacks import default_backend
from kvjax.cache.fill import Prompts, empty_state, fill_state, in_memory, last_queries, stored_rows
from kvjax.cache.layer import LayerCache, LayerPlan
from kvjax.cache.method import Method
from kvjax.cache.pool import StoreRef, row_width
from kvjax.cache.read import read_token
from kvjax.cache.slots import SlotPool
from kvjax.cache.types import Selection
from kvjax.cache.write import write_token
from kvjax.methods import (
    H2O,
    RLE,
    ArkVale,
    ChunkKV,
    ClusterKV,
    DynaKV,
    DynSplit,
    Full,
    IceCache,
    InfiniGen,
    InfLLM,
    KVSwap,
    Loki,
    MagicPIG,
    OmniKV,
    Oracle,
    PQCache,
    Quest,
    Random,
    SentenceKV,
    ShadowKV,
    SnapKV,
    StreamingLLM,
)
from kvjax.ops import kernels, quantize
from kvjax.ops.attention import Part
from kvjax.store.flash.store import FlashStore
from kvjax.store.geometry import Geometry
from kvjax.store.prompt import Gathered, Prompt

compiled = pytest.mark.skipif(not kernels.COMPILED, reason="built without a C compiler")
DELIMITERS = str(pathlib.Path(__file__).parent / "methods" / "shared" / "table.json")  # eight of 64 tokens
# One small instance of every method; every law runs over this list.
METHODS = {
    "full": Full(page=4),
    "rle": RLE(page=4),
    "oracle": Oracle(budget=24, sinks=2, window=4),
    "random": Random(budget=24, sinks=2, window=4, page=2),
    "streaming_llm": StreamingLLM(budget=12, sinks=2),
    "h2o": H2O(budget=24, sinks=2, window=4, page=4),
    "snapkv": SnapKV(budget=24, sinks=2, window=4, page=4, observation=6, kernel=3),
    "chunkkv": ChunkKV(budget=24, sinks=2, window=4, page=4, observation=6, chunk=5),
    "sentencekv": SentenceKV(
        budget=24, sinks=2, window=5, chunk=4, deviation=1, shortest=2, observation=6, keep=1.5, table=DELIMITERS
    ),
    "omnikv": OmniKV(budget=24, sinks=2, window=4),
    "quest": Quest(budget=24, sinks=2, window=4, page=4),
    "dynakv": DynaKV(budget=24, sinks=2, window=4, cluster=4, buffer=3),
    "dynakv_merge": DynaKV(budget=24, sinks=2, window=4, cluster=4, buffer=3, threshold=3.0, merge=2),
    "dynakv_static": DynaKV(budget=24, sinks=2, window=4, cluster=4, update="static"),
    "dynakv_local": DynaKV(budget=24, sinks=2, window=4, cluster=4, update="local"),
    "dynsplit": DynSplit(budget=24, sinks=2, window=4, chunk=4, deviation=1, table=DELIMITERS),
    "dynsplit_sentence_mean": DynSplit(
        budget=24, sinks=2, window=5, chunk=4, deviation=1, shortest=2, splitting="sentence", vectors="mean",
        table=DELIMITERS,
    ),
    "icecache": IceCache(
        budget=24, sinks=2, window=4, page=4, ratio=1 / 8, beam=6, insert_beam=4, projections=4, visit=20
    ),
    "kvswap": KVSwap(budget=24, sinks=2, window=4, group=4, sigma=4),
    # A `Sim` takes shorter prompts than a model would, of which scales are learnt all the same.
    "kvswap_4bit": KVSwap(budget=24, sinks=2, window=4, group=4, sigma=2, bits=4, per_head=True),
    "infinigen": InfiniGen(budget=24, sinks=2, window=4, sigma=2),
    "loki": Loki(budget=24, sinks=2, window=4, sigma=2),
    "shadowkv": ShadowKV(budget=24, sinks=2, window=4, chunk=4, sigma=1.0),  # lossless, as the laws want
    "shadowkv_keys": ShadowKV(budget=24, sinks=2, window=4, chunk=4, sigma=None),
    "pqcache": PQCache(budget=24, sinks=2, window=4, parts=2, bits=3, iterations=4),
    "magicpig": MagicPIG(budget=24, sinks=2, window=4, bits=3, tables=8),
    "arkvale": ArkVale(budget=24, sinks=2, window=4, page=4),
    "arkvale_sphere": ArkVale(budget=24, sinks=2, window=4, page=4, volume="sphere"),
    "clusterkv": ClusterKV(budget=24, sinks=2, window=4, cluster=4),
    "infllm": InfLLM(budget=24, sinks=2, window=4, block=4, representatives=2),
}
# Methods that a driver can tell from one another: which parts of a layer run, and what they are handed. Whatever is not
# the method's own business is tried with these; `tests/inference/test_decode.py` says that none is missing.
UNLIKE = ("full", "rle", "streaming_llm", "h2o", "sentencekv", "quest", "dynakv", "dynakv_merge", "kvswap", "magicpig")
PAPERS = ("dynakv", "icecache", "kvswap", "rle", "dynsplit")  # the systems whose papers are reproduced
HEADS, GROUP, SIZE, CAPACITY = 2, 2, 8, 96
# Accelerators compute a batch as one, which rounds otherwise than one sequence, and add up clusters in any order.
APART = 0 if jax.default_backend() == "cpu" else 2e-5


def either(*cases, slow: Sequence = ()) -> list:
    """Returns parameters for cases, values or tuples of them, some of which are tried with `--slow` alone."""
    several = (case if isinstance(case, tuple) else (case,) for case in slow)
    return [*cases, *(pytest.param(*values, marks=pytest.mark.slow) for values in several)]


@dataclasses.dataclass(frozen=True)
class Stream:
    """Made-up queries, keys and values of `CAPACITY` tokens; keys drift and come in clumps."""

    q: np.ndarray  # [B, T, H, D]
    k: np.ndarray  # [B, T, K, D]
    v: np.ndarray

    @classmethod
    def draw(cls, seed: int, batch: int = 2, tokens: int = CAPACITY) -> "Stream":
        rng = np.random.default_rng(seed)
        centres = rng.normal(size=(batch, 6, HEADS, SIZE)) * 2
        clump = rng.integers(0, 6, size=(batch, tokens))
        k = np.take_along_axis(centres, clump[:, :, None, None], axis=1) + 0.5 * rng.normal(
            size=(batch, tokens, HEADS, SIZE)
        )
        k += np.linspace(0, 1.5, tokens)[None, :, None, None]
        q = rng.normal(size=(batch, tokens, HEADS * GROUP, SIZE)) * 2
        v = rng.normal(size=(batch, tokens, HEADS, SIZE))
        return cls(q.astype(np.float32), k.astype(np.float32), v.astype(np.float32))

    @property
    def token(self) -> np.ndarray:
        """int32[B, T] ids below 64, made of the keys of head 0."""
        return (np.abs(self.k[:, :, 0, 0]) * 1000).astype(np.int32) % 64

    def row(self, b: int) -> "Stream":
        return Stream(self.q[b : b + 1], self.k[b : b + 1], self.v[b : b + 1])

    @classmethod
    def rows(cls, *seeds: int) -> "Stream":
        """Sequences that do not depend on each other, one for each seed."""
        return functools.reduce(cls.joined, [cls.draw(seed, batch=1) for seed in seeds])

    def beside(self, row: "Stream") -> "Stream":
        """The first row of this one, and another."""
        return self.row(0).joined(row)

    def joined(self, other: "Stream") -> "Stream":
        pairs = ((self.q, other.q), (self.k, other.k), (self.v, other.v))
        return Stream(*map(np.concatenate, pairs))


@functools.cache
def plan_of(method: Method, capacity: int = CAPACITY) -> LayerPlan:
    return LayerPlan(method, method.spec(kv_heads=HEADS, group=GROUP, head_dim=SIZE, capacity=capacity))


TRACES: dict[tuple, int] = {}


@functools.partial(jax.jit, static_argnums=0)
def _token(plan, cache, q, k, v, token, at, active, line):
    pool = cache.pool
    key = (plan, q.shape, type(pool).__name__, getattr(pool, "policy", ""), getattr(pool, "backend", ""),
           pool.dtype)
    TRACES[key] = TRACES.get(key, 0) + 1
    out, cache, fresh, ok, report = read_token(plan, cache, q, k, v, at, jnp.int32(0), line)
    gate = ok & active & (jax.lax.bitcast_convert_type(jnp.sum(out), jnp.int32) != -0x7FEDCBA9)
    return out, write_token(plan, cache, fresh, at, gate, jnp.int32(0), line, token)[0], ok, report


@functools.partial(jax.jit, static_argnums=(0, 6))
def _fill(plan, k, v, length, token, q, dtype):
    """The state, each token's place and the prompts: one program, whatever keeps the blocks."""
    prompts = Prompts(k, v, length, token, last_queries(q, length, plan.method.observed))
    return *fill_state(plan, empty_state(plan, k.shape[0], dtype), prompts), prompts


def prompts_read(plan: LayerPlan, stream: Stream, length: Sequence[int], dtype: str = "float32"):
    """Returns the arguments of `_fill` for prompts of these lengths."""
    k, v, token, q = (jnp.asarray(array[:, :CAPACITY]) for array in (stream.k, stream.v, stream.token, stream.q))
    return plan, k, v, jnp.asarray(length), token, q, dtype


def fill_text(plan: LayerPlan, stream: Stream, length: Sequence[int]) -> str:
    """Returns the program that fills a cache with prompts, as it is given to XLA."""
    return _fill.lower(*prompts_read(plan, stream, length)).as_text()


class Sim:
    """One layer decoding a `Stream`; over a store if one is given."""

    def __init__(
        self, method: Method, stream: Stream, prompt, store=None, slots=None, policy="lru", backend=None,
        dtype="float32",
    ):
        self.plan, self.stream, self.branch = plan_of(method), stream, None
        self._fetched = (None, None)
        self.at = np.asarray(prompt, np.int32)
        batch = stream.k.shape[0]
        state, *placed = _fill(*self._read(dtype))
        if store is None:
            self.cache = LayerCache(state, in_memory(self.plan, state, *placed, dtype))
            return
        spec = self.plan.spec
        self.branch = store.create(
            Geometry(1, batch, spec.block_heads, spec.num_blocks, spec.block_rows, row_width(spec, dtype),
                     quantize.stored_type(dtype), spec.keeps_keys), "laws"
        )
        rows = np.asarray(stored_rows(self.plan, state, placed[1], dtype))
        count, pos = (np.asarray(one[:, : spec.block_heads]) for one in (state.count, state.pos))
        self.branch.write_layer(0, Gathered(rows, pos), count, Prompt(pos))
        pool = SlotPool.zeros(spec, batch, slots or spec.max_blocks + 1, dtype, policy, backend or default_backend())
        self.cache = LayerCache(state, pool)

    def _read(self, dtype: str):
        """Returns what `_fill` is given."""
        return prompts_read(self.plan, self.stream, self.at, dtype)

    @property
    def line(self) -> StoreRef:
        handle, generation = (-1, 0) if self.branch is None else (self.branch.handle, self.branch.generation)
        return StoreRef(np.asarray(handle, np.int32), np.asarray(generation, np.int32))

    def step(self, active=None):
        """Decodes one token of every active sequence; returns (out, report). Raises the store's error."""
        active = np.ones(len(self.at), bool) if active is None else np.asarray(active)
        out, cache, ok, report = _token(*self._fed(active))
        self.cache = jax.block_until_ready(cache)
        if self.branch is not None:
            if not bool(ok):
                self.branch.abort(self.branch.generation)
                raise self.branch.take_error()
            self.branch.commit(self.branch.generation)
        self.at = self.at + active
        return np.asarray(out), report

    def _fed(self, active):
        """Returns what `_token` is given."""
        b, at = np.arange(len(self.at)), np.minimum(self.at, self.stream.k.shape[1] - 1)
        newest = (array[b, at] for array in (self.stream.q, self.stream.k, self.stream.v, self.stream.token))
        return self.plan, self.cache, *newest, self.at, active, self.line

    def programs(self):
        """The jaxprs of reading the prompts and of one token."""
        token = _token.trace(*self._fed(np.ones(len(self.at), bool)))
        return _fill.trace(*self._read(self.cache.pool.dtype)).jaxpr, token.jaxpr

    def run(self, steps: int) -> np.ndarray:
        return np.stack([self.step()[0] for _ in range(steps)])

    def state(self):
        """The state in NumPy, fetched once for every place that is asked for."""
        if self._fetched[0] is not self.cache:
            self._fetched = self.cache, jax.device_get(self.cache.state)
        return self._fetched[1]

    def places(self, b: int, head: int) -> dict[str, list[int]]:
        """Positions of every token by where it is kept."""
        state, spec = self.state(), self.plan.spec
        tail = state.tail.pos[b, head]
        count, pos = state.count[b, head], state.pos[b, head]
        blocks = [int(p) for j in range(spec.num_blocks) for p in pos[j, : count[j]]]
        assert all((pos[j, count[j] :] == -1).all() for j in range(spec.num_blocks)), "valid rows are a prefix"
        cut = [0, spec.sinks, spec.sinks + spec.ring, spec.tail_rows]
        kept = {
            name: [int(p) for p in tail[a:z] if p >= 0]
            for name, a, z in zip(("sinks", "window", "held"), cut[:-1], cut[1:], strict=True)
        }
        return {**kept, "blocks": blocks}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _select(method, spec, state, b, q):
    one = jax.tree.map(lambda leaf: leaf[b], state)
    return method.select(spec, one.index, caching.view(spec, one), q)


def selection(sim: Sim, b: int, q: np.ndarray, method: Method | None = None) -> Selection:
    """Returns what the method, or another one with an equal index, selects for q[K, G, D] of a sequence."""
    return jax.device_get(_select(method or sim.plan.method, sim.plan.spec, sim.cache.state, b, q.astype(np.float32)))


def check_every_token_has_one_place(sim: Sim) -> None:
    """Law 6: every token is in exactly one block, in the window, in the sinks or held.

    A method that evicts keeps sinks and window, and at least as many others as the budget has room for.
    """
    spec = sim.plan.spec
    for b, length in enumerate(sim.at):
        for head in range(HEADS):
            places = sim.places(b, head)
            everywhere = sorted(p for kept in places.values() for p in kept)
            if sim.plan.method.evicts:
                tail = _tail_positions(spec, int(length))
                assert set(tail) <= set(everywhere) <= set(range(length)) and len(set(everywhere)) == len(everywhere)
                assert len(everywhere) >= min(length, len(tail) + spec.selected_rows)
            else:
                assert everywhere == list(range(length)), f"row {b} head {head}: {set(range(length)) ^ set(everywhere)}"
            assert places["sinks"] == list(range(min(spec.sinks, length)))
            assert sorted(places["window"]) == list(range(max(spec.sinks, length - spec.ring), length))
    assert not np.asarray(sim.cache.state.refused).any()


def check_runs_stored_once(method: Method, directory: pathlib.Path, dtype: str = "float32") -> None:
    """Flash with a codec for runs gives the bits of memory.

    Three tokens in a row share a key; nothing is staged for long. A block of one row has no run to save.
    """
    stream = Stream.draw(6)
    stream = dataclasses.replace(stream, k=np.repeat(stream.k[:, ::3], 3, axis=1))
    store = FlashStore(directory=directory, codec="rle", direct=False, staging_bytes=0)
    in_memory = Sim(method, stream, [40, 25], dtype=dtype)
    on_flash = Sim(method, stream, [40, 25], store=store, dtype=dtype)
    np.testing.assert_array_equal(in_memory.run(45), on_flash.run(45))
    assert (on_flash.branch.stats().blocks_short > 0) == (on_flash.plan.spec.block_rows > 1)


def check_parts_agree(found: Part, expected: Part) -> None:
    """Checks that two parts of a softmax are the same attention."""
    np.testing.assert_allclose(found.top, expected.top, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(found.total, expected.total, atol=1e-5, rtol=1e-5)
    weight = np.maximum(expected.total, 1e-30)[..., None]  # as `normalise` divides
    np.testing.assert_allclose(found.out / weight, expected.out / weight, atol=1e-5)


def _tail_positions(spec, length):
    return sorted(set(range(min(spec.sinks, length))) | set(range(max(spec.sinks, length - spec.ring), length)))


def attention_weights(
    stream: Stream, b: int, at: int, kept: Sequence[Sequence[int]], cap: float = np.inf, sink_logits=-np.inf
) -> np.ndarray:
    """Weights that token `at` pays to the tokens 0 .. at that each KV head has kept, in float64, `[K, G, at + 1]`."""
    q = stream.q[b, at].astype(np.float64).reshape(HEADS, GROUP, SIZE)
    scores = np.einsum("kgd,tkd->kgt", q, stream.k[b, : at + 1].astype(np.float64)) / np.sqrt(SIZE)
    scores = cap * np.tanh(scores / cap) if np.isfinite(cap) else scores
    seen = np.zeros((HEADS, 1, at + 1), bool)
    for head, positions in enumerate(kept):
        seen[head, 0, list(positions)] = True
    top = scores.max(-1, keepdims=True, where=seen, initial=-np.inf)
    weight = np.where(seen, np.exp(scores - top), 0.0)
    unspent = np.exp(np.broadcast_to(sink_logits, HEADS * GROUP).reshape(HEADS, GROUP, 1) - top)
    return weight / (weight.sum(-1, keepdims=True) + unspent)


def attention_over(stream: Stream, b: int, at: int, kept: Sequence[Sequence[int]], **options) -> np.ndarray:
    """Attention of token `at` over the tokens that each KV head has kept, `[H, D]`."""
    weight = attention_weights(stream, b, at, kept, **options)
    return np.einsum("kgt,tkd->kgd", weight, stream.v[b, : at + 1].astype(np.float64)).reshape(HEADS * GROUP, SIZE)


def dense_attention(stream: Stream, b: int, at: int, **options) -> np.ndarray:
    """Full attention of token `at` over tokens 0 .. at in float64, `[H, D]`."""
    return attention_over(stream, b, at, [range(at + 1)] * HEADS, **options)
