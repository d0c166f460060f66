"""Running a model over a cache: prefill layer by layer, then one token at a time.

Two drivers share `layer.read` and `layer.write`. `staged` is a Python loop over layers, each a
compiled function that is traced once and serves every layer of the same shape; `fused` is the whole
token as one program with the store's callbacks inside. They give equal tokens. Both read every
layer before they write any, so that a token either happens in all layers or in none.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import attention, layer
from kvjax import cache as caching
from kvjax.errors import ConfigError, PromptError, StoreClosed, StoreError
from kvjax.layer import LayerCache, LayerPlan, Report
from kvjax.method import Method
from kvjax.methods.full import Full
from kvjax.models.config import ModelConfig
from kvjax.models.transformer import Block, Transformer
from kvjax.pool import Line
from kvjax.store import base, residency
from kvjax.store.slots import BACKENDS, PREFETCH, SlotPool, default_backend
from kvjax.typing import Array, Bool, Int32, Logits, PyTree, pytree

Driver = Literal["staged", "fused"]
_CHUNK = 512  # queries of one prefill attention step


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about decoding with one cache."""

    config: ModelConfig
    layers: tuple[LayerPlan, ...]
    batch: int
    capacity: int
    dtype: str = "float32"


@pytree
class State:
    """The cache of a whole model: an immutable value."""

    layers: tuple[LayerCache, ...]
    length: Int32[Array, "B"]  # tokens of each sequence
    line: Line


@dataclasses.dataclass(frozen=True)
class Slots:
    """How a store's blocks are kept in memory.

    Attributes:
      count: slots per KV head; None = M + 1, what one step needs.
      policy: whom to evict (`kvjax.store.residency.POLICIES`).
      backend: how a step reaches the store; None = the fastest that the platform has.
      prefetch: what is read before it is asked for. "layer": while a layer computes, the blocks of the next, chosen
        with the query that this layer's input would give there. "step": the blocks ranked just below this step's, for
        the next step. Outputs are the same in all cases.

    Raises ConfigError for a policy, backend or prefetch that does not exist.
    """

    count: int | None = None
    policy: str = "lru"
    backend: str | None = None
    prefetch: str = "off"

    def __post_init__(self):
        residency.find_policy(self.policy)
        if self.prefetch not in PREFETCH or self.backend not in (None, *BACKENDS):
            raise ConfigError(f"prefetch={self.prefetch!r} must be one of {', '.join(PREFETCH)}; "
                              f"backend={self.backend!r} None or one of {', '.join(BACKENDS)}")

def make_plan(config: ModelConfig, method: Method, batch: int, capacity: int, dtype: str = "float32") -> Plan:
    """Sizes every layer's cache. Raises ConfigError where they do not fit together."""
    if capacity < 2:
        raise ConfigError(f"capacity={capacity} must be at least 2 tokens")
    sizes = {"kv_heads": config.num_kv_heads, "group": config.group, "head_dim": config.head_dim, "capacity": capacity}
    dense = Full()
    layers = []
    for i in range(config.num_layers):
        chosen = dense if i < method.dense_layers else method
        layers.append(LayerPlan(chosen, chosen.spec(**sizes), config.windows[i]))
    return Plan(config, tuple(layers), batch, capacity, dtype)


def on_store(plan: Plan, index: int) -> bool:
    """Whether a layer's blocks go to the store: dense layers stay in memory unless all are dense."""
    dense_prefix = isinstance(plan.layers[index].method, Full) and plan.layers[-1].method != plan.layers[index].method
    return not dense_prefix


def geometry(plan: Plan) -> base.Geometry:
    """What a store has to hold for this plan."""
    spec = plan.layers[-1].spec
    return base.Geometry(
        layers=len(plan.layers), batch=plan.batch, kv_heads=spec.kv_heads, num_blocks=spec.num_blocks,
        block_rows=spec.block_rows, width=2 * spec.head_dim, dtype=plan.dtype,
    )


# ---------------------------------------------------------------------------------------- prefill


def prefill(
    plan: Plan, params: PyTree, tokens: Int32[Array, "B T"], length: Int32[Array, "B"],
    branch: base.Branch | None = None, slots: Slots | None = None, keep_keys: bool = False,
):
    """Reads prompts, right-padded to T, and fills a new cache one layer at a time.

    Peak memory is the hidden states, one layer's keys and values, and the cache: linear in T.
    Returns (State, logits after each prompt's last token [B, V], keys per layer if `keep_keys`).
    """
    _check_prompts(plan, np.asarray(length))
    tokens, size = _pad(jnp.asarray(tokens, jnp.int32)), min(_CHUNK, _round_up(tokens.shape[1]))
    x = _embed(plan.config, params, tokens)
    layers, kept = [], []
    for i, layer_plan in enumerate(plan.layers):
        store = branch if branch is not None and on_store(plan, i) else None
        queries = _sample_queries(plan, i, store, params[f"layers_{i}"], x, length)
        x, key, value = _prefill_layer(plan.config, layer_plan.sliding, size, params[f"layers_{i}"], x)
        layers.append(_fill(plan, i, key, value, length, store, slots or Slots(), queries))
        if keep_keys:
            kept.append(np.asarray(key))
    last = jnp.take_along_axis(x, (length - 1)[:, None, None], axis=1)[:, 0]
    handle, generation = (-1, 0) if branch is None else (branch.handle, branch.generation)
    line = Line(jnp.int32(handle), jnp.int32(generation))
    return State(tuple(layers), jnp.asarray(length, jnp.int32), line), _unembed(plan.config, params, last), kept


def _check_prompts(plan: Plan, length: np.ndarray) -> None:
    if length.min() < 1:
        raise PromptError("a prompt is empty; give at least one token")
    if length.max() > plan.capacity:
        raise PromptError(f"a prompt has {length.max()} tokens but capacity={plan.capacity}; raise the capacity")


def _round_up(size: int) -> int:
    """Padded prompt length: a power of two below the chunk, whole chunks above, so that few shapes compile."""
    return max(16, 1 << (size - 1).bit_length()) if size < _CHUNK else -(-size // _CHUNK) * _CHUNK


def _pad(tokens):
    return jnp.pad(tokens, ((0, 0), (0, _round_up(tokens.shape[1]) - tokens.shape[1])))


@functools.partial(jax.jit, static_argnums=0)
def _embed(config, params, tokens):
    return Transformer(config).apply({"params": params}, tokens, method="embed")


@functools.partial(jax.jit, static_argnums=0)
def _unembed(config, params, x):
    return Transformer(config).apply({"params": params}, x, method="unembed")


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _prefill_layer(config, sliding, size, params, x):
    """One layer over whole prompts x[B, T, E]; returns the next hidden states, keys and values."""
    block, length = Block(config), x.shape[1]
    starts = jnp.arange(0, length, size)

    def one(x):
        q, key, value = block.apply({"params": params}, x, jnp.arange(length), method="project")
        q = q.reshape(length, config.num_kv_heads, config.group, config.head_dim)

        def chunk(start):
            part = jax.lax.dynamic_slice_in_dim(q, start, size)
            out = attention.causal(part, key, value, start, size, sliding)
            rows = jax.lax.dynamic_slice_in_dim(x, start, size)
            return block.apply({"params": params}, rows, out.reshape(size, -1, config.head_dim), method="finish")

        return jax.lax.map(chunk, starts).reshape(x.shape), key, value

    return jax.lax.map(one, x)


def _sample_queries(plan: Plan, i: int, branch, params, x, length):
    """Queries `[Q, B, H, D]` by which the store's layout sees which blocks go together; None if it does not ask."""
    if branch is None or not branch.samples or plan.layers[i].method.attends_all:
        return None
    return _spread_queries(plan.config, branch.samples, params, x, jnp.asarray(length))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _spread_queries(config, count, params, x, length):
    """`count` queries spread evenly over the second half of each prompt x[B, T, E], the last token's first."""
    stride = jnp.maximum(1, length // (2 * count))
    at = jnp.maximum(length - 1 - jnp.arange(count)[:, None] * stride, 0)
    rows = x[jnp.arange(x.shape[0]), at]
    return Block(config).apply({"params": params}, rows, at, method="queries")


@functools.partial(jax.jit, static_argnums=0)
def _retrieved(layer_plan, state, queries):
    """Blocks `[B, Q, K, M1]` that each of queries[Q, B, H, D] would fetch; a query costs one `select`."""
    spec, method = layer_plan.spec, layer_plan.method

    def needed(one, q):
        selection = method.select(spec, one.index, caching.view(spec, one), q)
        return caching.needed_blocks(spec, one, selection)[0]

    grouped = queries.reshape(*queries.shape[:2], spec.kv_heads, spec.group, spec.head_dim)
    return jax.lax.map(lambda q: jax.vmap(needed)(state, q), grouped).swapaxes(0, 1)


def _fill(plan: Plan, i: int, key, value, length, branch, slots: Slots, queries=None) -> LayerCache:
    """A layer's cache from its prompt keys and values; `queries` as of `_sample_queries`."""
    layer_plan = plan.layers[i]
    if branch is None:
        return _fill_memory(layer_plan, plan.dtype, key, value, length)
    state, blocks = _fill_packed(layer_plan, plan.dtype, key, value, length)
    retrieved = None if queries is None else np.asarray(_retrieved(layer_plan, state, queries))
    prompt = base.Prompt(np.asarray(state.pos), retrieved)
    branch.write_layer(i, np.asarray(blocks), np.asarray(state.count), prompt)
    return LayerCache(state, slot_pool(plan, i, slots))


def slot_pool(plan: Plan, i: int, slots: Slots) -> SlotPool:
    """A layer's slots with nothing in them. ConfigError when they are too few."""
    spec = plan.layers[i].spec
    least = spec.max_blocks + 1
    count = slots.count or least
    if count < least:
        raise ConfigError(f"slots={count} is fewer than the {least} blocks one step may need; raise it")
    backend = slots.backend or default_backend()
    return SlotPool.zeros(spec, plan.batch, count, plan.dtype, slots.policy, backend, slots.prefetch)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fill_memory(layer_plan, dtype, key, value, length):
    state = layer.init(layer_plan, key.shape[0], dtype)
    return layer.prefill_memory(layer_plan, state, key, value, length, dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fill_packed(layer_plan, dtype, key, value, length):
    state = layer.init(layer_plan, key.shape[0], dtype)
    return layer.prefill_packed(layer_plan, state, key, value, length, dtype)


# ----------------------------------------------------------------------------------------- decode


@pytree
class Step:
    """Result of one token."""

    logits: Logits
    state: State
    ok: Bool[Array, ""]  # False: a read failed, and the state is the old one
    reports: tuple[Report, ...]


def step(
    plan: Plan, params: PyTree, state: State, tokens: Int32[Array, "B"], active: Bool[Array, "B"] | None = None,
    driver: Driver = "staged", donate: bool = False,
) -> Step:
    """Decodes one token per sequence; sequences that are not `active` stay as they are.

    With `donate` the given state's memory is reused and the value must not be used again. The step
    is committed to the store, or aborted there; a failed read raises the store's typed error, whose
    `state` attribute is the cache as it was, ready for a retry.
    """
    active = jnp.ones(plan.batch, bool) if active is None else jnp.asarray(active)
    run = {"staged": _staged, "fused": _fused}[driver]
    result = run(plan, params, state, jnp.asarray(tokens, jnp.int32), active, donate)
    if _uses_store(result.state):
        _settle(result.state, bool(result.ok))
    return result


def _uses_store(state: State) -> bool:
    return any(isinstance(one.pool, SlotPool) for one in state.layers)


def _settle(state: State, ok: bool) -> None:
    """Commits the token to the store, or drops it and raises what went wrong."""
    # The write callbacks run whenever XLA gets to them: wait until all of them have queued their rows.
    jax.block_until_ready([one.pool.queued for one in state.layers if isinstance(one.pool, SlotPool)])
    branch, generation = base.lookup(int(state.line.handle)), int(state.line.generation)
    if branch is None:
        raise StoreClosed("the store of this cache was closed; prefill again, or keep the store open")
    if ok:
        branch.commit(generation - 1)
        return
    branch.abort(generation)
    error = branch.take_error() or StoreError("a read failed, and the store kept no reason")
    error.state = state
    raise error


def _read(config, layer_plan, next_plan, params, next_params, cache, next_cache, x, choice, at, number, line):
    """One layer of a token up to its output.

    Begins with a look at the next layer, if there is anything to choose or to read there; `choice` is what the previous
    layer saw of this one. Returns (output, cache, Fresh, ok, Report, Choice for the next layer or None).
    """
    next_choice = None
    if next_plan is not None:
        q = _queries(config, next_params, x, at)
        seen = layer.choose(next_plan, next_cache.state, q)
        next_choice = seen if next_plan.method.lookahead else None
        if _prefetches(next_cache, "layer"):
            x = _after(next_cache.pool.submit(seen.need, number + 1, line), x)
    q, key, value = _project(config, params, x, at)
    if choice is not None:  # made a layer ago: without this the wait for its blocks could come before all computing
        choice = dataclasses.replace(choice, need=jnp.where(_exists(q), choice.need, layer_plan.spec.num_blocks))
    out, cache, fresh, ok, report = layer.read(layer_plan, cache, q, key, value, at, number, line, choice)
    if _prefetches(cache, "step"):
        likely = jnp.where(ok, layer.runners_up(layer_plan, cache.state, q), layer_plan.spec.num_blocks)
        out = _after(cache.pool.submit(likely, number, line), out)
    return _finish(config, params, x, out), cache, fresh, ok, report, next_choice


@functools.partial(jax.jit, static_argnums=0)
def _queries(config, params, x, at):
    return Block(config).apply({"params": params}, x, at, method="queries")


@functools.partial(jax.jit, static_argnums=0)
def _project(config, params, x, at):
    return Block(config).apply({"params": params}, x, at, method="project")


@functools.partial(jax.jit, static_argnums=0)
def _finish(config, params, x, out):
    return Block(config).apply({"params": params}, x, out, method="finish")


def _prefetches(cache: LayerCache, kind: str) -> bool:
    return isinstance(cache.pool, SlotPool) and cache.pool.prefetch == kind


def _after(token: Int32[Array, ""], x: Array) -> Array:
    """`x`, but not before the token exists. Tokens are 0 or 1, which the compiler cannot know."""
    return jnp.where(token < 0, jnp.nan, x)


def _exists(x: Array) -> Bool[Array, ""]:
    """True once `x` has been computed. No hidden state has this bit pattern, but the compiler cannot know that."""
    return jax.lax.bitcast_convert_type(jnp.sum(x), jnp.int32) != -0x7FEDCBA9


def _looks_ahead(plan: Plan, state: State, i: int) -> bool:
    """Whether layer i looks at the next one: to choose there, or to read early what will be chosen."""
    if i + 1 == len(plan.layers):
        return False
    following = plan.layers[i + 1]
    return following.method.lookahead or _prefetches(state.layers[i + 1], "layer")


def _write(layer_plan, cache, fresh, at, gate, number, line):
    return layer.write(layer_plan, cache, fresh, at, gate, number, line)


def _next_line(line: Line, ok) -> Line:
    return Line(line.handle, line.generation + ok)


@functools.cache
def _compiled(donate: bool, in_python: bool):
    """The staged functions, with and without donation of the cache; or as they are, if Python is to run the effects
    between the parts that are compiled."""
    if in_python:
        return _read, _write
    read = jax.jit(_read, static_argnums=(0, 1, 2), donate_argnums=(5,) if donate else ())
    write = jax.jit(_write, static_argnums=0, donate_argnums=(1,) if donate else ())
    return read, write


def _staged(plan, params, state, tokens, active, donate):
    read, write = _compiled(donate, _effects_in_python(state))
    x, choice = _embed(plan.config, params, tokens), None
    at, layers, fresh, oks, reports = state.length, list(state.layers), [], [], []
    for i, layer_plan in enumerate(plan.layers):
        number = _numbers(len(plan.layers))[i]
        following = _following(plan, params, state, i)
        x, layers[i], new, ok, report, choice = read(
            plan.config, layer_plan, following[0], params[f"layers_{i}"], following[1], layers[i], following[2], x,
            choice, at, number, state.line,
        )
        fresh.append(new)
        oks.append(ok)
        reports.append(report)
    logits = _unembed(plan.config, params, x)
    ok, gate, line, length = _close(oks, active, state.line, at)
    for i, layer_plan in enumerate(plan.layers):
        layers[i] = write(layer_plan, layers[i], fresh[i], at, gate, _numbers(len(plan.layers))[i], state.line)
    return Step(logits, State(tuple(layers), length, line), ok, tuple(reports))


def _following(plan: Plan, params, state: State, i: int):
    """Plan, parameters and cache of the next layer; Nones where layer i has no use for them."""
    if not _looks_ahead(plan, state, i):
        return None, None, None
    return plan.layers[i + 1], params[f"layers_{i + 1}"], state.layers[i + 1]


@functools.cache
def _numbers(count: int):
    """Layer numbers as device scalars, made once: a Python int per call would be transferred each time."""
    return [jnp.int32(i) for i in range(count)]


@jax.jit
def _close(oks, active, line, length):
    """Decides the token: gate of the writes, next generation, next lengths."""
    ok = functools.reduce(jnp.logical_and, oks)
    gate = ok & active
    return ok, gate, _next_line(line, ok), length + gate


def _fused_token(plan, params, state, tokens, active):
    model = Transformer(plan.config)
    x, choice = model.apply({"params": params}, tokens, method="embed"), None
    at, layers, fresh, reports, ok = state.length, list(state.layers), [], [], jnp.bool_(True)
    for i, layer_plan in enumerate(plan.layers):
        following = _following(plan, params, state, i)
        x, layers[i], new, fine, report, choice = _read(
            plan.config, layer_plan, following[0], params[f"layers_{i}"], following[1], layers[i], following[2], x,
            choice, at, jnp.int32(i), state.line,
        )
        ok = ok & fine
        fresh.append(new)
        reports.append(report)
    logits = model.apply({"params": params}, x, method="unembed")
    # XLA:CPU copies a whole pool that is read and then written unless the write depends on the read.
    gate = ok & active & _exists(x)
    for i, layer_plan in enumerate(plan.layers):
        layers[i] = _write(layer_plan, layers[i], fresh[i], at, gate, jnp.int32(i), state.line)
    return Step(logits, State(tuple(layers), at + gate, _next_line(state.line, ok)), ok, tuple(reports))


def _effects_in_python(state: State) -> bool:
    return any(isinstance(one.pool, SlotPool) and one.pool.backend == "python" for one in state.layers)


@functools.cache
def _compiled_token(donate: bool):
    return jax.jit(_fused_token, static_argnums=0, donate_argnums=(2,) if donate else ())


def _fused(plan, params, state, tokens, active, donate):
    if _effects_in_python(state):
        raise ConfigError("backend 'python' runs between compiled parts; use driver='staged'")
    return _compiled_token(donate)(plan, params, state, tokens, active)


def copy(state: State) -> State:
    """A state that shares no memory with the given one, so that either may be donated."""
    return jax.tree.map(jnp.copy, state)


def resident_bytes(state: State) -> int:
    """Bytes of every array of the cache that is held in memory, buffers and tables included."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state.layers))


