"""Array aliases used in signatures, with the legend of all axes.

    B   sequences in a batch            T   tokens (of a prompt or a chunk)
    K   KV heads                        G   query heads per KV head
    H   query heads, H = K * G          D   head size
    E   hidden size of the model        V   vocabulary
    NB  blocks of one KV head           C   rows of a block (capacity)
    M   blocks selected per step        U   held rows per KV head
    S   sink tokens                     W   recent-window tokens
    R   rows of the tail, S + W - 1 + U NS  resident slots of one KV head
    KT  tables of positions and counts: K, or 1 if all heads place their tokens in the same blocks
    KB  heads with blocks of their own in stores and slots: K, or 1 if all heads also fetch the same blocks

A *row* is one token's key followed by its value, D2 = 2 * D numbers (stored as X2 numbers: fewer with a codec, or if
only values are stored). With KB = 1 a row has the keys of all heads, followed by their values.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, dataclass_transform

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, Int32, Num, UInt

if TYPE_CHECKING:
    Array = jax.Array
else:  # at run time NumPy arrays, too: values from `jax.device_get` keep their dataclasses
    Array = jax.Array | np.ndarray
PyTree = Any
PRNGKey = jax.Array

Hidden = Float[Array, "*T E"]
Logits = Float[Array, "*T V"]


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def pytree(cls=None, /, *, kw_only: bool = False):
    """Makes a class a frozen dataclass registered as a pytree; fields with the metadata `static` are no children.

    Unflattening skips `__init__` and its checks: JAX unflattens at each call of a compiled function, and may do so with
    placeholders instead of arrays. Arrays were checked when the function was traced.
    """
    if cls is None:
        return functools.partial(pytree, kw_only=kw_only)
    cls = dataclasses.dataclass(frozen=True, kw_only=kw_only)(cls)
    fields = dataclasses.fields(cls)
    static = tuple(field.name for field in fields if field.metadata.get("static"))
    children = tuple(field.name for field in fields if field.name not in static)
    keys = tuple(map(jax.tree_util.GetAttrKey, children))

    def flatten(tree):
        return [getattr(tree, name) for name in children], tuple([getattr(tree, name) for name in static])

    def flatten_with_keys(tree):
        values, fixed = flatten(tree)
        return tuple(zip(keys, values, strict=True)), fixed

    def unflatten(fixed, values):
        tree = object.__new__(cls)
        vars(tree).update(zip(children, values, strict=True), **dict(zip(static, fixed, strict=True)))
        return tree

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


__all__ = ["Array", "Bool", "Float", "Hidden", "Int", "Int32", "Logits", "Num", "PRNGKey", "PyTree", "UInt", "pytree"]
