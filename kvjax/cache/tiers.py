"""Three tiers: slots in device memory, more slots in host memory, everything in the store (DynaKV, Discussion 2).

The host's slots are a JAX array in pinned host memory, also on CPU, with a table and a policy of the same kind as the
device's. A block that is missing on the device comes from the host if it is there, else from the store, and is copied
to the host. The host's table books what the device asks it for: a block that the device keeps for long may leave the
host, and one that is written does. Work on the host's slots is done by the host (`compute_on`): only the blocks that a
step needs cross over to the device. They are read before any is written, as XLA:GPU has what one piece of the host's
work gives go through the device's memory on its way to the next (`scripts/check_gpu.py`).
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
except ImportError:  # from JAX 0.11 on, the new one has the old one's name
    from jax.experimental.compute_on import compute_on  # type: ignore[assignment]

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@pytree(kw_only=True)
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

    @property
    def host_slots(self) -> int:
        """NH."""
        return self.host_table.block.shape[-1]

    def fetch(self, need, count, layer, ref):
        plan = self.plan(need, count)
        behind = residency.plan_all(self.host_table, plan.read, self.own(count), self.policy)
        fetched, ok = callbacks.read_blocks(self.rows, ref, layer, behind.read)
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
        """Slot of each block in the host tier, NH where it is not there."""
        return self.locate_in(self.host_table, block)

    def put_row(self, block, row, key, value, layer, ref):
        return super().put_row(block, row, key, value, layer, ref)._without(block)

    def put_blocks(self, block, key, value, layer, ref):
        return super().put_blocks(block, key, value, layer, ref)._without(block)

    def _without(self, block: Int32[Array, "B K *E"]) -> "TieredPool":
        """The host without these blocks, which were written a moment ago."""
        slot = self.locate_on_host(block)[:, : self.rows.shape[1]]
        return dataclasses.replace(self, host_table=residency.forget_all(self.host_table, slot, self.num_blocks))

    def _flat(self, slot: Int32[Array, "B KB M1"]) -> Int32[Array, "B KB M1"]:
        """Number of each host slot among those of all sequences and heads; beyond all of them for slot NH."""
        batch, heads, slots = self.host_rows.shape[:3]
        lane = jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads, 1)
        return jnp.where(slot < slots, lane * slots + slot, batch * heads * slots)


# ----------------------------------------------- what the host does with its slots; all operands are in its memory


_on_host = functools.partial(compute_on, compute_type="device_host", out_memory_spaces=_HOST)


def _to_host(*what: Num[Array, "B KB M1 ..."]):
    """Block after block, in host memory."""
    return jax.device_put([one.reshape(-1, *one.shape[3:]) for one in what], _HOST)


@_on_host
def _take(rows, wanted):
    """Blocks at flat places wanted[n] of slots [B, KB, NH, C, X2]; any block for a place beyond all of them."""
    return rows.reshape(-1, *rows.shape[3:]).at[wanted].get(mode="clip")


@_on_host
def _set(rows, at, new):
    """Slots [B, KB, NH, C, X2] with blocks new[n] at flat places at[n]."""
    return rows.reshape(-1, *rows.shape[3:]).at[at].set(new, mode="drop").reshape(rows.shape)
