"""Vectors as blocks store them: floats, or codes of 8 or 4 bits with a range per vector.

A key or value x of D numbers becomes D codes c = round((x - low) / step) of `bits` bits, low = min x and step =
(max x - low) / (2^bits - 1), followed by low and step as f16: D + 4 bytes, or D / 2 + 4. A number is off by at most
half a step, plus the rounding of low to f16. Every vector has its own range, because rows arrive one by one; KIVI (Liu
et al., 2024) stores values in this way, while its keys share a range per channel among many tokens. Here a shift and a
scale per channel even keys out first (`Smoothing`, learnt by `kvjax.cache.smoothing`). Packing unpacked vectors again
changes nothing.

Sinks, recent window and held rows are stored as floats.

Arrays of blocks in bfloat16 hold its bits as uint16. XLA:CPU has no scatter in bfloat16: to write a row it converts the
whole array to f32 and back.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.errors import ConfigError
from kvjax.typing import Array, Bool, Float, Int32, Num, pytree

FLOATS = ("float32", "bfloat16", "float16")
BITS = {"int8": 8, "int4": 4}
_RANGE_BYTES = 4  # low and step, each f16
_LARGEST = 65504.0  # largest finite f16


@pytree
class Smoothing:
    """Shift and scale of each channel of keys in few bits.

    Of (k - shift) / scale and k / scale, the vector with the smaller range is stored. Keys of attention sinks, which
    take most of the attention, are small in channels where a bias makes all other keys large.
    """

    shift: Float[Array, "*B K D"]
    scale: Float[Array, "*B K D"]  # 0 = not known yet, because no key is packed


def _beside(channels: Float[Array, "*B K D"], key: Float[Array, "*N D"]) -> Float[Array, "*M D"]:
    """Returns per-channel numbers with axes inserted, so that they broadcast over each head's keys."""
    return jnp.expand_dims(channels, tuple(range(channels.ndim - 1, key.ndim - 1)))


@pytree
class Packed:
    """Vectors in packed form, unpacked only where they are used.

    Unpacked all at once they would take newly allocated memory in every step, which costs more than the unpacking.
    """

    vectors: Num[Array, "*K N X"]
    dtype: str = dataclasses.field(metadata={"static": True})
    smoothing: Smoothing | None = None  # of keys

    def unpacked(self) -> Float[Array, "*K N D"]:
        """Returns all vectors as floats, with smoothing undone."""
        rows = unpack(self.vectors, self.dtype)
        if self.smoothing is None:
            return rows
        shift, scale = (_beside(channels, rows) for channels in (self.smoothing.shift, self.smoothing.scale))
        return rows * scale + jnp.where(self.shifted[..., None], shift, 0.0)

    @property
    def shifted(self) -> Bool[Array, "*K N"]:
        """Whether each key was smoothed with the shift, not by the scale alone: its step then has no sign bit."""
        return self.vectors[..., -1] >= 0


@pytree
class Scattered:
    """Selected rows of a pool, read in place: gathering them would allocate memory and read them twice."""

    pool: Num[Array, "R X"]  # every row there is
    index: Int32[Array, "*K N"]  # selected rows; indices out of range are clipped
    dtype: str = dataclasses.field(metadata={"static": True})
    smoothing: Smoothing | None = None  # of keys

    def unpacked(self) -> Float[Array, "*K N D"]:
        """Returns the selected rows as floats."""
        return self.gathered().unpacked()

    def gathered(self) -> Packed:
        """Returns copies of the selected rows, still packed."""
        return Packed(jnp.take(self.pool, self.index, axis=0, mode="clip"), self.dtype, self.smoothing)


def all_of(rows: Packed | Scattered | Array) -> Float[Array, "*K N D"]:
    """Returns rows in any form as an array of floats."""
    return rows.unpacked() if isinstance(rows, Packed | Scattered) else rows


def check(dtype, size: int = 2) -> None:
    """Raises ConfigError unless vectors of `size` numbers can be stored as `dtype`."""
    if not isinstance(dtype, str) or dtype not in (*FLOATS, *BITS):  # NumPy's types compare equal to their names
        raise ConfigError(f"keys and values cannot be kept as {dtype!r}; use one of {', '.join((*FLOATS, *BITS))}")
    if dtype == "int4" and size % 2:
        raise ConfigError(f"int4 packs two numbers into a byte, but the head size {size} is odd; use int8")


def stored_type(dtype: str) -> str:
    """Returns the element type of blocks in a store."""
    return "int8" if dtype in BITS else dtype


def array_type(dtype: str) -> str:
    """Returns the element type of arrays of blocks on the device."""
    return "uint16" if dtype == "bfloat16" else stored_type(dtype)


def tail_type(dtype: str) -> str:
    """Returns the type of rows that are not in blocks: sinks, recent window and held rows."""
    return "float32" if dtype in BITS else dtype


def width(dtype: str, size: int) -> int:
    """Returns the number of block elements that a vector of `size` numbers takes."""
    return size if dtype not in BITS else size * BITS[dtype] // 8 + _RANGE_BYTES


def pack(x: Float[Array, "*N D"], dtype: str) -> Num[Array, "*N X"]:
    """Packs vectors as blocks store them; `dtype` is one of FLOATS or BITS."""
    if dtype == "bfloat16":
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    if dtype not in BITS:
        return x.astype(dtype)
    levels = 2 ** BITS[dtype] - 1
    x = jnp.clip(x.astype(jnp.float32), -_LARGEST, _LARGEST)
    low = jnp.min(x, axis=-1, keepdims=True).astype(jnp.float16)
    step = _step(low, jnp.max(x, axis=-1, keepdims=True), levels)
    # Rounding the step to f16 may change the largest code. The step is derived again from the range that the codes
    # span, so that packing the unpacked vectors gives the same step.
    largest = jnp.max(_codes(x, low, step, levels), axis=-1, keepdims=True)
    step = _step(low, low.astype(jnp.float32) + step.astype(jnp.float32) * largest, levels)
    code = _codes(x, low, step, levels).astype(jnp.uint8)
    if dtype == "int4":
        code = code[..., ::2] | (code[..., 1::2] << 4)
    spread = jax.lax.bitcast_convert_type(jnp.concatenate([low, step], axis=-1), jnp.uint8)
    packed = jnp.concatenate([code, spread.reshape(*x.shape[:-1], _RANGE_BYTES)], axis=-1)
    return jax.lax.bitcast_convert_type(packed, jnp.int8)


def pack_keys(key: Float[Array, "*N D"], smoothing: Smoothing | None, dtype: str) -> Num[Array, "*N X"]:
    """Packs keys `[*B, K, *E, D]`, smoothed by shift and scale or by scale alone, whichever has the smaller range."""
    if smoothing is None:
        return pack(key, dtype)
    shift, scale = (_beside(channels, key) for channels in (smoothing.shift, smoothing.scale))
    scale, key = jnp.where(scale > 0, scale, 1.0), key.astype(jnp.float32)
    shifted, plain = pack((key - shift) / scale, dtype), pack(key / scale, dtype)
    sign = jnp.zeros(plain.shape[-1], jnp.int8).at[-1].set(-128)  # sign bit of the step, in the last byte
    return jnp.where(_steps(plain) < _steps(shifted), plain | sign, shifted)


def _steps(kept: Num[Array, "*N X"]) -> Float[Array, "*N 1"]:
    """Returns the step of each packed vector that has no sign bit set yet."""
    return jax.lax.bitcast_convert_type(kept[..., -2:], jnp.float16)[..., None]


def _step(low: Float[Array, "*N 1"], largest: Float[Array, "*N 1"], levels: int) -> Float[Array, "*N 1"]:
    return ((largest - low.astype(jnp.float32)) / levels).astype(jnp.float16)


def _codes(x: Float[Array, "*N D"], low: Float[Array, "*N 1"], step: Float[Array, "*N 1"], levels: int):
    """Returns the number of steps of each element above `low`, from 0 to `levels`.

    A step of 0 means that all numbers are equal as far as f16 can tell; all codes are 0 then. The smallest number has
    code 0 even where f16 rounds `low` to several steps below it.
    """
    per_step = jnp.where(step > 0, 1.0 / jnp.maximum(step.astype(jnp.float32), 1e-30), 0.0)
    codes = jnp.clip(jnp.round((x - low.astype(jnp.float32)) * per_step), 0, levels)
    return jnp.where(x == jnp.min(x, axis=-1, keepdims=True), 0, codes)


def unpack(kept: Num[Array, "*N X"], dtype: str) -> Float[Array, "*N D"]:
    """Returns the vectors that were packed, without undoing a smoothing: floats as stored, codes as f32."""
    if dtype == "bfloat16":
        return jax.lax.bitcast_convert_type(kept, jnp.bfloat16)
    if dtype not in BITS:
        return kept
    kept = jax.lax.bitcast_convert_type(kept, jnp.uint8)
    code, spread = kept[..., :-_RANGE_BYTES], kept[..., -_RANGE_BYTES:]
    spread = jax.lax.bitcast_convert_type(spread.reshape(*spread.shape[:-1], 2, 2), jnp.float16).astype(jnp.float32)
    if dtype == "int4":
        code = jnp.stack([code & 15, code >> 4], axis=-1).reshape(*code.shape[:-1], -1)
    return spread[..., :1] + jnp.abs(spread[..., 1:]) * code.astype(jnp.float32)
