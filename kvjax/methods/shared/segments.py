"""DD-Select (DynSplit-KV, section 4.1): the rule that cuts a sequence into blocks.

A block begins at s_c and would ideally end C tokens later, at s_e. It ends at the delimiter from s_e - Delta to
s_e + Delta that has the best score

    e* = argmax_e  alpha w_e + (1 - alpha) p_e,       p_e = 1 - |e - s_e| / Delta,

where w_e is the delimiter's weight and p_e its closeness to the ideal end; the next block begins after it. The end of a
block only depends on the tokens up to s_e + Delta, so blocks of a growing sequence never change once these are known.

Choices the paper leaves open: the form of p_e (`Split.closeness`; the one above is "linear"); among equal scores the
earlier end is taken; a block without a delimiter in reach ends at s_e.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.methods.shared.delimiters import NO_DELIMITER
from kvjax.typing import Array, Float, Int32

CLOSENESS = {  # p_e, of the distance |e - s_e| and the largest distance
    "linear": lambda distance, reach: 1.0 - distance / reach,
    "quadratic": lambda distance, reach: 1.0 - (distance / reach) ** 2,
    "inverse": lambda distance, reach: 1.0 / (1.0 + distance),
}


@dataclasses.dataclass(frozen=True)
class Split:
    """Rule for the length of a block.

    Attributes:
      ideal: C, ideal tokens of a block.
      least, most: fewest and most tokens of a block, C - Delta and C + Delta in the paper.
      alpha: share of the delimiter's weight in the score; the rest is the closeness to the ideal end.
      otherwise: tokens of a block if no delimiter is in reach.
      closeness: form of p_e, one of CLOSENESS.
    """

    ideal: int
    least: int
    most: int
    alpha: float
    otherwise: int
    closeness: str = "linear"

    @property
    def ends(self) -> int:
        """Number of tokens at which a block may end, from the `least`-th to the `most`-th."""
        return self.most - self.least + 1

    def length(self, weight: Float[Array, "N"]) -> Int32[Array, ""]:
        """Returns the tokens of a block, given the weights of the N = `ends` tokens at which it may end."""
        length = jnp.arange(self.least, self.most + 1, dtype=jnp.int32)
        reach = max(self.ideal - self.least, self.most - self.ideal, 1)
        closeness = CLOSENESS[self.closeness](jnp.abs(length - self.ideal).astype(jnp.float32), reach)
        delimiter = weight != NO_DELIMITER
        score = jnp.where(delimiter, self.alpha * weight + (1.0 - self.alpha) * closeness, -jnp.inf)
        best = jnp.where(jnp.any(delimiter), length[jnp.argmax(score).astype(jnp.int32)], self.otherwise)
        return best.astype(jnp.int32)

    def begins(self, weight: Float[Array, "T"], start: Int32[Array, ""], count: int) -> Int32[Array, "N"]:
        """Returns the positions at which the first N = `count` blocks of a sequence begin.

        Args:
          weight: [T], weight of each token; tokens beyond the last one count as no delimiters.
          start: position of the first block.
          count: number of blocks.
        """
        padded = jnp.pad(weight, (0, self.most), constant_values=NO_DELIMITER)

        def following(begin, _):
            reach = jax.lax.dynamic_slice_in_dim(padded, begin + self.least - 1, self.ends)
            return begin + self.length(reach), begin

        return jax.lax.scan(following, start, length=count)[1]


def weights_of(
    token: Int32[Array, "*N"], delimiter: Int32[Array, "X"], weight: Float[Array, "X"]
) -> Float[Array, "*N"]:
    """Returns the weight of each token.

    Args:
      token: token ids.
      delimiter: int32[X], ascending ids of the delimiters.
      weight: [X], weight of each delimiter.

    Returns:
      The weight of each token's delimiter, NO_DELIMITER for tokens that are none.
    """
    entry = jnp.minimum(jnp.searchsorted(delimiter, token), delimiter.shape[0] - 1)
    return jnp.where(delimiter[entry] == token, weight[entry], NO_DELIMITER)
