"""Sums, maxima and parts over the devices that share the heads of a layer.

Inside a program that runs on a mesh (`kvjax.models.mesh`), each device sees the KV heads that are its own. What
depends on all heads goes through a `Shards`, which does nothing where one device has them all.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.typing import Array, Int32


@dataclasses.dataclass(frozen=True)
class Shards:
    """Equal parts of an axis, one on each of `count` devices.

    Attributes:
      count: devices that share the axis; 1 = it is not shared.
      axis: name of the mesh axis of these devices; None = nothing is exchanged, which is right for one device, and
        tells the shapes that one of several devices has.
    """

    count: int = 1
    axis: str | None = None

    def sum(self, x: Array) -> Array:
        """Returns the sum of `x` over the devices, on each of them."""
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def mean(self, x: Array) -> Array:
        """Returns the mean of `x` over the devices, on each of them: that over all heads, as each has as many."""
        return x if self.axis is None else jax.lax.psum(x, self.axis) / self.count

    def max(self, x: Array) -> Array:
        """Returns the largest of `x` over the devices, on each of them."""
        return x if self.axis is None else jax.lax.pmax(x, self.axis)

    def over_all(self, scores: Array, rule: str) -> Array:
        """Returns scores over all heads from those over the heads of each device.

        Args:
          scores: scores that `kvjax.ops.topk.aggregate` made of this device's query heads.
          rule: its rule, whose last word says whether they are means or maxima.
        """
        return self.mean(scores) if rule.endswith("mean") else self.max(scores)

    def gather(self, x: Array, axis: int = 0) -> Array:
        """Returns the parts of all devices, one after the other along an axis."""
        if self.axis is None:
            return x if self.count == 1 else jnp.concatenate([x] * self.count, axis)
        return jax.lax.all_gather(x, self.axis, axis=axis, tiled=True)

    def own(self, x: Array, axis: int = 0) -> Array:
        """Returns this device's part of an array that has all parts along an axis."""
        if self.count == 1:
            return x
        size = x.shape[axis] // self.count
        return jax.lax.dynamic_slice_in_dim(x, self.number * size, size, axis)

    def once(self, x: Array) -> Array:
        """Returns `x` on the first device and zeros on the others: a term of a `sum` that is the same on all."""
        return x if self.axis is None else jnp.where(self.number == 0, x, 0)

    @property
    def number(self) -> Int32[Array, ""]:
        """Number of this device among those that share the axis."""
        return jnp.int32(0) if self.axis is None else jax.lax.axis_index(self.axis).astype(jnp.int32)


WHOLE = Shards()
