"""The base of the cluster updates; functions take one head, and the method maps them over its heads."""

import abc
from typing import ClassVar

import jax.numpy as jnp

from kvjax.cache.method import Edits, Placement, Spec, View
from kvjax.errors import ConfigError
from kvjax.methods.clusters.index import ClusterIndex
from kvjax.typing import Array, Bool, Float, Int32, PRNGKey


class Update(abc.ABC):
    """What becomes of a key that leaves the recent window. A `View` here is that of one head."""

    edits: ClassVar[bool] = True  # whether `due` and `adapt` ever rewrite blocks

    @property
    @abc.abstractmethod
    def held(self) -> int:
        """U: rows that may wait in the tail."""

    def force(self, spec: Spec, view: View) -> Int32[Array, ""]:
        """A block to fetch only in order to rewrite it, NB = none."""
        return jnp.int32(spec.num_blocks)

    @abc.abstractmethod
    def append(
        self, spec: Spec, index: ClusterIndex, view: View, key: Float[Array, "D"], squared: Float[Array, "NB"],
        valid: Bool[Array, ""],
    ) -> tuple[ClusterIndex, Placement]:
        """A place for the key, whose squared distances to all centroids are given; where not `valid` nothing changes.
        """

    def due(self, spec: Spec, index: ClusterIndex, view: View) -> Int32[Array, "P"]:
        """A block to rewrite now, and one to merge it with if the update merges; NB = none."""
        return jnp.full((1,), spec.num_blocks, jnp.int32)

    def adapt(
        self, spec: Spec, index: ClusterIndex, view: View, block: Int32[Array, "P"], keys: Float[Array, "CU D"],
        valid: Bool[Array, "CU"], seed: PRNGKey,
    ) -> tuple[ClusterIndex, Edits]:
        """Rewrites the due blocks and what is held for the first; block NB = nothing."""
        raise ConfigError(f"{type(self).__name__} never rewrites a block")
