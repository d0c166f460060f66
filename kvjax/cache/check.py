"""Checks of a method against its contract: shapes and types without data, and the laws on random keys."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import state as caching
from kvjax.cache.fill import Prompts, empty_state, fill_memory
from kvjax.cache.layer import LayerCache, LayerPlan
from kvjax.cache.method import Method
from kvjax.cache.pool import StoreRef
from kvjax.cache.read import read_token
from kvjax.cache.types import Context, Placement, Selection, Spec, View, WindowEviction
from kvjax.cache.write import write_token
from kvjax.errors import MethodError
from kvjax.typing import Array, PyTree

_TOKENS, _STEPS, _HEADS, _GROUP, _HEAD_DIM = 150, 40, 2, 2, 16


def check_method(method: Method) -> None:
    """Checks a method on random keys: fills a cache of one layer from a prompt and decodes with it.

    For methods of your own, before you trust their figures; it takes seconds. Methods that were fitted to a model
    (`weights`) are checked with what they have for layer 0.

    Args:
      method: the method, as it is given to `LLM.prefill`.

    Raises:
      MethodError: a law of `kvjax.cache.method` is broken; the message names it, and what to do.
      ConfigError: the method does not fit a cache of 400 tokens.
    """
    spec = method.spec(kv_heads=_HEADS, group=_GROUP, head_dim=_HEAD_DIM, capacity=2 * (_TOKENS + _STEPS))
    check_outputs(method, spec)
    _check_run(LayerPlan(method, spec))


def check_outputs(method: Method, spec: Spec) -> None:
    """Checks what a method's functions return by shape and type, which needs no data.

    Raises:
      MethodError: the class is no frozen dataclass, or a result is not what the contract says.
    """
    _check_class(method)
    _check_shapes(method, spec)


@functools.lru_cache(maxsize=256)  # of a method that can be hashed
def _check_shapes(method: Method, spec: Spec) -> None:
    weights = jax.eval_shape(lambda: method.weights(0))
    index = _traced(method, "init", lambda weights: method.init(spec, weights), weights)
    context = _context(method, spec)
    built, placement = _traced(method, "build", functools.partial(method.build, spec), index, context)
    _same(method, "build", index, built)
    _placed(method, "build", placement, (spec.kv_heads, context.pos.shape[0]))
    view, q = _view(spec), jax.ShapeDtypeStruct((spec.kv_heads, spec.group, spec.head_dim), jnp.float32)
    selection = _traced(method, "select", functools.partial(method.select, spec), index, view, q)
    _selected(method, spec, selection)
    evicted = _evicted(spec, selection.note)
    appended, placement = _traced(method, "append", functools.partial(method.append, spec), index, view, evicted)
    _same(method, "append", index, appended)
    _placed(method, "append", placement, (spec.kv_heads,))


def _refuse(method: Method, broken: str, remedy: str):
    raise MethodError(f"{type(method).__name__} breaks the contract of methods: {broken}; {remedy}")


def _check_class(method: Method) -> None:
    kind = type(method)
    if "__dataclass_fields__" not in vars(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        _refuse(method, "its class is no frozen dataclass, so that its settings are not part of compiled programs",
                "decorate it with @dataclasses.dataclass(frozen=True)")
    try:
        hash(method)
    except TypeError as cause:
        _refuse(method, f"it cannot be hashed ({cause})", "use tuples and numbers as settings")


def _context(method: Method, spec: Spec) -> Context:
    """Returns the shapes of a prompt that is as long as the cache may grow."""
    tokens = spec.capacity
    asked = tokens if method.observed is None else min(method.observed, tokens)

    def made():
        positions = jnp.zeros(tokens, jnp.int32)
        return Context(
            jnp.zeros((spec.kv_heads, tokens, spec.head_dim)), positions, positions > 0, positions,
            jnp.zeros((spec.kv_heads, spec.group, asked, spec.head_dim)), positions[:asked],
        )

    return jax.eval_shape(made)


def _view(spec: Spec) -> View:
    """Shapes of what a method may look at."""
    index: Any = ()
    layer = jax.eval_shape(lambda: caching.empty_layer(spec, index, spec.key_type))
    return jax.eval_shape(functools.partial(caching.view, spec), layer)


def _evicted(spec: Spec, note: Any = None) -> WindowEviction:
    """Returns the shapes of the token that leaves the window."""
    def made(note):
        zero = jnp.int32(0)
        key = jnp.zeros((spec.kv_heads, spec.head_dim))
        return WindowEviction(key, zero, zero, zero > 0, jnp.zeros(spec.ring, jnp.int32), note)

    return jax.eval_shape(made, note)


def _traced(method: Method, name: str, function, *operands) -> Any:
    """Returns the shapes of a function's results."""
    try:
        return jax.eval_shape(function, *operands)
    except (TypeError, ValueError, IndexError, AttributeError) as cause:
        raise MethodError(f"{type(method).__name__}.{name} cannot be traced: {cause}; it has to be a pure function of "
                          "arrays of fixed shape") from cause


def _same(method: Method, name: str, before: PyTree, after: PyTree) -> None:
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (before, after)]
    if shapes[0] != shapes[1]:
        _refuse(method, f"{name} returns an index of other shapes or types than init made",
                "keep every array's shape and type")


def _placed(method: Method, name: str, placement, shape: tuple[int, ...]) -> None:
    if not isinstance(placement, Placement):
        _refuse(method, f"{name} returns {type(placement).__name__}", "return (index, Placement(block, row))")
    for part, array in (("block", placement.block), ("row", placement.row)):
        if array.shape != shape or array.dtype != jnp.int32:
            _refuse(method, f"{name} returns a Placement whose {part} is {array.dtype}{list(array.shape)}",
                    f"make it int32{list(shape)}")


def _selected(method: Method, spec: Spec, selection) -> None:
    if not isinstance(selection, Selection):
        _refuse(method, f"select returns {type(selection).__name__}", "return Selection(block, force)")
    shapes = {"block": (spec.kv_heads, spec.max_blocks), "force": (spec.kv_heads,)}
    for part, shape in shapes.items():
        array = getattr(selection, part)
        if array is None and part == "force":
            continue
        if array.shape != shape or array.dtype != jnp.int32:
            _refuse(method, f"select returns a Selection whose {part} is {array.dtype}{list(array.shape)}",
                    f"make it int32{list(shape)}, with NB={spec.num_blocks} for none")


# ---- with data


def _check_run(plan: LayerPlan) -> None:
    """Fills a cache from random keys, decodes with it, and looks at every step."""
    spec, method, rng = plan.spec, plan.method, np.random.default_rng(0)
    total = _TOKENS + _STEPS
    key, value = (jnp.asarray(rng.normal(size=(1, total, spec.kv_heads, spec.head_dim)), jnp.float32) for _ in "kv")
    query = jnp.asarray(rng.normal(size=(1, total, spec.kv_heads * spec.group, spec.head_dim)), jnp.float32)
    token = jnp.asarray(rng.integers(0, 50, (1, total)), jnp.int32)
    state = empty_state(plan, 1, "float32", method.weights(0))
    asked = min(_TOKENS if method.observed is None else method.observed, _TOKENS)
    prompts = Prompts(key[:, :_TOKENS], value[:, :_TOKENS], jnp.asarray([_TOKENS], jnp.int32), token[:, :_TOKENS],
                      query[:, _TOKENS - asked : _TOKENS])
    cache = fill_memory(plan, state, prompts)
    _check_positions(plan, cache, _TOKENS, "build")
    _check_invalid_append(plan, cache)
    step = jax.jit(functools.partial(_step, plan))
    for i in range(_TOKENS, total):
        chosen = jax.vmap(functools.partial(_select, plan))(cache.state, query[:, i])
        _check_selection(plan, np.asarray(chosen[0]), np.asarray(cache.state.count[0]))
        cache, attended = step(cache, query[:, i], key[:, i], value[:, i], token[:, i], jnp.asarray([i], jnp.int32))
        if int(attended.max()) > spec.budget:
            _refuse(plan.method, f"a step attends {int(attended.max())} tokens with a budget of {spec.budget}",
                    "let `spec` and `blocks` account for all rows")
        _check_positions(plan, cache, i + 1, "append")


def _select(plan: LayerPlan, layer, q) -> Array:
    return plan.method.select(plan.spec, layer.index, caching.view(plan.spec, layer), q.reshape(
        plan.spec.kv_heads, plan.spec.group, -1)).block


def _step(plan: LayerPlan, cache: LayerCache, q, key, value, token, at):
    zero, ref = jnp.int32(0), StoreRef(jnp.int32(-1), jnp.int32(0))
    _, cache, new_token, ok, report = read_token(plan, cache, q, key, value, at, zero, ref)
    cache, _ = write_token(plan, cache, new_token, at, jnp.ones(1, bool) & ok, zero, ref, token)
    return cache, report.attended


def _check_selection(plan: LayerPlan, block: np.ndarray, count: np.ndarray) -> None:
    """Ids are unique, within NB, and of blocks that hold something."""
    none = plan.spec.num_blocks
    for head, ids in enumerate(block):
        wanted = ids[ids != none]
        if np.any((ids < 0) | (ids > none)):
            _refuse(plan.method, f"select names blocks {ids.min()} to {ids.max()}, and there are {none}",
                    f"use ids from 0 to {none - 1}, and {none} for none")
        if len(set(wanted.tolist())) < wanted.size:
            _refuse(plan.method, f"select names a block twice (head {head}: {sorted(wanted.tolist())})",
                    "make ids unique, as `kvjax.ops.topk.top_blocks` does")
        if np.any(count[min(head, len(count) - 1)][wanted] == 0):
            _refuse(plan.method, "select names a block without tokens", "select only where `view.count` is above 0")


def _check_positions(plan: LayerPlan, cache: LayerCache, tokens: int, name: str) -> None:
    """Every token is in one place: a block, the tail, or nowhere if the method evicts."""
    spec, state = plan.spec, jax.tree.map(lambda leaf: np.asarray(leaf[0]), cache.state)
    if state.refused.any():
        _refuse(plan.method, f"{name} holds back more rows than `blocks` said (U = {spec.held})", "raise U")
    pos, count = np.asarray(cache.state.pos[0]), np.asarray(cache.state.count[0])
    for head in range(spec.kv_heads):
        table = min(head, len(pos) - 1)
        valid = np.arange(spec.block_rows) < count[table][:, None]
        if np.any(count[table] > spec.block_rows):
            _refuse(plan.method, f"{name} puts more tokens into a block than it has rows", "use free rows")
        placed = pos[table][valid].tolist()
        tail = state.tail.pos[head][state.tail.pos[head] >= 0].tolist()
        if len(set(placed)) < len(placed) or set(placed) & set(tail):
            _refuse(plan.method, f"{name} puts a token into two places, or two tokens into one row",
                    "give every token a row of its own")
        missing = set(range(tokens)) - set(placed) - set(tail)
        if missing and not plan.method.evicts:
            _refuse(plan.method, f"{name} loses token {min(missing)}", "place every token, or set `evicts`")


def _check_invalid_append(plan: LayerPlan, cache: LayerCache) -> None:
    """Where no token leaves the window nothing changes."""
    spec, layer = plan.spec, jax.tree.map(lambda leaf: leaf[0], cache.state)
    none = WindowEviction(jnp.ones((spec.kv_heads, spec.head_dim)), jnp.int32(-1), jnp.int32(-1), jnp.bool_(False),
                          jnp.full((spec.ring,), -1, jnp.int32))
    view = caching.view(spec, layer)
    index, placement = plan.method.append(spec, layer.index, view, none)
    if np.any(np.asarray(placement.block) != spec.num_blocks):
        _refuse(plan.method, "append places a token where none leaves the window",
                f"return block NB={spec.num_blocks} where not `evicted.valid`")
    same = jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=True), layer.index, index)
    if not all(jax.tree.leaves(same)):
        _refuse(plan.method, "append changes the index where no token leaves the window",
                "write where `evicted.valid` only, as with `.at[...].set(..., mode='drop')`")


