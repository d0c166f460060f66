"""DD-Select (DynSplit-KV, section 4.1): where a sequence is cut into blocks.

A block begins at s_c and would ideally end C tokens later, at s_e. Among the delimiters from s_e - Delta to s_e + Delta
it ends with the one of the best score

    e* = argmax_e  alpha w_e + (1 - alpha) p_e,       p_e = 1 - |e - s_e| / Delta,

w_e the delimiter's weight and p_e its closeness to the ideal end; the next block begins after it. The end of a block
depends on the tokens up to s_e + Delta only, so blocks of a growing sequence never change once those are known.

Choices the paper leaves open: p_e falls linearly; equal scores are settled for the earlier end; a block without a
delimiter in reach ends at s_e.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.methods.shared.delimiters import NO_DELIMITER
from kvjax.typing import Array, Float, Int32


@dataclasses.dataclass(frozen=True)
class Split:
    """How long a block becomes.

    Attributes:
      ideal: C, tokens of a block that ends where it would without delimiters.
      least, most: shortest and longest block, C - Delta and C + Delta in the paper.
      alpha: share of the delimiter's weight in the score; the rest is the closeness to the ideal end.
      otherwise: length where no delimiter is in reach.
    """

    ideal: int
    least: int
    most: int
    alpha: float
    otherwise: int

    @property
    def ends(self) -> int:
        """Tokens with which a block may end: the `least`-th to the `most`-th."""
        return self.most - self.least + 1

    def length(self, weight: Float[Array, "N"]) -> Int32[Array, ""]:
        """Tokens of a block, given the weights of the N = `ends` tokens with which it may end."""
        length = jnp.arange(self.least, self.most + 1, dtype=jnp.int32)
        reach = max(self.ideal - self.least, self.most - self.ideal, 1)
        closeness = 1.0 - jnp.abs(length - self.ideal).astype(jnp.float32) / reach
        delimiter = weight != NO_DELIMITER
        score = jnp.where(delimiter, self.alpha * weight + (1.0 - self.alpha) * closeness, -jnp.inf)
        best = jnp.where(jnp.any(delimiter), length[jnp.argmax(score).astype(jnp.int32)], self.otherwise)
        return best.astype(jnp.int32)

    def begins(self, weight: Float[Array, "T"], start: Int32[Array, ""], count: int) -> Int32[Array, "N"]:
        """Where the first `count` blocks of a sequence begin; the first of them at `start`.

        Tokens after the last count as no delimiters.
        """
        padded = jnp.pad(weight, (0, self.most), constant_values=NO_DELIMITER)

        def following(begin, _):
            reach = jax.lax.dynamic_slice_in_dim(padded, begin + self.least - 1, self.ends)
            return begin + self.length(reach), begin

        return jax.lax.scan(following, start, length=count)[1]


def weights_of(
    token: Int32[Array, "*N"], delimiter: Int32[Array, "X"], weight: Float[Array, "X"]
) -> Float[Array, "*N"]:
    """Weight of each token: that of the equal entry of `delimiter`, which rises; NO_DELIMITER where there is none."""
    at = jnp.minimum(jnp.searchsorted(delimiter, token), delimiter.shape[0] - 1)
    return jnp.where(delimiter[at] == token, weight[at], NO_DELIMITER)
