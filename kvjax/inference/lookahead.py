"""Selections and reads that begin before a layer's turn; the only place that calls `Pool.submit`.

    look ahead   a layer's input, projected with the next layer's weights, selects there (KVSwap, Eq. 1; InfiniGen)
    prefetch     "layer": the next layer's blocks are read while this one computes; "step": the blocks ranked just
                 below this step's selection are read for the next step
    reuse        a layer that follows another takes its selection (IceCache, OmniKV)

A read that was issued is ordered before later work through data: `x` and `out` come back depending on it
(`kvjax.ops.barriers.after`).
"""

import dataclasses

from kvjax.cache.layer import LayerCache, LayerPlan
from kvjax.cache.pool import Pool, StoreRef, gated
from kvjax.cache.read import SelectedRows, choose, of_active, runners_up
from kvjax.cache.slots import SlotPool
from kvjax.inference.blocks import project, queries
from kvjax.inference.plan import Plan
from kvjax.models.config import ModelConfig
from kvjax.ops import barriers
from kvjax.typing import Array, Bool, Float, Int32, PyTree, pytree


@pytree
class Token:
    """One token of every sequence on its way through the layers."""

    x: Float[Array, "B E"]  # input of the layer
    at: Int32[Array, "B"]  # its position
    active: Bool[Array, "B"]  # sequences that take part
    number: Int32[Array, ""]  # of the layer
    ref: StoreRef


@pytree
class NextLayer:
    """The layer after the one at work."""

    config: ModelConfig = dataclasses.field(metadata={"static": True})
    plan: LayerPlan = dataclasses.field(metadata={"static": True})
    params: PyTree
    cache: LayerCache

    @property
    def prefetches(self) -> bool:
        """True if its blocks are read while the layer before it computes."""
        return prefetches(self.cache.pool, "layer")


def prefetches(pool: Pool, kind: str) -> bool:
    """Returns True for slots of a store that read ahead in this way."""
    return isinstance(pool, SlotPool) and pool.prefetch == kind


def next_layer(plan: Plan, params, caches, i: int, open_layer) -> NextLayer | None:
    """Returns the layer after layer i if there is anything to select or to read there early, else None."""
    if i + 1 == len(plan.layers):
        return None
    layer = plan.layers[i + 1]
    if not (layer.follows or layer.method.lookahead or prefetches(caches[i + 1].pool, "layer")):
        return None
    return NextLayer(plan.config.layers[i + 1], layer, params[f"layers_{i + 1}"], open_layer(i + 1))


def select(plan: LayerPlan, state, q: Float[Array, "B H D"], active: Bool[Array, "B"]) -> SelectedRows:
    """Selects for the sequences that take part; nothing for the others."""
    return of_active(plan, choose(plan, state, q), active)


def first_layer(config: ModelConfig, plan: LayerPlan, params, cache: LayerCache, token: Token):
    """Selects for a layer that nobody looked ahead at and issues its reads, ahead of those of the next layer.

    Returns the token, the layer's projections and its selection; both None for a layer that reads nothing early.
    """
    if not (plan.method.lookahead and prefetches(cache.pool, "layer")):
        return token, None, None
    projected = project(config, params, token.x, token.at)
    chosen = select(plan, cache.state, projected[0], token.active)
    issued = cache.pool.submit(chosen.need, token.number, token.ref)
    return dataclasses.replace(token, x=barriers.after(issued, token.x)), projected, chosen


def look_ahead(following: NextLayer | None, token: Token) -> tuple[Token, SelectedRows | None]:
    """Selects for the next layer with this layer's input, and issues its reads if it prefetches.

    Returns the token and the selection; None where the next layer selects by its own query.
    """
    if following is None or following.plan.follows:
        return token, None
    q = queries(following.config, following.params, token.x, token.at)
    seen = select(following.plan, following.cache.state, q, token.active)
    if following.prefetches:
        issued = following.cache.pool.submit(seen.need, token.number + 1, token.ref)
        token = dataclasses.replace(token, x=barriers.after(issued, token.x))
    return token, seen if following.plan.method.lookahead else None


def pass_on(following: NextLayer | None, chosen: SelectedRows, token: Token, out, selected: SelectedRows | None):
    """Hands this layer's selection to a layer that follows it; returns what was attended and the next selection."""
    if following is None or not following.plan.follows:
        return out, selected
    if following.prefetches:
        out = barriers.after(following.cache.pool.submit(chosen.need, token.number + 1, token.ref), out)
    return out, chosen


def read_for_next_step(plan: LayerPlan, cache: LayerCache, q, ok: Bool[Array, ""], token: Token, out):
    """Issues reads of the blocks ranked just below this step's selection; layers that follow rank none."""
    if plan.follows or not prefetches(cache.pool, "step"):
        return out
    likely = gated(runners_up(plan, cache.state, q), ok & token.active, plan.spec.num_blocks)
    return barriers.after(cache.pool.submit(likely, token.number, token.ref), out)
