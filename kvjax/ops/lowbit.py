"""Keys quantised to 8, 4 or 2 bits per element, with one scale per channel.

Some channels of keys are much larger than others, so that one scale per channel loses less than one per token. Scales
are taken from the prompt; later keys beyond them are clipped. Codes of 8 and 4 bits are integers from -127 to 127 and
from -7 to 7, so that 0 stays 0; those of 2 bits are -3, -1, 1 and 3, because three levels would be too few. Run-length
encoding composes with this: `runs.encode` takes integers, packed bytes included, and `runs.scores(q * scale, ...)`
needs no key dequantised.
"""

import functools

import einops
import jax
import jax.numpy as jnp

from kvjax.errors import ConfigError
from kvjax.ops import kernels
from kvjax.ops.precise import einsum
from kvjax.typing import Array, Bool, Float, Int32, Num, UInt

BITS = (8, 4, 2)
_LARGEST = {8: 127, 4: 7, 2: 3}  # largest code; the smallest is its negative
APART = {8: 1, 4: 1, 2: 2}  # difference of neighbouring codes
TOKENS = 64  # fewest tokens to take a scale from
_NOTHING = 1e-30  # lower bound of a channel's or query's largest magnitude
_PIECE = 1 << 20  # codes converted to floats at a time: about what a core's cache holds


def scale_of(key: Float[Array, "T D"], bits: int = 8) -> Float[Array, "D"]:
    """Returns each channel's scale, the value of code 1, with which its largest magnitude gets the largest code."""
    largest = jnp.max(jnp.abs(key), axis=0)
    return jnp.maximum(largest, _NOTHING) / _largest(bits)


def closest_scale(key: Float[Array, "T D"], bits: int, valid: Bool[Array, "T"]) -> Float[Array, "D"]:
    """Returns each channel's scale with the smallest squared error over its valid numbers; outliers are clipped.

    With few bits, most codes by `scale_of` would be 0, because a channel's largest number is several times its usual
    one. Scales from that of `scale_of` down to an eighth of it are tried.

    Args:
      key: keys to be quantised.
      bits: 8, 4 or 2.
      valid: which tokens count.

    Raises:
      ConfigError: `bits` is none of BITS.
    """
    smaller = jnp.exp2(-jnp.arange(0, 3.25, 0.25, dtype=jnp.float32))
    scales = scale_of(jnp.where(valid[:, None], key, 0.0), bits) * smaller[:, None]

    def error(scale):
        off = dequantise(quantise(key, scale, bits), scale) - key
        return jnp.sum(jnp.where(valid[:, None], jnp.square(off), 0.0), axis=0)  # masked, as no code of 2 bits is 0

    best = jnp.argmin(jax.lax.map(error, scales), axis=0).astype(jnp.int32)
    return jnp.take_along_axis(scales, best[None], axis=0)[0]


def _largest(bits: int) -> int:
    """Returns the largest code. Raises ConfigError unless `bits` is one of BITS."""
    if bits not in BITS:
        raise ConfigError(f"bits={bits} must be one of {', '.join(map(str, BITS))}")
    return _LARGEST[bits]


def quantise(key: Float[Array, "*T D"], scale: Float[Array, "D"], bits: int = 8) -> Num[Array, "*T D"]:
    """Returns int8 codes, clipped to the range of the scale."""
    largest, apart = _largest(bits), APART[bits]
    level = jnp.round((key / scale + largest) / apart)  # 0 for the smallest code
    return (jnp.clip(level, 0, 2 * largest // apart) * apart - largest).astype(jnp.int8)


def dequantise(key: Num[Array, "*T D"], scale: Float[Array, "D"]) -> Float[Array, "*T D"]:
    """Returns the keys that codes stand for; an element that was not clipped is off by at most half a level."""
    return key.astype(scale.dtype) * scale


def packed_shape(shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
    """Returns the shape of packed codes. Raises ConfigError if a vector's codes do not fill whole bytes."""
    each = 8 // bits
    if shape[-1] % each:
        raise ConfigError(f"{shape[-1]} codes of {bits} bits do not fill whole bytes; use more bits")
    return (*shape[:-1], shape[-1] // each)


def pack(code: Num[Array, "*T D"], bits: int) -> UInt[Array, "*T X"]:
    """Packs codes into bytes, `8 / bits` in each; equal bytes are equal codes.

    Raises ConfigError if a vector's codes do not fill whole bytes.
    """
    shape, each = packed_shape(code.shape, bits), 8 // bits
    parts = ((code.astype(jnp.uint8) + _largest(bits)) // APART[bits]).reshape(*shape, each)
    return jnp.sum(parts << (bits * jnp.arange(each, dtype=jnp.uint8)), axis=-1, dtype=jnp.uint8)


def unpack(packed: UInt[Array, "*T X"], bits: int) -> Num[Array, "*T D"]:
    """Returns the codes in packed bytes."""
    parts = packed[..., None] >> (bits * jnp.arange(8 // bits, dtype=jnp.uint8)) & (2**bits - 1)
    level = parts.astype(jnp.int8).reshape(*packed.shape[:-1], -1)
    return level * APART[bits] - _largest(bits)


def products(
    packed: UInt[Array, "F X N"], q: Float[Array, "F Q D"], stored: Int32[Array, ""], bits: int
) -> Float[Array, "F Q N"]:
    """Returns the products of every query with every vector of codes.

    Queries are rounded to integers of at most 127, so that sums are exact in any order. The rounding is far below the
    error of codes of 4 and 2 bits, and as large as that of 8 bits.

    Args:
      packed: packed codes, stored dimension by dimension.
      q: queries, already multiplied by the scale of each channel.
      stored: number of vectors that are stored.
      bits: bits of a code: 8, 4 or 2.

    Returns:
      Products in f32; -1e30 for vectors from `stored` on.
    """
    result = jax.ShapeDtypeStruct((*q.shape[:2], packed.shape[-1]), jnp.float32)
    otherwise = functools.partial(_products, bits=bits)
    return kernels.on_cpu("code_products", result, otherwise, packed, *_whole(q, bits), stored)


def softmax_mean(
    packed: UInt[Array, "F X N"], q: Float[Array, "F Q D"], stored: Int32[Array, ""], bits: int, groups: int
) -> Float[Array, "groups N"]:
    """Returns the mean softmax of `products` over the queries of each group of heads.

    Args:
      packed: packed codes, stored dimension by dimension.
      q: queries, already multiplied by the scale of each channel.
      stored: number of vectors that are stored; later ones have weight 0.
      bits: bits of a code: 8, 4 or 2.
      groups: number of groups, each of F / `groups` neighbouring heads.
    """
    (heads, queries), tokens = q.shape[:2], packed.shape[-1]
    chunks = min(kernels.MOST_CHUNKS, heads // groups * -(-queries // kernels.TOGETHER))
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((groups, chunks, tokens), (groups, tokens))]

    def otherwise(*operands):
        scores = _products(*operands, bits=bits)
        mean = jnp.mean(jax.nn.softmax(scores).reshape(groups, -1, tokens), axis=1)
        return [jnp.zeros(results[0].shape, jnp.float32), mean]

    return kernels.on_cpu("code_softmax", results, otherwise, packed, *_whole(q, bits), stored)[-1]


def _whole(q: Float[Array, "F Q D"], bits: int) -> tuple[Num[Array, "F Q D"], Float[Array, "F Q"]]:
    """Returns the queries as integers, and the value of a product of 1 for each."""
    q = q.astype(jnp.float32) * APART[bits]
    step = jnp.maximum(jnp.max(jnp.abs(q), axis=-1), _NOTHING) / _LARGEST[8]
    return jnp.round(q / step[..., None]).astype(jnp.int8), step


def _products(packed, q, step, stored, bits: int) -> Float[Array, "F Q N"]:
    """Computes what the kernel does, unpacking a piece of the tokens at a time: all of them would be a second cache."""
    heads, _, tokens = packed.shape
    size = max(1, min(tokens, _PIECE // (heads * q.shape[-1])))
    pad = -tokens % size
    padded = jnp.pad(packed, ((0, 0), (0, 0), (0, pad)))
    pieces = einops.rearrange(padded, "f x (pieces n) -> pieces f x n", n=size)
    q = q.astype(jnp.float32)

    def piece(some):
        return sum(einsum("fxn,fqx->fqn", level, q[..., i :: 8 // bits])
                   for i, level in enumerate(_levels_apart(some, q.dtype, bits)))

    sums = einops.rearrange(jax.lax.map(piece, pieces), "pieces f q n -> f q (pieces n)")[..., :tokens]
    first = _largest(bits) / APART[bits] * jnp.sum(q, axis=-1)  # levels are codes plus this offset
    known = jnp.arange(tokens, dtype=jnp.int32) < stored
    return jnp.where(known, (sums - first[..., None]) * step[..., None], kernels.NEGATIVE)


def _levels_apart(packed: UInt[Array, "*T X"], dtype, bits: int) -> list[Float[Array, "*T X"]]:
    """Returns the levels at each place within the bytes.

    The codes of one place lie `8 / bits` dimensions apart; they meet the matching part of q instead of being reordered.
    """
    byte = packed.astype(jnp.int32)
    return [(byte >> bits * i & 2**bits - 1).astype(dtype) for i in range(8 // bits)]
