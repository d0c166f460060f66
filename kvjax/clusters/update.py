"""The interface of a cluster update; functions take one head, and the method maps them over its heads."""

from typing import Protocol, runtime_checkable

from kvjax.clusters.index import ClusterIndex
from kvjax.method import Edits, Placement, Spec, View
from kvjax.typing import Array, Bool, Float, Int32, PRNGKey


@runtime_checkable
class Update(Protocol):
    """What becomes of a key that leaves the recent window. A `View` here is that of one head."""

    @property
    def held(self) -> int:
        """U: rows that may wait in the tail."""

    @property
    def edits(self) -> bool:
        """Whether `due` and `adapt` ever rewrite blocks."""

    def force(self, spec: Spec, view: View) -> Int32[Array, ""]:
        """A block to fetch only in order to rewrite it, NB = none."""

    def append(
        self, spec: Spec, index: ClusterIndex, view: View, key: Float[Array, "D"], valid: Bool[Array, ""]
    ) -> tuple[ClusterIndex, Placement]:
        """A place for the key; where not `valid` nothing changes."""

    def due(self, spec: Spec, index: ClusterIndex, view: View) -> Int32[Array, ""]:
        """A block to rewrite now, NB = none."""

    def adapt(
        self, spec: Spec, index: ClusterIndex, view: View, block: Int32[Array, ""], keys: Float[Array, "CU D"],
        valid: Bool[Array, "CU"], seed: PRNGKey,
    ) -> tuple[ClusterIndex, Edits]:
        """Rewrites the due block and what is held for it; block NB = nothing."""
