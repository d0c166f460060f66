"""The end of a token or a chunk at the store: committed as a whole, or dropped as a whole."""

import dataclasses

import jax

from kvjax.cache.slots import SlotPool
from kvjax.errors import StoreClosed, StoreError, to_raise
from kvjax.inference.layer_offload import LayerLoader
from kvjax.inference.plan import State
from kvjax.store import interface


def uses_store(state: State) -> bool:
    """Returns True if any layer's blocks are in a store."""
    return any(isinstance(layer.pool, SlotPool) for layer in state.layers)


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
        jax.block_until_ready([layer.pool.queued for layer in state.layers if isinstance(layer.pool, SlotPool)])
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
