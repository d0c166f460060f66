"""Three tiers: slots in device memory, more slots in host memory, everything in the store (DynaKV, Discussion 2).

The host's slots are a JAX array in pinned host memory, also on CPU, with a table and a policy of the same kind as the
device's. A block that is missing on the device comes from the host if it is there, else from the store through the
host. The host's table books what the device asks it for: a block that the device keeps for long may leave the host.
What is written goes to every tier that has the block. Work on the host's slots is done by the host (`compute_on`): only
the blocks that a step needs cross over to the device.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on

from kvjax.method import Spec
from kvjax.store import residency
from kvjax.store.residency import Residency
from kvjax.store.slots import SlotPool, filled, outcome, read_blocks
from kvjax.typing import Array, Int32, Num

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TieredPool(SlotPool):
    """A slot pool with a second, larger one behind it; `rows` and `table` are those of the device."""

    host_rows: Num[Array, "B KB NH C X2"]  # in pinned host memory
    host_table: Residency

    @classmethod
    def over(cls, pool: SlotPool, spec: Spec, slots: int) -> "TieredPool":
        """`pool` with `slots` more in host memory per KV head."""
        batch = pool.rows.shape[0]
        rows = np.zeros((*pool.rows.shape[:2], slots, *pool.rows.shape[3:]), pool.rows.dtype)  # never on the device
        table = residency.empty_all(batch, spec.block_heads, slots, spec.num_blocks)
        kept = {field.name: getattr(pool, field.name) for field in dataclasses.fields(pool)}
        return cls(**kept, host_rows=jax.device_put(rows, _HOST), host_table=table)

    def fetch(self, need, count, layer, line):
        plan = self.plan(need, count)
        behind = residency.plan_all(self.host_table, plan.read, self.own(count), self.policy)
        fetched, ok = read_blocks(self.rows, line, layer, behind, self.backend)
        target = jnp.where(ok & (behind.read < self.num_blocks), behind.slot, self.host_rows.shape[2])
        operands = (self._flat(target), fetched, self._flat(behind.slot))
        operands = jax.device_put([one.reshape(-1, *one.shape[3:]) for one in operands], _HOST)
        host_rows, taken = _set_and_take(self.host_rows, *operands)
        missing = jax.device_put(taken, _DEVICE).reshape(fetched.shape)
        pool, traffic = self.settle(plan, need, filled(self.num_blocks, self.rows, plan, missing, ok), ok)
        table, beyond = outcome(self.num_blocks, behind, need, ok)
        pool = dataclasses.replace(pool, host_rows=host_rows, host_table=table)
        return pool, jnp.broadcast_to(plan.slot, need.shape), ok, dataclasses.replace(traffic, missed=beyond.missed)

    def submit(self, block, layer, line):
        on_host = self.locate_on_host(block) < self.host_rows.shape[2]
        return super().submit(jnp.where(on_host, self.num_blocks, block), layer, line)

    def locate_on_host(self, block: Int32[Array, "B K *E"]) -> Int32[Array, "B K *E"]:
        """Slot of each block in the host tier, NH where it is not there."""
        return self.locate_in(self.host_table, block)

    def put_row(self, block, row, key, value, layer, line):
        pool = super().put_row(block, row, key, value, layer, line)
        return pool._write_behind(block, key, value, row)

    def put_blocks(self, block, key, value, layer, line):
        pool = super().put_blocks(block, key, value, layer, line)
        return pool._write_behind(block, key, value)

    def _write_behind(self, block, key, value, row=None) -> "TieredPool":
        """Writes whole blocks, or a row of each, to the host tier where it has them."""
        block, packed = self.own(block), self.packed(key, value)
        row = None if row is None else self.own(row)
        slot = jnp.where(block < self.num_blocks, self.locate_on_host(block), self.host_rows.shape[2])
        at = self._flat(slot)
        if row is not None:
            size = self.rows.shape[3]
            at = jnp.where(slot < self.host_rows.shape[2], at * size + row, at * size)
        new = packed.reshape(-1, *packed.shape[slot.ndim:])
        host_rows = _set(self.host_rows, *jax.device_put((at.reshape(-1), new), _HOST))
        table = residency.note_written_all(self.host_table, slot)
        return dataclasses.replace(self, host_rows=host_rows, host_table=table)

    def _flat(self, slot: Int32[Array, "B K *E"]) -> Int32[Array, "B K *E"]:
        """Number of each host slot among those of all sequences and heads; beyond all of them for slot NH."""
        batch, heads, slots = self.host_rows.shape[:3]
        lane = jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads, *(1,) * (slot.ndim - 2))
        return jnp.where(slot < slots, lane * slots + slot, batch * heads * slots)


# ----------------------------------------------- what the host does with its slots; all operands are in its memory


@compute_on("device_host")
@jax.jit
def _set(rows, at, new):
    """Slots [B, K, NH, C, D2] with new[n, ...] at flat places at[n]: blocks or rows, by their shape."""
    return rows.reshape(-1, *new.shape[1:]).at[at].set(new, mode="drop").reshape(rows.shape)


@compute_on("device_host")
@jax.jit
def _set_and_take(rows, at, new, wanted):
    """The same, and what is then at wanted[n]."""
    flat = rows.reshape(-1, *new.shape[1:]).at[at].set(new, mode="drop")
    return flat.reshape(rows.shape), flat[wanted]
