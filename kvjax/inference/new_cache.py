"""A context on its way into a new cache: it is encoded, the cache is planned, created in the store, and filled.

Everything that can be wrong with the arguments is found while the cache is planned, before anything is written.
"""

import dataclasses
import warnings
from typing import Protocol, runtime_checkable

import jax
import numpy as np

from kvjax.cache.method import ENDLESS, Method
from kvjax.errors import ConfigError, FormatMismatch, PromptError
from kvjax.inference import arguments, chunked_prefill, dense_prefill, prefill
from kvjax.inference.cache import Cache
from kvjax.inference.dense_prefill import PromptActivations
from kvjax.inference.generate import check_logits, extended
from kvjax.inference.model import TextModel
from kvjax.inference.plan import Plan, Slots, check_capacity, check_plan, make_plan, on_store, store_geometry
from kvjax.methods.full import Full
from kvjax.ops import quantize
from kvjax.store.interface import Branch, Store


@runtime_checkable
class PrefillDefaults(Protocol):
    """A choice of method and slots by batch size and context length (`kvjax.calibration.tuner.Tuning`)."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    def method(self, batch: int, context: int) -> Method: ...

    def slots(self, batch: int, context: int) -> Slots: ...


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The cache that a call of `LLM.prefill` asks for; see there."""

    method: Method | None
    store: Store | None
    capacity: int | None
    dtype: str | None
    slots: Slots | None


@dataclasses.dataclass(frozen=True)
class TokenisedPrompts:
    """Prompts as token ids, on the host."""

    read: PromptActivations  # the part to read densely; without layers until it has been read
    rest: list[list[int]]  # tokens of each prompt that go through the cache in chunks
    chunk: int | None  # tokens of a chunk; None = there are none

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [int(dense) + len(rest) for dense, rest in zip(self.read.length, self.rest, strict=True)]


# --------------------------------------------------------------------------------------------------- encode and read


def tokenise(model: TextModel, context, chunk: int | None) -> TokenisedPrompts:
    """Encodes a context on the host.

    Args:
      model: model with its tokenizer.
      context: text, token ids, or a list of either for a batch; or activations (`read`), which are taken as they are.
      chunk: tokens of a chunk; None = the whole context is read densely.

    Returns:
      The prompts.

    Raises:
      PromptError: a prompt is empty, or is neither text nor token ids of the model.
      ConfigError: `chunk` is no number of tokens, or is given with activations; or the model has no tokenizer.
      FormatMismatch: the activations are of another model.
    """
    if chunk is not None:
        chunked_prefill.check_chunk(chunk)
    if not isinstance(context, PromptActivations):
        rows = _rows(model, context)
        tokens, length = dense_prefill.batch([row[:chunk] for row in rows])
        rest = [[] if chunk is None else row[chunk:] for row in rows]
        return TokenisedPrompts(PromptActivations(tokens, length, (), model.fingerprint), rest, chunk)
    if chunk is not None:
        raise ConfigError(f"chunk={chunk}, but a context that was read before cannot be read in chunks; give the text")
    if context.fingerprint != model.fingerprint:
        raise FormatMismatch(f"the context was read by the model {context.fingerprint!r}, not by "
                             f"{model.fingerprint!r}; read it with this model")
    return TokenisedPrompts(context, [[]] * len(context.length), None)


def _rows(model: TextModel, context) -> list[list[int]]:
    """Returns the token ids of each prompt; raises as `tokenise`."""
    given = arguments.rows(context)
    rows = [model.encode(row, start=True) for row in given]
    if not rows or not all(rows) or "" in [row for row in given if isinstance(row, str)]:
        raise PromptError("the prompt is empty; give at least one token")
    return rows


def read(model: TextModel, context, capacity: int | None) -> PromptActivations:
    """Reads a context densely; see `LLM.read`."""
    if capacity is not None:
        check_capacity(capacity)
    tokens, length = dense_prefill.batch(_rows(model, context))
    capacity = usual_capacity(model, int(length.max())) if capacity is None else capacity
    return _read(model, PromptActivations(tokens, length, (), model.fingerprint), capacity)


def _read(model: TextModel, reading: PromptActivations, capacity: int) -> PromptActivations:
    """Adds the activations of all layers, for caches of this capacity."""
    tokens, config, layout = dense_prefill.pad(reading.tokens), model.config.for_length(capacity), model.layout
    if layout is not None:
        layout.check_batch(len(tokens))
    layers = tuple(jax.device_get(layer) for layer in dense_prefill.read(config, model.params, tokens, layout))
    return dataclasses.replace(reading, tokens=tokens, layers=layers, capacity=capacity)


# -------------------------------------------------------------------------------------------------------------- plan


def plan_cache(
    model: TextModel, tuning: PrefillDefaults | None, prompts: TokenisedPrompts, wanted: Wanted
) -> tuple[Plan, Slots | None, TokenisedPrompts]:
    """Sizes the cache and checks everything that can be checked before anything is written.

    Args:
      model: model with its tokenizer.
      tuning: choice of what `wanted` leaves open; None = full attention.
      prompts: prompts to put into the cache.
      wanted: the cache that is asked for.

    Returns:
      The plan, the slots, and the prompts, which are read already if the method fits itself to them.

    Raises:
      PromptError, ConfigError, MethodError, FormatMismatch: as `LLM.prefill`.
    """
    length, batch = max(prompts.lengths), len(prompts.lengths)
    if length > model.config.max_position and model.config.rope.kind != "dynamic":
        warnings.warn(f"the prompt has {length} tokens, and the model was made for {model.config.max_position}; expect "
                      "poor answers", stacklevel=3)
    capacity = _capacity(model, prompts, wanted)
    method, slots, dtype = _chosen(tuning, batch, capacity, wanted)
    method = model.with_fitted(method)
    plan = make_plan(model.config, method, batch, capacity, dtype, model.layout)
    _warn_of_no_effect(plan)
    _check_length(model, plan, prompts, length)
    if method.fits_prompts:
        if prompts.chunk is None and not prompts.read.layers:
            prompts = dataclasses.replace(prompts, read=_read(model, prompts.read, plan.capacity))
        plan = _fitted(model, plan, method, prompts.read)
    prefill.check_prompts(plan, np.asarray(prompts.read.length))
    if prompts.chunk is not None:
        check = chunked_prefill.check_prompt if any(prompts.rest) else chunked_prefill.check
        check(plan, prompts.chunk)
    check_plan(plan, wanted.store is not None, slots or Slots())
    return plan, slots, prompts


def _warn_of_no_effect(plan: Plan) -> None:
    """Warns of settings of a method that do nothing in this model."""
    method, layers = plan.method, len(plan.layers)
    if layers <= method.dense_layers:
        warnings.warn(f"dense_layers={method.dense_layers} are all {layers} layers of this model: everything is "
                      f"attended, and {method.name} has no effect; lower it", stacklevel=4)
    elif method.reuse > 1 and not any(layer.follows for layer in plan.layers):
        warnings.warn(f"reuse={method.reuse} has no effect in this model: no layer follows another, as those that "
                      "select have other sliding windows than those before them, or there is only one", stacklevel=4)


def _capacity(model: TextModel, prompts: TokenisedPrompts, wanted: Wanted) -> int:
    """Returns the capacity asked for; else that of the context, where it was read for one; else the usual one."""
    by_length, method = model.config.rope.by_length, wanted.method
    if wanted.capacity is not None:
        return wanted.capacity
    if by_length and prompts.read.layers:
        return prompts.read.capacity
    grows = method is None or method.dense_layers or not method.endless
    return usual_capacity(model, max(prompts.lengths)) if grows or by_length else ENDLESS


def usual_capacity(model: TextModel, length: int) -> int:
    """Returns the capacity for prompts of up to `length` tokens, with room for 1,024 tokens more.

    It is one of four between one power of two and the next. Where rotary embedding depends on the length, it stays
    within the model's original length if the prompt does.
    """
    step = max(256, 1 << (length + 1023).bit_length() - 3)
    usual, rope = -(-(length + 1024) // step) * step, model.config.rope
    within = rope.by_length and length <= rope.original_max_position
    return min(usual, rope.original_max_position) if within else usual


def _chosen(
    tuning: PrefillDefaults | None, batch: int, capacity: int, wanted: Wanted
) -> tuple[Method, Slots | None, str]:
    """Returns method, slots and type: those asked for, else the tuned ones, else full attention in float32."""
    method, slots, dtype = wanted.method, wanted.slots, wanted.dtype
    if method is None and tuning is not None:
        if wanted.store is None:
            raise ConfigError("the model's tuning is for caches over a store, and its memory limit holds only there; "
                              "give store=, or method= for a cache in memory")
        method, dtype = tuning.method(batch, capacity), tuning.dtype if dtype is None else dtype
        slots = slots or tuning.slots(batch, capacity)
    return Full() if method is None else method, slots, "float32" if dtype is None else dtype


def _check_length(model: TextModel, plan: Plan, prompts: TokenisedPrompts, length: int) -> None:
    """Raises PromptError or ConfigError if the prompts do not fit the cache, or were read for another."""
    if length > plan.capacity:
        raise PromptError(f"the prompt has {length} tokens but capacity={plan.capacity}; raise the capacity")
    if prompts.read.layers and plan.config != model.config.for_length(prompts.read.capacity):
        raise ConfigError(f"the context was read for a cache of capacity={prompts.read.capacity}, and keys are "
                          f"rotated otherwise for {plan.capacity}; read it with capacity={plan.capacity}")


def _fitted(model: TextModel, plan: Plan, method: Method, reading: PromptActivations) -> Plan:
    """Returns the plan with the method fitted to the prompts."""
    itemsize = np.dtype(quantize.stored_type(plan.dtype)).itemsize
    key_bytes = quantize.width(plan.dtype, model.config.head_dim) * itemsize
    keys = [layer.key for layer in reading.layers]
    method = method.for_prompts(plan.layers[-1].spec, keys, np.asarray(reading.length), key_bytes)
    return make_plan(model.config, method, plan.batch, plan.capacity, plan.dtype, plan.layout)


# --------------------------------------------------------------------------------------------------- create and fill


def create(model: TextModel, plan: Plan, store: Store, prompts: TokenisedPrompts) -> Branch:
    """Creates a branch with room for the prompts; raises StoreError."""
    return store.create(store_geometry(plan), model.fingerprint, _least_blocks(plan, prompts.lengths))


def _least_blocks(plan: Plan, lengths: list[int]) -> int:
    """Returns the least number of store blocks that the prompts take, reached if every block is full."""
    total = 0
    for i, layer in enumerate(plan.layers):
        if on_store(plan, i) and not layer.method.evicts:
            middle = [max(0, length - layer.spec.sinks - layer.spec.window) for length in lengths]
            total += layer.spec.block_heads * sum(-(-tokens // layer.spec.block_rows) for tokens in middle)
    return max(1, total)


def fill(
    model: TextModel, plan: Plan, prompts: TokenisedPrompts, branch: Branch | None, slots: Slots | None
) -> Cache:
    """Fills a cache from the prompts.

    Args:
      model: model with its tokenizer.
      plan: plan of the cache.
      prompts: the prompts.
      branch: where its blocks are kept, which is discarded if this fails; None = in memory.
      slots: how many blocks of a store are kept in memory.

    Returns:
      The cache, with the logits of the next token.

    Raises:
      NotFinite: the model computed NaN or infinity.
      StoreError: the store failed.
    """
    dense = prompts.read
    try:
        state, logits = prefill.fill_cache(
            plan, model.params, dense_prefill.pad(dense.tokens), dense.length, branch, slots, dense.layers or None
        )
        cache = Cache(plan, state, logits, branch, model.fingerprint)
        check_logits(model.params, cache)
    except BaseException:
        if branch is not None:
            branch.discard()
        raise
    return cache if prompts.chunk is None else read_more(model, cache, prompts.rest, prompts.chunk)


def read_more(model: TextModel, cache: Cache, rows: list[list[int]], chunk: int) -> Cache:
    """Reads token ids of each sequence into `cache`, which must not be used again and is discarded if this fails.

    Raises:
      ConfigError: the method needs single tokens.
      PromptError: the tokens exceed the capacity.
      NotFinite: the model computed NaN or infinity.
      StoreError: the store failed.
    """
    try:
        cache = extended(model.params, cache, rows, chunk)
        check_logits(model.params, cache)
        return cache
    except BaseException:
        cache.discard()
        raise
