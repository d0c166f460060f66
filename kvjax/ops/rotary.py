"""Rotary position embedding (Su et al., 2021) in the half-split layout of Hugging Face models.

A model rotates queries and keys and scales them by `RopeConfig.attention_factor`. Methods turn keys back and forth by
the same angles without the factor, so that a key turned back is the key before rotation times the factor.
"""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np

from kvjax.errors import ConfigError
from kvjax.ops.barriers import written_out
from kvjax.typing import Array, Float, Int32

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "dynamic"]


@dataclasses.dataclass(frozen=True, repr=False)
class RopeConfig:
    """Rotary embedding: base frequency, and how its angles are stretched to longer contexts.

    theta                  base of the frequencies
    kind                   default (not stretched), linear, llama3, yarn, longrope or dynamic
    factor                 divisor of the frequencies (linear), of the low ones (llama3, yarn), or growth of the base
                           (dynamic)
    low_freq_factor        llama3: turns within the original length below which a frequency is divided by `factor`
    high_freq_factor       llama3: turns from which a frequency is kept
    original_max_position  length first trained on, in tokens (not default and linear)
    attention_factor       factor of rotated queries and keys
    beta_fast              yarn: turns within the original length from which a frequency is kept
    beta_slow              yarn: turns up to which a frequency is divided by `factor`
    truncate               yarn: whether the bounds of these two are rounded to whole pairs of dimensions
    short_factor           longrope: divisor of each frequency for texts of up to the original length
    long_factor            longrope: the same for longer texts
    partial                share of a head's dimensions that rotate, the first ones
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial: float = 1.0

    def __repr__(self) -> str:
        # `LLM.identity`, which adapters and delimiter tables name, digests this text: fields that came later are left
        # out where they say nothing.
        shown = [f.name for i, f in enumerate(dataclasses.fields(self)) if i < 6 or getattr(self, f.name) != f.default]
        return f"RopeConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def by_length(self) -> bool:
        """True if the frequencies depend on the length of the text (`for_length`)."""
        return self.kind == "dynamic" or (self.kind == "longrope" and self.short_factor != self.long_factor)

    def rotated(self, head_dim: int) -> int:
        """Returns the number of dimensions that rotate."""
        return int(head_dim * self.partial)

    def check(self, head_dim: int) -> None:
        """Raises ConfigError unless heads of this size can be rotated."""
        size, least = self.rotated(head_dim), 4 if self.kind == "dynamic" else 2
        if size % 2 or not least <= size <= head_dim:
            share = "" if self.partial == 1 else f" with partial_rotary_factor={self.partial}"
            raise ConfigError(f"head_dim={head_dim}{share} rotates {size} dimensions; {self.kind} rotary embedding "
                              f"needs an even number of at least {least} and at most head_dim")
        for name in ("short_factor", "long_factor") if self.kind == "longrope" else ():
            count = len(getattr(self, name))
            if count != size // 2:
                raise ConfigError(f"{name} has {count} numbers; head_dim={head_dim} rotates {size // 2} pairs of "
                                  "dimensions, and each needs one")

    def for_length(self, tokens: int, head_dim: int) -> "RopeConfig":
        """Returns the rotary embedding of texts of `tokens` tokens, which no longer depends on the length.

        Args:
          tokens: length of the text that is read, or that a cache may hold.
          head_dim: head size.

        Returns:
          This value, if it does not depend on the length.
        """
        beyond = tokens > self.original_max_position
        if self.kind == "longrope":
            factor = self.long_factor if beyond else self.short_factor
            return dataclasses.replace(self, short_factor=factor, long_factor=factor)
        if self.kind == "dynamic":
            size = self.rotated(head_dim)
            growth = self.factor * max(1.0, tokens / self.original_max_position) - (self.factor - 1)
            return dataclasses.replace(self, kind="default", theta=self.theta * growth ** (size / (size - 2)))
        return self


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> np.ndarray:
    """Returns the angular frequency of each pair of dimensions that rotates, `[F]` in f32, stretched as `rope` says.

    Raises:
      ConfigError: the frequencies depend on the length of the text.
    """
    if rope.by_length:
        raise ConfigError(f"{rope.kind} rotary embedding depends on the length of the text; give "
                          "rope.for_length(tokens, head_dim), or the model's config.for_length(tokens)")
    size = rope.rotated(head_dim)
    freqs = 1.0 / rope.theta ** (np.arange(0, size, 2, dtype=np.float64) / size)
    if rope.kind == "linear":
        freqs = freqs / rope.factor
    elif rope.kind == "llama3":
        freqs = _llama3(freqs, rope)
    elif rope.kind == "yarn":
        freqs = _yarn(freqs, rope)
    elif rope.kind == "longrope":
        freqs = freqs / np.asarray(rope.long_factor)
    return freqs.astype(np.float32)


def _llama3(freqs: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Stretches as Llama 3.1 does: keeps short wavelengths, divides long ones by `factor`, blends in between."""
    turns = rope.original_max_position * freqs / (2 * np.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return freqs * (keep + (1 - keep) / rope.factor)


def _yarn(freqs: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Stretches as YaRN does (Peng et al., 2023): as `_llama3`, but blends by the number of the pair."""
    size = 2 * len(freqs)

    def pair(turns: float) -> float:
        """Returns the number of the pair that turns so often within the original length, as a real number."""
        return size * math.log(rope.original_max_position / (2 * math.pi * turns)) / (2 * math.log(rope.theta))

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    stretch = np.clip((np.arange(len(freqs)) - first) / (last - first if last != first else 1e-3), 0.0, 1.0)
    return freqs * (1 - stretch + stretch / rope.factor)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Returns the factor of queries and keys that YaRN recommends for texts `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def longrope_attention_factor(factor: float, original_max_position: int) -> float:
    """Returns the factor of queries and keys that LongRoPE (Ding et al., 2024) recommends."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_max_position))


def rotate(
    x: Float[Array, "*T N D"], positions: Int32[Array, "*T"], freqs: np.ndarray, scale: float = 1.0
) -> Float[Array, "*T N D"]:
    """Rotates each head of `x` to its token's position, and multiplies what rotates by `scale`; angles are in f32."""
    angles = positions[..., None, None].astype(jnp.float32) * freqs
    turns = jnp.stack([jnp.cos(angles), jnp.sin(angles)])
    cos, sin = written_out(turns if scale == 1 else turns * scale).astype(x.dtype)
    return turn(x, cos, sin)


def turn(x: Float[Array, "*N D"], cos: Float[Array, "*M F"], sin: Float[Array, "*M F"]) -> Float[Array, "*N D"]:
    """Rotates the first F pairs of dimensions of `x` by an angle, given as cosine and sine.

    Pairs are i and F + i; dimensions from 2 F on stay as they are.
    """
    first, second, rest = split(x, cos.shape[-1])
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def split(x: Float[Array, "*N D"], pairs: int) -> list[Array]:
    """Returns the first and the second dimension of each pair, and those that do not rotate."""
    return jnp.split(x, [pairs, 2 * pairs], axis=-1)
