"""Decoding: one token at a time over the caches of all layers.

Two drivers run the same function. `staged` runs it in Python over parts that are compiled, each once for all layers of
one shape; `fused` compiles all of it as one program with the store's callbacks inside. A third one, `loop`, runs whole
answers as one program of such tokens (`kvjax.inference.loop`). They give equal tokens. Every layer is read before any
is written, so that a token either happens in all layers or in none.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import shared_slots
from kvjax.cache.layer import LayerCache, LayerPlan
from kvjax.cache.pool import StoreRef
from kvjax.cache.read import Report, SelectedRows, read_token
from kvjax.cache.slots import SlotPool
from kvjax.cache.state import NewToken
from kvjax.cache.types import Placement
from kvjax.cache.write import write_token
from kvjax.errors import ConfigError
from kvjax.inference import lookahead, on_mesh
from kvjax.inference.blocks import embed, finish, project, sink_logits, unembed
from kvjax.inference.commit import drop, forget, settle, uses_store
from kvjax.inference.layer_offload import LayerLoader, is_offloaded
from kvjax.inference.lookahead import NextLayer, Token
from kvjax.inference.plan import Plan, State, specs_of_layers
from kvjax.ops import barriers
from kvjax.typing import Array, Bool, Float, Int32, Logits, PyTree, pytree

Driver = Literal["staged", "fused", "loop"]
SINGLE = ("staged", "fused")  # drivers of single tokens


@pytree
class Step:
    """Result of one token."""

    logits: Logits
    state: State
    ok: Bool[Array, ""]  # False: a read failed, and the state is the old one
    reports: tuple[Report, ...]


@pytree
class Pending:
    """A layer's part of a token that is written once every layer has been read."""

    new_token: NewToken
    ok: Bool[Array, ""]  # False: its blocks could not be read
    report: Report | None = None  # None for a chunk


@pytree
class LayerRead:
    """A layer's part of a token, or of a chunk, before anything is written."""

    x: Float[Array, "*B E"]  # output of the layer
    cache: LayerCache
    pending: Pending
    selected: SelectedRows | None  # for the next layer; None = it selects itself
    slots: shared_slots.Space  # left for the next layer that shares them


def step(
    plan: Plan, params: PyTree, state: State, tokens: Int32[Array, "B"] | np.ndarray,
    active: Bool[Array, "B"] | np.ndarray | None = None, driver: Driver = "staged", donate: bool = False,
) -> Step:
    """Decodes one token per sequence; sequences that are not `active` stay as they are.

    Args:
      plan: what is static about the cache.
      params: the model's.
      state: the cache; with `donate` its memory is reused, and the value must not be used again.
      tokens: token ids [B].
      active: sequences that take part [B]; None = all.
      driver: "staged" or "fused".
      donate: whether the state may be overwritten.

    Returns:
      Logits [B, V] and the state after the token, committed to the store.

    Raises:
      StoreError: a read failed, or the commit; after a failed read its `state` is the cache as it was, ready for a
        retry. Where a read was fine and the commit fails, or after Ctrl-C, the given state is what is left, unless it
        was donated or has offloaded layers.
      ConfigError: for an unknown driver, "loop", or "fused" with offloaded layers.
    """
    active = np.ones(plan.batch, bool) if active is None else active
    check_single(driver)
    run = _staged if driver == "staged" else _fused
    forget(state)
    result = run(plan, params, state, _operand(tokens, jnp.int32), _operand(active, jnp.bool_), donate)
    if uses_store(result.state):
        settle(result.state, bool(result.ok))
    return result


def _operand(x: Array | np.ndarray, kind) -> Array:
    """Returns an operand of a compiled function.

    An array on the host stays there, as a program to bring it to the device would take longer than the call does with
    it; it is copied, as the call may look at it after the caller has changed it.
    """
    return x.astype(kind) if isinstance(x, jax.Array) else np.array(x, kind)  # type: ignore[return-value]


def check_driver(driver: str) -> None:
    """Raises ConfigError for a driver that there is not."""
    if driver not in get_args(Driver):
        raise ConfigError(f"unknown driver {driver!r}; use {' or '.join(get_args(Driver))}")


def check_single(driver: str) -> None:
    """Raises ConfigError unless this is a driver of single tokens."""
    check_driver(driver)
    if driver not in SINGLE:
        raise ConfigError(f"driver={driver!r} runs whole answers (generate, stream, chat), not single tokens; use "
                          f"{' or '.join(SINGLE)}")


def temporary_bytes(plan: Plan, params: PyTree, state: State) -> int:
    """Returns the bytes that the fused driver takes for one token beside weights and state, by XLA's plan: gathered
    rows, scores, and what is computed of them. Compiles the token once more."""
    leaves, tree = jax.tree.flatten(state)
    token, active = jnp.zeros(plan.batch, jnp.int32), jnp.ones(plan.batch, bool)

    def one(leaves, params):
        return fused_token(plan, params, jax.tree.unflatten(tree, leaves), token, active)

    found = jax.jit(one, donate_argnums=0).lower(leaves, params).compile().memory_analysis()
    if found is None:
        raise ConfigError(f"XLA's {jax.default_backend()} backend does not tell the memory of a program")
    return found.temp_size_in_bytes


# ------------------------------------------------------------------------------------ one layer


def read_layer(
    config, plan: LayerPlan, params, cache: LayerCache, following: NextLayer | None, token: Token,
    selected: SelectedRows | None,
) -> LayerRead:
    """Reads one layer for a token: selects, fetches, attends, and looks ahead at the next layer.

    Args:
      config: this layer's (`ModelConfig.layers`).
      plan: what is static about this layer's cache.
      params: this layer's.
      cache: this layer's.
      following: the next layer, if anything is to be selected or read there early.
      token: the token, with this layer's input.
      selected: the selection that the previous layer made for this one, or handed on; None = to be made here.
    """
    projected = None
    if selected is None:
        token, projected, selected = lookahead.first_layer(config, plan, params, cache, token)
    token, for_next = lookahead.look_ahead(following, token)
    q, key, value = project(config, params, token.x, token.at) if projected is None else projected
    early = selected is not None
    if selected is None:
        selected = lookahead.select(plan, cache.state, q, token.active)
    # Waiting for blocks that are known early could come before all computing, and slots still be the layer's before.
    if isinstance(cache.pool, SlotPool) and (early or cache.pool.passing):
        ready = barriers.exists(q) & barriers.exists(token.x)
        selected = dataclasses.replace(selected, need=jnp.where(ready, selected.need, plan.spec.num_blocks))
    out, cache, new_token, ok, report = read_token(
        plan, cache, q, key, value, token.at, token.number, token.ref, selected, sink_logits(config, params)
    )
    out, for_next = lookahead.pass_on(following, selected, token, out, for_next)
    out = lookahead.read_for_next_step(plan, cache, q, ok, token, out)
    cache, slots = shared_slots.leave(cache)
    return LayerRead(finish(config, params, token.x, out), cache, Pending(new_token, ok, report), for_next, slots)


class Parts(NamedTuple):
    """The two halves of a layer's step, and what comes before and after all layers."""

    read: Callable[..., LayerRead]
    write: Callable[..., tuple[LayerCache, Placement]]
    embed: Callable[..., Array]
    unembed: Callable[..., Array]
    close: Callable[..., tuple]


@functools.cache
def compiled_parts(donate: bool) -> Parts:
    """Returns the parts compiled, with or without donation of the layer's cache."""
    read = jax.jit(read_layer, static_argnums=(0, 1), donate_argnums=(3,) if donate else ())
    write = jax.jit(write_token, static_argnums=0, donate_argnums=(1,) if donate else ())
    return Parts(read, write, embed, unembed, _close)


@functools.cache
def compiled_parts_on_mesh(plan: Plan, donate: bool) -> Parts:
    """Returns the parts compiled for the devices of a mesh; configurations and plans are those of one device."""
    layout, model = plan.layout, plan.config
    assert layout is not None
    each, heads, everywhere = layout.by_sequence, layout.heads_at(1), layout.everywhere
    caches = dict(zip(plan.of_one.layers, specs_of_layers(plan), strict=True))
    token, report = on_mesh.specs_of_token(layout), on_mesh.specs_of_report(layout)
    pending = on_mesh.specs(Pending, new_token=heads, ok=everywhere, report=report)

    def read(config, layer, params, cache, following, token_, selected):
        ahead = None if following is None else caches[following.plan]
        takes = (layout.params(model, params), caches[layer], on_mesh.specs_of_next(layout, model, following, ahead),
                 token, heads)
        gives = on_mesh.specs(LayerRead, x=each, cache=caches[layer], pending=pending, selected=heads, slots=everywhere)
        run = layout.run(functools.partial(read_layer, config, layer), takes, gives)
        return run(params, cache, following, token_, selected)

    def write(layer, cache, new_token, at, gate, number, ref, tokens, leader):
        takes = caches[layer], heads, each, each, everywhere, everywhere, each, heads
        run = layout.run(functools.partial(write_token, layer), takes, (caches[layer], heads))
        return run(cache, new_token, at, gate, number, ref, tokens, leader)

    def whole(function):
        return lambda config, params, x: function(layout, model, params, x)

    takes, gives = (everywhere, each, everywhere, each), (everywhere, each, everywhere, each)
    return Parts(
        jax.jit(read, static_argnums=(0, 1), donate_argnums=(3,) if donate else ()),
        jax.jit(write, static_argnums=0, donate_argnums=(1,) if donate else ()),
        whole(on_mesh.embed), whole(on_mesh.unembed), jax.jit(layout.run(_close, takes, gives)),
    )


# ------------------------------------------------------------------------------------ all layers


def read_layers(plan: Plan, loader: LayerLoader, x, read: Callable[..., LayerRead]) -> tuple[Array, list[Pending]]:
    """Has `read(i, cache, x, selected)` read every layer, each with the output of the one before.

    Returns the last layer's output, and what every layer has to write; their caches are the loader's.
    """
    pending: list[Pending] = []
    selected, slots = None, None
    for i in range(len(plan.layers)):
        cache = shared_slots.take(loader.open(i), slots)
        loader.begin(i + 1)
        layer = read(i, cache, x, selected)
        loader.put(i, layer.cache)
        x, selected = layer.x, layer.selected
        slots = slots if layer.slots is None else layer.slots
        pending.append(layer.pending)
    loader.give_back(slots)
    loader.commit()
    return x, pending


def write_layers(plan: Plan, loader: LayerLoader, write: Callable[[int, LayerCache, Placement | None], tuple]) -> None:
    """Has `write(i, cache, leader)` write every layer; it returns the cache, and where tokens went for followers."""
    leader = None
    for i, layer_plan in enumerate(plan.layers):
        cache = loader.open(i)
        loader.begin(i + 1)
        cache, leader = write(i, cache, leader if layer_plan.follows else None)
        loader.put(i, cache)
    loader.commit()


def _token(plan: Plan, params, state: State, loader: LayerLoader, tokens, active, parts: Parts, one_program: bool):
    """One token through all layers; in one program the writes wait for every read."""
    at, count = state.length, len(plan.layers)
    numbers = [jnp.int32(i) for i in range(count)] if one_program else _numbers(count)

    def read(i, cache, x, selected):
        following = lookahead.next_layer(plan, params, state.layers, i, loader.open)
        token, layer = Token(x, at, active, numbers[i], state.ref), plan.config.layers[i]
        return parts.read(layer, plan.layers[i], params[f"layers_{i}"], cache, following, token, selected)

    def write(i, cache, leader):
        return parts.write(
            plan.layers[i], cache, pending[i].new_token, at, gate, numbers[i], state.ref, tokens, leader
        )

    x, pending = read_layers(plan, loader, parts.embed(plan.config, params, tokens), read)
    reports = tuple(layer.report for layer in pending if layer.report is not None)
    logits = parts.unembed(plan.config, params, x)
    ok, gate, ref, length = parts.close([layer.ok for layer in pending], active, state.ref, at)
    if one_program:
        gate &= barriers.exists(x) & barriers.positions_exist(report.selected for report in reports)
    write_layers(plan, loader, write)
    return Step(logits, State(loader.layers, length, ref), ok, reports)


@jax.jit
def _close(oks, active, ref, length):
    """Decides the token: returns whether all was read, the gate of the writes, and the next generation and lengths."""
    ok = functools.reduce(jnp.logical_and, oks)
    gate = ok & active
    return ok, gate, StoreRef(ref.handle, ref.generation + ok), length + gate


@functools.cache
def _numbers(count: int) -> list[Array]:
    """Returns layer numbers on the device, made once: a Python int would be transferred in each call."""
    return [jnp.int32(i) for i in range(count)]


def _staged(plan, params, state, tokens, active, donate):
    loader = LayerLoader(state.layers)
    parts = compiled_parts(donate) if plan.layout is None else compiled_parts_on_mesh(plan, donate)
    try:
        return _token(plan.of_one, params, state, loader, tokens, active, parts, one_program=False)
    except BaseException as error:  # Ctrl-C, or an offloaded layer cannot be read: the token is over
        drop(state, loader, error)
        raise


def fused_token(plan: Plan, params, state: State, tokens, active) -> Step:
    """Runs one token in the program that calls this."""
    layout = plan.layout
    if layout is None:
        return _fused_token(plan, params, state, tokens, active)
    report, each = on_mesh.specs_of_report(layout), layout.by_sequence
    cache = on_mesh.specs_of_state(plan)
    gives = on_mesh.specs(Step, logits=each, state=cache, ok=layout.everywhere, reports=(report,) * len(plan.layers))
    takes = layout.params(plan.config, params), cache, each, each
    run = layout.run(functools.partial(_fused_token, plan.of_one), takes, gives)
    return run(params, state, tokens, active)


def _fused_token(plan: Plan, params, state: State, tokens, active) -> Step:
    parts = Parts(read_layer, write_token, embed, unembed, _close)
    return _token(plan, params, state, LayerLoader(state.layers), tokens, active, parts, one_program=True)


@functools.cache
def compiled_token(donate: bool):
    """Returns a whole token as one compiled function."""
    return jax.jit(fused_token, static_argnums=0, donate_argnums=(2,) if donate else ())


def _fused(plan, params, state, tokens, active, donate):
    if is_offloaded(state.layers):
        raise ConfigError("offloaded layers come and go between compiled parts; use driver='staged'")
    return compiled_token(donate)(plan, params, state, tokens, active)
