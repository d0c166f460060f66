"""The Pallas kernel for selected blocks, in the interpreter, against attention in XLA operations over the same rows."""

import dataclasses
import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from harness import check_parts_agree
from jax.experimental.pallas import tpu as pltpu

from kvjax.ops import attention, quantize
from kvjax.ops.kernels import selected_attention, tiles

BLOCKS = 12


@dataclasses.dataclass(frozen=True)
class Case:
    """Blocks of one KV head or several, with queries and a selection; every block has rows that are not selected."""

    dtype: str = "float32"
    size: int = 64
    group: int = 4
    rows: int = 16  # of a block
    selected: int = 5
    heads: int = 3
    full: bool = False  # all rows of all selected blocks count
    cap: float | None = None
    bias: bool = False
    smoothed: bool = False

    @functools.cached_property
    def _rng(self):
        return np.random.default_rng(0)

    def drawn(self):
        """Queries, packed keys and values [R, C, X], selected blocks, their counts, smoothing."""
        rng, shape = self._rng, (BLOCKS, self.rows, self.size)
        key = rng.normal(size=shape) * 2 + np.linspace(-3, 3, self.size)
        smoothing, key = None, jnp.asarray(key, jnp.float32)
        if self.smoothed:
            channels = [np.linspace(-3, 3, self.size), rng.uniform(0.5, 2, self.size)]
            shift, scale = (jnp.tile(jnp.asarray(x, jnp.float32), (self.heads, 1)) for x in channels)
            smoothing = quantize.Smoothing(shift, scale)
            alike = quantize.Smoothing(shift[:1], scale[:1])
            key = key.at[:, 0].multiply(0.01)  # small keys are stored without the shift
            packed = quantize.pack_keys(key[None], alike, self.dtype)[0]
        else:
            packed = quantize.pack(key, self.dtype)
        value = quantize.pack(jnp.asarray(rng.normal(size=shape), jnp.float32), self.dtype)
        q = jnp.asarray(rng.normal(size=(self.heads, self.group, self.size)), jnp.float32)
        block = np.stack([rng.permutation(BLOCKS)[: self.selected] for _ in range(self.heads)]).astype(np.int32)
        count = rng.integers(0, self.rows + 1, size=block.shape).astype(np.int32)
        count[0] = self.rows
        if not self.full:
            count[-1] = 0
        else:
            count[:] = self.rows
        return q, packed, value, jnp.asarray(block), count, smoothing

    def biases(self, count):
        """The bias of every row of the selected blocks, and which rows count."""
        valid = (np.arange(self.rows) < count[..., None]).reshape(self.heads, 1, -1)
        shape = (self.heads, self.group, valid.shape[-1]) if self.bias else valid.shape
        drawn = self._rng.normal(size=shape) if self.bias else np.zeros(shape)
        return jnp.asarray(np.where(valid, drawn, attention.NEGATIVE), jnp.float32), jnp.asarray(valid[:, 0])

    @property
    def most_rows(self) -> int:
        return self.selected * self.rows


def pool_of(key, value):
    """Keys beside values in rows of whole tiles."""
    rows = jnp.concatenate([key, value], axis=-1)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, tiles.padded(rows.shape[-1]) - rows.shape[-1])))


@functools.partial(jax.jit, static_argnums=0)
def _attend(case: Case, q, pool, block, count, bias, smoothing=None):
    return attention.attend_blocks(q, pool, block, count, bias, case.dtype, case.most_rows, smoothing, case.cap)


def both(case: Case):
    """Attention by the kernel, and in XLA operations."""
    q, key, value, block, count, smoothing = case.drawn()
    bias, valid = case.biases(count)
    found = _attend(case, q, pool_of(key, value), block, count, bias, smoothing)
    rows = (quantize.Packed(x[block].reshape(case.heads, case.selected * case.rows, -1), case.dtype)
            for x in (key, value))
    key, value = (dataclasses.replace(x, smoothing=s) for x, s in zip(rows, (smoothing, None), strict=True))
    return found, attention.attend_part(q, key, value, valid, bias if case.bias else None, case.cap)


def check(case: Case):
    check_parts_agree(*both(case))


@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_any_head_size(size):
    check(Case(size=size, rows=4))


@pytest.mark.parametrize("group", [1, 3, 8])
def test_any_group(group):
    check(Case(group=group, rows=4, dtype="bfloat16"))


@pytest.mark.parametrize("rows", [1, 4, 16, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_rows_of_a_block(rows, dtype):
    """One head has all rows of its blocks, one none, the others some."""
    check(Case(rows=rows, dtype=dtype))


@pytest.mark.parametrize("dtype", quantize.BITS)
@pytest.mark.parametrize("smoothed", [False, True])
def test_blocks_in_few_bits(dtype, smoothed):
    check(Case(dtype=dtype, smoothed=smoothed, size=80))


@pytest.mark.parametrize("dtype", tiles.TYPES)
def test_soft_cap_and_bias(dtype):
    check(Case(dtype=dtype, cap=2.0, bias=True, rows=8, group=3, size=32))


def test_more_rows_than_one_step_takes():
    case = Case(rows=64, selected=11, dtype="bfloat16")
    assert selected_attention.cut(case.dtype, case.rows, case.selected).steps > 1
    check(case)


def test_rows_that_are_not_selected_are_not_seen():
    """NaN in blocks that no head selects, and in pieces of which no row counts."""
    case = Case(rows=32, selected=2)
    q, key, value, block, count, _ = case.drawn()
    bias, _ = case.biases(count)
    pool, wanted = pool_of(key, value), np.zeros((BLOCKS, case.rows), bool)
    piece = selected_attention.cut(case.dtype, case.rows, case.selected).piece_rows
    for head in range(case.heads):
        for chosen, rows in zip(block[head], count[head], strict=True):
            wanted[chosen, : -(-rows // piece) * piece] = True
    assert not wanted.all()
    spoilt = jnp.where(wanted[..., None], pool, jnp.nan)
    clean, found = (_attend(case, q, x, block, count, bias) for x in (pool, spoilt))
    jax.tree.map(np.testing.assert_array_equal, clean, found)


@pytest.mark.parametrize("rows", [4, 64])
def test_the_estimate_is_what_is_read(monkeypatch, rows):
    """Counts the copies that the kernel starts; if all selected rows count, they are as many as XLA is told."""
    case, started = Case(rows=rows, dtype="bfloat16", heads=2, full=True), []
    original = pltpu.make_async_copy

    class Counted:
        def __init__(self, *refs):
            self._copy, self._bytes = original(*refs), int(np.prod(refs[0].shape)) * 2

        def start(self):
            jax.debug.callback(lambda: started.append(self._bytes))
            self._copy.start()

        def wait(self):
            self._copy.wait()

    monkeypatch.setattr(pltpu, "make_async_copy", lambda *refs: Counted(*refs))
    q, key, value, block, count, _ = case.drawn()
    bias, _ = case.biases(count)
    pool = pool_of(key, value)

    def attend(count):
        return attention.attend_blocks(q, pool, block, count, bias, case.dtype, case.most_rows)

    estimate = jax.make_jaxpr(attend)(jnp.asarray(count)).eqns
    (call,) = [eqn for eqn in _all(estimate) if eqn.primitive.name == "pallas_call"]
    others = sum(x.aval.size * x.aval.dtype.itemsize for x in (*call.invars, *call.outvars) if x.aval.ndim != 3
                 or x.aval.shape != (BLOCKS * rows // min(rows, 16), min(rows, 16), 128))
    jax.block_until_ready(attend(jnp.asarray(count)))
    jax.effects_barrier()
    assert sum(started) == case.heads * case.most_rows * 128 * 2
    assert call.params["cost_estimate"].bytes_accessed == sum(started) + others
    started.clear()
    fewer = count.copy()
    fewer[0, 1:] = 0
    jax.block_until_ready(attend(jnp.asarray(fewer)))
    jax.effects_barrier()
    assert sum(started) == (1 + case.selected) * rows * 128 * 2


def _all(eqns):
    """Every equation, those of programs inside included."""
    for eqn in eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _all(inner.eqns)
