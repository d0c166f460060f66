"""Rotary position embedding (Su et al., 2021) in the half-split layout of Hugging Face models."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np

from kvjax.ops.barriers import written_out
from kvjax.typing import Array, Float, Int32

RopeKind = Literal["default", "linear", "llama3"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency, and how its angles are stretched to longer contexts.

    theta                  base of the frequencies
    kind                   default (not stretched), linear or llama3
    factor                 divisor of the frequencies (linear), or of the low ones (llama3)
    low_freq_factor        llama3: turns within the original length below which a frequency is divided by `factor`
    high_freq_factor       llama3: turns from which a frequency is kept
    original_max_position  llama3: length first trained on, in tokens
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> np.ndarray:
    """Returns the angular frequency of each pair of dimensions, `[D / 2]` in f32, stretched as `rope.kind` says."""
    freqs = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        freqs = freqs / rope.factor
    elif rope.kind == "llama3":
        freqs = _llama3(freqs, rope)
    return freqs.astype(np.float32)


def _llama3(freqs: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Stretches as Llama 3.1 does: keeps short wavelengths, divides long ones by `factor`, blends in between."""
    turns = rope.original_max_position * freqs / (2 * np.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return freqs * (keep + (1 - keep) / rope.factor)


def rotate(x: Float[Array, "*T N D"], positions: Int32[Array, "*T"], freqs: np.ndarray) -> Float[Array, "*T N D"]:
    """Rotates each head of `x` to its token's position; angles are computed in f32."""
    angles = positions[..., None, None].astype(jnp.float32) * freqs
    cos, sin = written_out(jnp.stack([jnp.cos(angles), jnp.sin(angles)])).astype(x.dtype)
    return turn(x, cos, sin)


def turn(x: Float[Array, "*N D"], cos: Float[Array, "*M F"], sin: Float[Array, "*M F"]) -> Float[Array, "*N D"]:
    """Rotates each of the F = D / 2 pairs of dimensions of `x` by an angle, given as cosine and sine."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
