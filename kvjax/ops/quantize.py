"""How a vector is kept in a block: as floats, or as 8 or 4 bit codes with a range of its own.

A key or value x of D numbers becomes D codes c = round((x - low) / step) of `bits` bits, low = min x and step =
(max x - low) / (2^bits - 1), with low and step as f16 behind them: D + 4 bytes, or D / 2 + 4. A number is off by half a
step, and by what f16 takes from low. Every vector has its own range, as rows arrive one by one; so KIVI (Liu et al.,
2024) keeps values, while its keys share a range per channel among many tokens. Here keys are made even first, with a
shift and a scale per channel (`Smoothing`, which `kvjax.cache.smoothing` learns). Packing what was unpacked changes
nothing.

Sinks, recent window and held rows are kept as floats.

Arrays of blocks in bfloat16 hold its bits. XLA:CPU has no scatter in bfloat16: to write a row it copies the whole array
as f32, and that copy back.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.errors import ConfigError
from kvjax.typing import Array, Bool, Float, Int32, Num, pytree

FLOATS = ("float32", "bfloat16", "float16")
BITS = {"int8": 8, "int4": 4}
_RANGE_BYTES = 4  # low and step
_LARGEST = 65504.0  # of f16


@pytree
class Smoothing:
    """Shift and scale of channels of keys in few bits: of (k - shift) / scale and k / scale, what spans less is kept.

    Keys of attention sinks, which take most of the attention, are small where a bias makes all others large.
    """

    shift: Float[Array, "*B K D"]
    scale: Float[Array, "*B K D"]  # 0 = not known yet, as no key is packed


def _beside(channels: Float[Array, "*B K D"], key: Float[Array, "*N D"]) -> Float[Array, "*M D"]:
    """Numbers of each head's channels, to be used with all of its keys."""
    return jnp.expand_dims(channels, tuple(range(channels.ndim - 1, key.ndim - 1)))


@pytree
class Packed:
    """Many vectors as they are kept: all of them unpacked at once would be fresh memory in every step, which costs more
    than unpacking them."""

    vectors: Num[Array, "*K N X"]
    dtype: str = dataclasses.field(metadata={"static": True})
    smoothing: Smoothing | None = None  # of keys

    def unpacked(self) -> Float[Array, "*K N D"]:
        """All of them."""
        rows = unpack(self.vectors, self.dtype)
        if self.smoothing is None:
            return rows
        shift, scale = (_beside(one, rows) for one in (self.smoothing.shift, self.smoothing.scale))
        return rows * scale + jnp.where(self.shifted[..., None], shift, 0.0)

    @property
    def shifted(self) -> Bool[Array, "*K N"]:
        """Whether the shift was subtracted from keys that were smoothed: the sign of their step says so."""
        return self.vectors[..., -1] >= 0


@pytree
class Scattered:
    """Single rows of a pool where they lie: gathered they would be fresh memory, too, and be read twice."""

    pool: Num[Array, "R X"]  # every row there is
    index: Int32[Array, "*K N"]  # which of them; those out of range are clipped
    dtype: str = dataclasses.field(metadata={"static": True})
    smoothing: Smoothing | None = None  # of keys

    def unpacked(self) -> Float[Array, "*K N D"]:
        """All of them."""
        return self.gathered().unpacked()

    def gathered(self) -> Packed:
        """Copies of them, one after the other."""
        return Packed(jnp.take(self.pool, self.index, axis=0, mode="clip"), self.dtype, self.smoothing)


def all_of(rows: Packed | Scattered | Array) -> Float[Array, "*K N D"]:
    """Rows as an array."""
    return rows.unpacked() if isinstance(rows, Packed | Scattered) else rows


def check(dtype, size: int = 2) -> None:
    """Raises ConfigError for a type that there is not, or that vectors of `size` numbers cannot be kept as."""
    if not isinstance(dtype, str) or dtype not in (*FLOATS, *BITS):  # NumPy's types are equal to their names
        raise ConfigError(f"keys and values cannot be kept as {dtype!r}; use one of {', '.join((*FLOATS, *BITS))}")
    if dtype == "int4" and size % 2:
        raise ConfigError(f"int4 packs two numbers into a byte, and heads have {size}; use int8")


def stored_type(dtype: str) -> str:
    """The element type of blocks in a store."""
    return "int8" if dtype in BITS else dtype


def array_type(dtype: str) -> str:
    """The element type of arrays of blocks."""
    return "uint16" if dtype == "bfloat16" else stored_type(dtype)


def tail_type(dtype: str) -> str:
    """The type of the rows that are not in blocks."""
    return "float32" if dtype in BITS else dtype


def width(dtype: str, size: int) -> int:
    """Elements of a block that a vector of `size` numbers takes."""
    return size if dtype not in BITS else size * BITS[dtype] // 8 + _RANGE_BYTES


def pack(x: Float[Array, "*N D"], dtype: str) -> Num[Array, "*N X"]:
    """Vectors as they are kept."""
    if dtype == "bfloat16":
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    if dtype not in BITS:
        return x.astype(dtype)
    levels = 2 ** BITS[dtype] - 1
    x = jnp.clip(x.astype(jnp.float32), -_LARGEST, _LARGEST)
    low = jnp.min(x, axis=-1, keepdims=True).astype(jnp.float16)
    step = _step(low, jnp.max(x, axis=-1, keepdims=True), levels)
    # f16 may have made of the step one with which the largest code is another: that has the range of the next packing.
    largest = jnp.max(_codes(x, low, step, levels), axis=-1, keepdims=True)
    step = _step(low, low.astype(jnp.float32) + step.astype(jnp.float32) * largest, levels)
    code = _codes(x, low, step, levels).astype(jnp.uint8)
    if dtype == "int4":
        code = code[..., ::2] | (code[..., 1::2] << 4)
    spread = jax.lax.bitcast_convert_type(jnp.concatenate([low, step], axis=-1), jnp.uint8)
    packed = jnp.concatenate([code, spread.reshape(*x.shape[:-1], _RANGE_BYTES)], axis=-1)
    return jax.lax.bitcast_convert_type(packed, jnp.int8)


def pack_keys(key: Float[Array, "*N D"], smoothing: Smoothing | None, dtype: str) -> Num[Array, "*N X"]:
    """Keys `[*B, K, *E, D]` as they are kept."""
    if smoothing is None:
        return pack(key, dtype)
    shift, scale = (_beside(one, key) for one in (smoothing.shift, smoothing.scale))
    scale, key = jnp.where(scale > 0, scale, 1.0), key.astype(jnp.float32)
    shifted, plain = pack((key - shift) / scale, dtype), pack(key / scale, dtype)
    sign = jnp.zeros(plain.shape[-1], jnp.int8).at[-1].set(-128)  # of the step, in the last byte
    return jnp.where(_steps(plain) < _steps(shifted), plain | sign, shifted)


def _steps(kept: Num[Array, "*N X"]) -> Float[Array, "*N 1"]:
    """The step of each vector, which has no sign yet."""
    return jax.lax.bitcast_convert_type(kept[..., -2:], jnp.float16)[..., None]


def _step(low: Float[Array, "*N 1"], largest: Float[Array, "*N 1"], levels: int) -> Float[Array, "*N 1"]:
    return ((largest - low.astype(jnp.float32)) / levels).astype(jnp.float16)


def _codes(x: Float[Array, "*N D"], low: Float[Array, "*N 1"], step: Float[Array, "*N 1"], levels: int):
    """Steps above `low`, 0 to `levels`. A step of 0 is a vector of equal numbers, up to what f16 can tell apart: all
    codes are 0 then, and that of the least number is in any case, lest f16 puts `low` steps below it."""
    per_step = jnp.where(step > 0, 1.0 / jnp.maximum(step.astype(jnp.float32), 1e-30), 0.0)
    codes = jnp.clip(jnp.round((x - low.astype(jnp.float32)) * per_step), 0, levels)
    return jnp.where(x == jnp.min(x, axis=-1, keepdims=True), 0, codes)


def unpack(kept: Num[Array, "*N X"], dtype: str) -> Float[Array, "*N D"]:
    """The vectors again."""
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
