"""Base of the cluster updates; functions take one head, and the method maps them over its heads."""

import abc
from typing import ClassVar

import jax.numpy as jnp

from kvjax.cache.types import Edits, Placement, Spec, View
from kvjax.errors import ConfigError
from kvjax.methods.clusters.index import ClusterIndex
from kvjax.typing import Array, Bool, Float, Int32, PRNGKey


class Update(abc.ABC):
    """Strategy for the keys that leave the recent window; a `View` is that of one head here."""

    edits: ClassVar[bool] = True  # whether `due` and `adapt` ever rewrite blocks

    @property
    @abc.abstractmethod
    def held(self) -> int:
        """U: rows that may be held in the tail."""

    def force(self, spec: Spec, view: View) -> Int32[Array, ""]:
        """Returns a block to fetch only in order to rewrite it; NB = none."""
        return jnp.int32(spec.num_blocks)

    @abc.abstractmethod
    def append(
        self, spec: Spec, index: ClusterIndex, view: View, key: Float[Array, "D"], squared: Float[Array, "NB"],
        valid: Bool[Array, ""],
    ) -> tuple[ClusterIndex, Placement]:
        """Places a key that leaves the window.

        Args:
          spec: sizes of the layer.
          index: statistics of the head's clusters.
          view: positions, counts, held rows and fetched blocks of the head.
          key: the key.
          squared: its squared distances to all centroids.
          valid: whether there is a key; if not, nothing changes.

        Returns:
          The new index, and the block and row of the key.
        """

    def due(self, spec: Spec, index: ClusterIndex, view: View) -> Int32[Array, "P"]:
        """Returns a block to rewrite now, and one to merge it with if the update merges; NB = none."""
        return jnp.full((1,), spec.num_blocks, jnp.int32)

    def adapt(
        self, spec: Spec, index: ClusterIndex, view: View, block: Int32[Array, "P"], keys: Float[Array, "CU D"],
        valid: Bool[Array, "CU"], seed: PRNGKey,
    ) -> tuple[ClusterIndex, Edits]:
        """Rewrites the due blocks and the rows held for the first one.

        Args:
          spec: sizes of the layer.
          index: statistics of the head's clusters.
          view: positions, counts, held rows and fetched blocks of the head.
          block: due blocks (`due`); NB = none.
          keys: rows of the first due block, the held rows, and the rows of the other due blocks.
          valid: which of these rows hold a key.
          seed: key for random starts.

        Returns:
          The new index, and the blocks to write.

        Raises:
          ConfigError: the update never rewrites a block.
        """
        raise ConfigError(f"{type(self).__name__} never rewrites a block; set `edits` to False, or define `adapt`")
