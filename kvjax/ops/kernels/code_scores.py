"""Scores of product-quantised keys from a table of each part's centroids, a Pallas kernel for TPUs.

A TPU gathers from a table element by element. Here an entry is found by a matrix product instead, with a matrix that is
1 where a key has the centroid and 0 elsewhere, which is made on the chip for some keys at a time and never stored.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvjax.ops.kernels import tiles
from kvjax.ops.kernels.bits import in_bfloat16
from kvjax.typing import Array, Float, UInt

_STEP = 1024  # keys scored at once


def score(table: Float[Array, "K P G V"], code: UInt[Array, "K P N"]) -> Float[Array, "K G N"]:
    """Returns for each query head the sum of the table's entries for every key.

    Args:
      table: what a query head gets from each centroid of each part.
      code: centroid of each part of every key.
    """
    (heads, parts, group, _), keys = table.shape, code.shape[-1]
    step, more = min(_STEP, keys), -group % tiles.SUBLANES
    table = jnp.pad(table, ((0, 0), (0, 0), (0, more), (0, 0)))
    moved = 4 * (table.size + heads * (group + more) * keys) + code.size
    found = pl.pallas_call(
        _score, grid=(heads, -(-keys // step)), name="code_scores", interpret=tiles.interpreted(),
        in_specs=[pl.BlockSpec((1, *table.shape[1:]), lambda k, i: (k, 0, 0, 0)),
                  pl.BlockSpec((1, parts, step), lambda k, i: (k, 0, i))],
        out_specs=pl.BlockSpec((1, group + more, step), lambda k, i: (k, 0, i)),
        out_shape=jax.ShapeDtypeStruct((heads, group + more, keys), jnp.float32),
        cost_estimate=pl.CostEstimate(
            flops=6 * table.size * keys, transcendentals=0, bytes_accessed=moved),
    )(table, code)
    return found[:, :group]


def _score(table, code, out):
    """Scores the keys of one step; the table stands as three of bfloat16 that sum to it, so that entries are exact."""
    parts, step = table.shape[1], out.shape[2]
    number = jax.lax.broadcasted_iota(jnp.int32, (table.shape[-1], step), 0)
    total = jnp.zeros(out.shape[1:], jnp.float32)
    for part in range(parts):
        chosen = (number == code[0, part : part + 1].astype(jnp.int32)).astype(jnp.float32).astype(jnp.bfloat16)
        for piece in in_bfloat16(table[0, part]):
            total += jnp.dot(piece, chosen, preferred_element_type=jnp.float32)
    out[0] = total
