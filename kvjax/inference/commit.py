"""The end of a token or a chunk at the store: committed as a whole, or dropped as a whole."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvjax.cache import callbacks
from kvjax.cache.pool import StoreRef
from kvjax.cache.slots import SlotPool
from kvjax.errors import StoreClosed, StoreError, to_raise
from kvjax.inference.layer_offload import LayerLoader
from kvjax.inference.plan import State
from kvjax.store import interface
from kvjax.typing import Array, Bool


def uses_store(state: State) -> bool:
    """Returns True if any layer's blocks are in a store."""
    return bool(_pools(state))


def _pools(state: State) -> list[SlotPool]:
    return [layer.pool for layer in state.layers if isinstance(layer.pool, SlotPool)]


def settle(state: State, ok: bool) -> None:
    """Commits the token to the store, or drops it and raises what went wrong, Ctrl-C amid a callback as itself.

    Args:
      state: the state after the token.
      ok: whether everything could be read.

    Raises:
      StoreError: with `state`, if a read failed.
      StoreClosed: if the store was closed meanwhile.
    """
    branch, generation = interface.lookup(int(state.ref.handle)), int(state.ref.generation) - ok
    if branch is None:
        raise StoreClosed("the store of this cache was closed; prefill again, or keep the store open")
    try:
        # The write callbacks run whenever XLA gets to them: wait until all of them have queued their rows.
        jax.block_until_ready([pool.queued for pool in _pools(state)])
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


def settle_inside(state: State, ok: Bool[Array, ""]) -> tuple[State, Bool[Array, ""]]:
    """Commits the token to the store inside the program that computed it.

    Args:
      state: the state after the token.
      ok: whether everything could be read; if not, nothing is committed.

    Returns:
      The state, whose generation depends on the commit, so that the reads of the next token come after it; and whether
      the token was committed. True without a store.
    """
    pools = _pools(state)
    if not pools:
        return state, jnp.bool_(True)
    ref, written = state.ref, functools.reduce(jnp.add, [pool.queued for pool in pools])
    done = callbacks.commit(pools[0].backend, StoreRef(ref.handle, ref.generation - ok), ok, written)
    after = StoreRef(ref.handle, ref.generation + (done < 0))  # never, which the compiler cannot know
    return dataclasses.replace(state, ref=after), done > 0


def drop(state: State, loader: LayerLoader, error: BaseException) -> None:
    """Ends a token that did not get through all layers; a StoreError keeps the cache as it was, ready for a retry."""
    loader.abandon()
    forget(state)
    if isinstance(error, StoreError):
        error.state = dataclasses.replace(state, layers=loader.layers)


def forget(state: State) -> None:
    """Drops what is queued of a token after this state: one that Ctrl-C ended on its way to `settle`."""
    branch = interface.lookup(int(state.ref.handle)) if uses_store(state) else None
    if branch is not None:
        branch.abort(int(state.ref.generation))
