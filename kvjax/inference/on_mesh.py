"""Where the arrays of a step are on a mesh, as trees of partition specs, and the parts of the model that run there.

In a tree that `MeshLayout.run` takes, a spec stands for an array, or for a whole branch of arrays that are divided
alike.
"""

import functools

import jax

from kvjax.cache.read import Report
from kvjax.inference import blocks
from kvjax.inference.lookahead import NextLayer, Token
from kvjax.inference.plan import Plan, State, specs_of_layers
from kvjax.models.config import ModelConfig
from kvjax.models.mesh import MeshLayout
from kvjax.typing import Array, PyTree


def specs(kind: type, **fields) -> PyTree:
    """Returns a tree of partition specs in the form of a pytree class, whose own checks ask for arrays."""
    tree = object.__new__(kind)
    vars(tree).update(fields)
    return tree


def specs_of_state(plan: Plan) -> PyTree:
    """Returns where a model's cache is."""
    layout = _layout(plan)
    return specs(State, layers=specs_of_layers(plan), length=layout.by_sequence, ref=layout.everywhere)


def specs_of_token(layout: MeshLayout) -> PyTree:
    """Returns where a token on its way through the layers is."""
    each, all_of_it = layout.by_sequence, layout.everywhere
    return specs(Token, x=each, at=each, active=each, number=all_of_it, ref=all_of_it)


def specs_of_report(layout: MeshLayout) -> PyTree:
    """Returns where the report of a layer's step is."""
    heads = layout.heads_at(1)
    return specs(Report, attended=heads, selected=heads, hidden=heads, q=heads, key=heads, value=heads,
                 stats=layout.by_sequence, sink_logits=layout.by_head)


def specs_of_next(layout: MeshLayout, config: ModelConfig, following: NextLayer | None, cache) -> PyTree:
    """Returns where the layer after the one at work is, given where its cache is."""
    if following is None:
        return layout.everywhere
    params = layout.params(config, following.params)
    return specs(NextLayer, config=following.config, plan=following.plan, params=params, cache=cache)


@functools.partial(jax.jit, static_argnums=(0, 1))
def embed(layout: MeshLayout, config: ModelConfig, params: PyTree, tokens: Array) -> Array:
    """Returns the hidden states of token ids; `config` is that of the whole model, here and below."""
    takes = layout.params(config, params), layout.by_sequence
    apply = functools.partial(blocks.embed, layout.of_one(config))
    return layout.run(apply, takes, layout.by_sequence)(params, tokens)


@functools.partial(jax.jit, static_argnums=(0, 1))
def unembed(layout: MeshLayout, config: ModelConfig, params: PyTree, x: Array) -> Array:
    """Returns the logits of hidden states, each with the whole vocabulary."""
    takes = layout.params(config, params), layout.by_sequence
    apply = functools.partial(blocks.unembed, layout.of_one(config))
    return layout.run(apply, takes, layout.by_sequence)(params, x)


def _layout(plan: Plan) -> MeshLayout:
    assert plan.layout is not None
    return plan.layout
