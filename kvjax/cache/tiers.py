"""Three tiers: slots in device memory, more slots in host memory, everything in the store (DynaKV, Discussion 2).

The host's slots are a JAX array in pinned host memory, also on CPU, with a table and a policy of the same kind as the
device's. A block that is missing on the device comes from the host if it is there; else it comes from the store and is
copied to the host. The host's table records only what the device requests: a block that the device keeps for long may
leave the host, and a block that is written always leaves it. The host itself works on its slots (`compute_on`), so only
the blocks that a step needs are transferred to the device. Blocks are read before any is written, because XLA:GPU moves
the result of one host computation through device memory on its way to the next (`scripts/check_gpu.py`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import callbacks, residency
from kvjax.cache.residency import Residency
from kvjax.cache.slots import SlotPool, filled, outcome
from kvjax.cache.types import Spec
from kvjax.ops import barriers
from kvjax.typing import Array, Int32, Num, pytree

try:
    from jax.experimental.compute_on import compute_on2 as compute_on
except ImportError:  # from JAX 0.11 on, the new function has the old name
    from jax.experimental.compute_on import compute_on  # type: ignore[assignment]

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@pytree(kw_only=True)
class TieredPool(SlotPool):
    """A slot pool with more slots in host memory; `rows` and `table` are those of the device."""

    host_rows: Num[Array, "B KB NH C X2"]  # in pinned host memory
    host_table: Residency

    @classmethod
    def over(cls, pool: SlotPool, spec: Spec, slots: int) -> "TieredPool":
        """Adds host slots to a pool.

        Args:
          pool: pool of the device.
          spec: sizes of the layer's cache.
          slots: slots per KV head in host memory.

        Returns:
          The pool.
        """
        batch = pool.rows.shape[0]
        rows = np.zeros((*pool.rows.shape[:2], slots, *pool.rows.shape[3:]), pool.rows.dtype)  # never on the device
        table = residency.empty_all(batch, spec.block_heads, slots, spec.num_blocks)
        kept = {field.name: getattr(pool, field.name) for field in dataclasses.fields(pool)}
        return cls(**kept, host_rows=jax.device_put(rows, _HOST), host_table=table)

    @property
    def host_slots(self) -> int:
        """NH, the host slots of each head that has blocks of its own."""
        return self.host_table.block.shape[-1]

    def fetch(self, need, count, layer, ref):
        plan = self.plan(need, count)
        behind = residency.plan_all(self.host_table, plan.read, self.own(count), self.policy)
        fetched, ok = callbacks.read_blocks(self.rows, ref, layer, behind.read, self.num_blocks)
        missed = behind.read < self.num_blocks
        known = jnp.where(missed, self.host_slots, behind.slot)
        taken = jax.device_put(_take(self.host_rows, *_to_host(self._flat(known))), _DEVICE).reshape(fetched.shape)
        missing = jnp.where(missed[..., None, None], fetched, taken)
        free = jnp.where(ok & missed & barriers.exists(taken), behind.slot, self.host_slots)
        host_rows = _set(self.host_rows, *_to_host(self._flat(free), fetched))
        pool, _ = self.settle(plan, need, count, filled(self.num_blocks, self.rows, plan, missing, ok), ok)
        table, beyond = outcome(self.num_blocks, behind, need, self.own(count), ok)
        pool = dataclasses.replace(pool, host_rows=host_rows, host_table=table)
        return pool, jnp.broadcast_to(plan.slot, need.shape), ok, beyond

    def submit(self, block, layer, ref):
        on_host = self.locate_on_host(block) < self.host_slots
        return super().submit(jnp.where(on_host, self.num_blocks, block), layer, ref)

    def locate_on_host(self, block: Int32[Array, "B K *E"]) -> Int32[Array, "B K *E"]:
        """Returns the host slot of each block, NH where it is in none."""
        return self.locate_in(self.host_table, block)

    def put_row(self, block, row, key, value, layer, ref):
        return super().put_row(block, row, key, value, layer, ref)._without(block)

    def put_blocks(self, block, key, value, layer, ref):
        return super().put_blocks(block, key, value, layer, ref)._without(block)

    def _without(self, block: Int32[Array, "B K *E"]) -> "TieredPool":
        """Drops these blocks, which were just written, from the host's table."""
        slot = self.locate_on_host(block)[:, : self.rows.shape[1]]
        return dataclasses.replace(self, host_table=residency.forget_all(self.host_table, slot, self.num_blocks))

    def _flat(self, slot: Int32[Array, "B KB M1"]) -> Int32[Array, "B KB M1"]:
        """Returns the index of each slot in the flattened host slots; out of range for slot NH."""
        batch, heads, slots = self.host_rows.shape[:3]
        head = jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads, 1)
        return jnp.where(slot < slots, head * slots + slot, batch * heads * slots)


# ----------------------------------------------- the host's work on its slots; all operands are in its memory


_on_host = functools.partial(compute_on, compute_type="device_host", out_memory_spaces=_HOST)


def _to_host(*arrays: Num[Array, "B KB M1 ..."]):
    """Flattens batch, heads and blocks of arrays, and moves them to host memory."""
    return jax.device_put([array.reshape(-1, *array.shape[3:]) for array in arrays], _HOST)


@_on_host
def _take(rows, wanted):
    """Returns the blocks at flat indices wanted[n] of slots [B, KB, NH, C, X2]; any block for an index out of range."""
    return rows.reshape(-1, *rows.shape[3:]).at[wanted].get(mode="clip")


@_on_host
def _set(rows, target, new):
    """Writes blocks new[n] to flat indices target[n] of slots [B, KB, NH, C, X2]."""
    return rows.reshape(-1, *rows.shape[3:]).at[target].set(new, mode="drop").reshape(rows.shape)
