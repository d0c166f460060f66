"""Decoding: one token at a time over the caches of all layers.

Two drivers share `read_token` and `write_token`. `staged` is a Python loop over layers, each a
compiled function that is traced once and serves every layer of the same shape; `fused` is the whole
token as one program with the store's callbacks inside. They give equal tokens. Both read every
layer before they write any, so that a token either happens in all layers or in none.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import shared_slots
from kvjax.cache.layer import LayerCache
from kvjax.cache.method import Placement
from kvjax.cache.pool import Pool, StoreRef, gated
from kvjax.cache.read import Report, choose, of_active, read_token, runners_up
from kvjax.cache.slots import SlotPool
from kvjax.cache.write import write_token
from kvjax.errors import ConfigError, StoreClosed, StoreError, to_raise
from kvjax.inference.layer_offload import LayerLoader, is_offloaded
from kvjax.inference.plan import Plan, State
from kvjax.inference.prefill import embed, unembed
from kvjax.models.transformer import Block, Transformer
from kvjax.ops import barriers
from kvjax.store import interface
from kvjax.typing import Array, Bool, Int32, Logits, PyTree, pytree

Driver = Literal["staged", "fused"]


@pytree
class Step:
    """Result of one token."""

    logits: Logits
    state: State
    ok: Bool[Array, ""]  # False: a read failed, and the state is the old one
    reports: tuple[Report, ...]


def step(
    plan: Plan, params: PyTree, state: State, tokens: Int32[Array, "B"] | np.ndarray,
    active: Bool[Array, "B"] | np.ndarray | None = None, driver: Driver = "staged", donate: bool = False,
) -> Step:
    """Decodes one token per sequence; sequences that are not `active` stay as they are.

    With `donate` the given state's memory is reused and the value must not be used again. The step
    is committed to the store, or aborted there; a failed read raises the store's typed error, whose
    `state` attribute is the cache as it was, ready for a retry. Where a read was fine and the commit
    fails, or after Ctrl-C, the given state is what is left, unless it was donated or has parked layers.
    """
    active = np.ones(plan.batch, bool) if active is None else active
    check_driver(driver)
    run = _staged if driver == "staged" else _fused
    forget(state)
    result = run(plan, params, state, _operand(tokens, jnp.int32), _operand(active, jnp.bool_), donate)
    if uses_store(result.state):
        settle(result.state, bool(result.ok))
    return result


def _operand(x: Array | np.ndarray, kind) -> Array:
    """What a compiled function is given. An array on the host stays there, as a program to bring it to the device would
    take longer than the call does with it; a copy, as the call may look at it after the caller has changed it."""
    return x.astype(kind) if isinstance(x, jax.Array) else np.array(x, kind)  # type: ignore[return-value]


def check_driver(driver: str) -> None:
    """Raises ConfigError for a driver that there is not."""
    if driver not in get_args(Driver):
        raise ConfigError(f"unknown driver {driver!r}; use {' or '.join(get_args(Driver))}")


def temporary_bytes(plan: Plan, params: PyTree, state: State) -> int:
    """Bytes that the fused driver takes for one token beside weights and state, by XLA's plan: gathered rows, scores,
    and what is computed of them. Compiles the token once more."""
    leaves, tree = jax.tree.flatten(state)
    token, active = jnp.zeros(plan.batch, jnp.int32), jnp.ones(plan.batch, bool)

    def one(leaves, params):
        return _fused_token(plan, params, jax.tree.unflatten(tree, leaves), token, active)

    found = jax.jit(one, donate_argnums=0).lower(leaves, params).compile().memory_analysis()
    if found is None:
        raise ConfigError(f"XLA's {jax.default_backend()} backend does not tell the memory of a program")
    return found.temp_size_in_bytes


def uses_store(state: State) -> bool:
    return any(isinstance(one.pool, SlotPool) for one in state.layers)


def settle(state: State, ok: bool) -> None:
    """Commits the token to the store, or drops it and raises what went wrong, Ctrl-C amid a callback as itself."""
    branch, generation = interface.lookup(int(state.ref.handle)), int(state.ref.generation) - ok
    if branch is None:
        raise StoreClosed("the store of this cache was closed; prefill again, or keep the store open")
    try:
        # The write callbacks run whenever XLA gets to them: wait until all of them have queued their rows.
        jax.block_until_ready([one.pool.queued for one in state.layers if isinstance(one.pool, SlotPool)])
        if ok:
            branch.commit(generation)
            return
        failure = branch.take_error() or StoreError("a read failed, and the store kept no reason")
        failure.state = state
        raise failure
    except BaseException as error:
        branch.abort(generation)  # the token is over, and another one may be tried in its place
        kept = to_raise(error)
        if kept is not error:
            raise kept from None
        raise


def _read(config, layer_plan, next_plan, params, next_params, cache, next_cache, x, chosen, at, number, ref, active):
    """One layer of a token up to its output.

    Begins with a look at the next layer, if there is anything to choose or to read there; `chosen` is what the previous
    layer saw of this one, or made for both. Returns (output, cache, NewToken, ok, Report, SelectedRows for the next
    layer or None, slots that it leaves or None).
    """
    next_chosen = projected = None
    if chosen is None and layer_plan.method.lookahead and _prefetches(cache.pool, "layer"):
        # The first layer, which nobody looked ahead at: its reads should not queue behind those of the next one.
        projected = _project(config, params, x, at)
        chosen = _choose(layer_plan, cache.state, projected[0], active)
        x = barriers.after(cache.pool.submit(chosen.need, number, ref), x)
    if next_plan is not None and not next_plan.follows:
        q = _queries(config, next_params, x, at)
        seen = _choose(next_plan, next_cache.state, q, active)
        next_chosen = seen if next_plan.method.lookahead else None
        if _prefetches(next_cache.pool, "layer"):
            x = barriers.after(next_cache.pool.submit(seen.need, number + 1, ref), x)
    q, key, value = _project(config, params, x, at) if projected is None else projected
    early = chosen is not None
    chosen = chosen if early else _choose(layer_plan, cache.state, q, active)
    # Of blocks that are known early waiting could come before all computing, and slots still be the layer's before.
    if isinstance(cache.pool, SlotPool) and (early or cache.pool.passing):
        ready = barriers.exists(q) & barriers.exists(x)
        chosen = dataclasses.replace(chosen, need=jnp.where(ready, chosen.need, layer_plan.spec.num_blocks))
    out, cache, new_token, ok, report = read_token(layer_plan, cache, q, key, value, at, number, ref, chosen)
    if next_plan is not None and next_plan.follows:
        next_chosen = chosen
        if _prefetches(next_cache.pool, "layer"):
            out = barriers.after(next_cache.pool.submit(chosen.need, number + 1, ref), out)
    if _prefetches(cache.pool, "step") and not layer_plan.follows:  # followers do not rank blocks
        likely = gated(runners_up(layer_plan, cache.state, q), ok & active, layer_plan.spec.num_blocks)
        out = barriers.after(cache.pool.submit(likely, number, ref), out)
    cache, left = shared_slots.leave(cache)
    return _finish(config, params, x, out), cache, new_token, ok, report, next_chosen, left


def _choose(layer_plan, state, q, active):
    return of_active(layer_plan, choose(layer_plan, state, q), active)


@functools.partial(jax.jit, static_argnums=0)
def _queries(config, params, x, at):
    return barriers.rounded(Block(config).apply({"params": params}, barriers.rounded(x), at, method="queries"))


@functools.partial(jax.jit, static_argnums=0)
def _project(config, params, x, at):
    made = Block(config).apply({"params": params}, barriers.rounded(x), at, method="project")
    return jax.tree.map(barriers.rounded, made)


@functools.partial(jax.jit, static_argnums=0)
def _finish(config, params, x, out):
    x, out = barriers.rounded(x), barriers.rounded(out)
    return barriers.rounded(Block(config).apply({"params": params}, x, out, method="finish"))


def _prefetches(pool: Pool, kind: str) -> bool:
    return isinstance(pool, SlotPool) and pool.prefetch == kind


def _looks_ahead(plan: Plan, layers, i: int) -> bool:
    """Whether layer i looks at the next one: to choose there, or to read early what will be chosen."""
    if i + 1 == len(plan.layers):
        return False
    following = plan.layers[i + 1]
    return following.follows or following.method.lookahead or _prefetches(layers[i + 1].pool, "layer")


def _next_ref(ref: StoreRef, ok) -> StoreRef:
    return StoreRef(ref.handle, ref.generation + ok)


@functools.cache
def _compiled(donate: bool):
    """The staged functions, with or without donation of the cache."""
    read = jax.jit(_read, static_argnums=(0, 1, 2), donate_argnums=(5,) if donate else ())
    write = jax.jit(write_token, static_argnums=0, donate_argnums=(1,) if donate else ())
    return read, write


def _staged(plan, params, state, tokens, active, donate):
    loader = LayerLoader(state.layers)
    try:
        return _layer_by_layer(plan, params, state, loader, tokens, active, donate)
    except BaseException as error:  # Ctrl-C, or a parked layer cannot be read: the token is over
        drop(state, loader, error)
        raise


def drop(state: State, loader: LayerLoader, error: BaseException) -> None:
    """Ends a token that did not get through all layers; a StoreError keeps the cache as it was, ready for a retry."""
    loader.abandon()
    forget(state)
    if isinstance(error, StoreError):
        error.state = dataclasses.replace(state, layers=loader.layers)


def forget(state: State) -> None:
    """Drops what is queued of a token after this state: of one that Ctrl-C ended on its way to `settle`."""
    branch = interface.lookup(int(state.ref.handle)) if uses_store(state) else None
    if branch is not None:
        branch.abort(int(state.ref.generation))


def _layer_by_layer(plan, params, state, loader, tokens, active, donate):
    read, write = _compiled(donate)
    x, chosen, slots = embed(plan.config, params, tokens), None, None
    at, new_token, oks, reports = state.length, [], [], []
    for i, layer_plan in enumerate(plan.layers):
        number = _numbers(len(plan.layers))[i]
        one = shared_slots.take(loader.open(i), slots)
        loader.begin(i + 1)
        following = _following(plan, params, state.layers, i, loader.open)
        x, one, new, ok, report, chosen, left = read(
            plan.config, layer_plan, following[0], params[f"layers_{i}"], following[1], one, following[2], x, chosen,
            at, number, state.ref, active,
        )
        loader.put(i, one)
        slots = slots if left is None else left
        new_token.append(new)
        oks.append(ok)
        reports.append(report)
    logits = unembed(plan.config, params, x)
    ok, gate, ref, length = _close(oks, active, state.ref, at)
    loader.give_back(slots)
    loader.commit()
    numbers = _numbers(len(plan.layers))
    write_layers(plan, loader, lambda i, cache, leader: write(
        plan.layers[i], cache, new_token[i], at, gate, numbers[i], state.ref, tokens, leader
    ))
    return Step(logits, State(loader.layers, length, ref), ok, tuple(reports))


def write_layers(plan: Plan, loader: LayerLoader, write: Callable[[int, LayerCache, Placement | None], tuple]) -> None:
    """Has `write(i, cache, leader)` give the cache of every layer, and where tokens went for layers that follow it."""
    leader = None
    for i, layer_plan in enumerate(plan.layers):
        cache = loader.open(i)
        loader.begin(i + 1)
        cache, leader = write(i, cache, leader if layer_plan.follows else None)
        loader.put(i, cache)
    loader.commit()


def _following(plan: Plan, params, layers, i: int, open_layer):
    """Plan, parameters and cache of the next layer; Nones where layer i has no use for them."""
    if not _looks_ahead(plan, layers, i):
        return None, None, None
    return plan.layers[i + 1], params[f"layers_{i + 1}"], open_layer(i + 1)


@functools.cache
def _numbers(count: int):
    """Layer numbers as device scalars, made once: a Python int per call would be transferred each time."""
    return [jnp.int32(i) for i in range(count)]


@jax.jit
def _close(oks, active, ref, length):
    """Decides the token: gate of the writes, next generation, next lengths."""
    ok = functools.reduce(jnp.logical_and, oks)
    gate = ok & active
    return ok, gate, _next_ref(ref, ok), length + gate


def _fused_token(plan, params, state, tokens, active):
    model = Transformer(plan.config)
    x, chosen, slots = model.apply({"params": params}, tokens, method="embed"), None, None
    at, layers, new_token, reports, ok = state.length, list(state.layers), [], [], jnp.bool_(True)
    for i, layer_plan in enumerate(plan.layers):
        following = _following(plan, params, state.layers, i, state.layers.__getitem__)
        x, layers[i], new, fine, report, chosen, left = _read(
            plan.config, layer_plan, following[0], params[f"layers_{i}"], following[1], shared_slots.take(layers[i],
            slots), following[2], x, chosen, at, jnp.int32(i), state.ref, active,
        )
        slots = slots if left is None else left
        ok = ok & fine
        new_token.append(new)
        reports.append(report)
    logits = model.apply({"params": params}, x, method="unembed")
    gate = ok & active & barriers.exists(x) & barriers.positions_exist(report.selected for report in reports)
    layers, leader = shared_slots.give_back(layers, slots), None
    for i, layer_plan in enumerate(plan.layers):
        leader = leader if layer_plan.follows else None
        layers[i], leader = write_token(
            layer_plan, layers[i], new_token[i], at, gate, jnp.int32(i), state.ref, tokens, leader
        )
    return Step(logits, State(tuple(layers), at + gate, _next_ref(state.ref, ok)), ok, tuple(reports))


@functools.cache
def _compiled_token(donate: bool):
    return jax.jit(_fused_token, static_argnums=0, donate_argnums=(2,) if donate else ())


def _fused(plan, params, state, tokens, active, donate):
    if is_offloaded(state.layers):
        raise ConfigError("parked layers come and go between compiled parts; use driver='staged'")
    return _compiled_token(donate)(plan, params, state, tokens, active)
