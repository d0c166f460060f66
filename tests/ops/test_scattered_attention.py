"""The kernel for scattered rows on GPUs, in the interpreter, against attention in XLA operations over the same rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import METHODS, Sim, Stream, check_parts_agree

from kvjax.ops import attention, quantize
from kvjax.ops.kernels import scattered_attention
from kvjax.ops.quantize import Scattered, Smoothing

ROWS = 90  # of the pool


@dataclasses.dataclass(frozen=True)
class Case:
    """Selected rows of a few KV heads with queries; the first head attends all of them, the last none."""

    dtype: str = "float32"
    size: int = 64
    group: int = 4
    selected: int = 40
    heads: int = 3
    cap: float | None = None
    bias: bool = False
    smoothed: bool = False

    def drawn(self):
        """Queries, keys, values, which of them count, and the bias or None."""
        rng = np.random.default_rng(0)
        key = jnp.asarray(rng.normal(size=(ROWS, self.size)) * 2 + np.linspace(-3, 3, self.size), jnp.float32)
        value = quantize.pack(jnp.asarray(rng.normal(size=key.shape), jnp.float32), self.dtype)
        smoothing, packed = None, quantize.pack(key, self.dtype)
        if self.smoothed:
            channels = [np.linspace(-3, 3, self.size), rng.uniform(0.5, 2, self.size)]
            shift, scale = (jnp.tile(jnp.asarray(x, jnp.float32), (self.heads, 1)) for x in channels)
            smoothing = Smoothing(shift, scale)
            key = key.at[::3].multiply(0.01)  # small keys are stored without the shift
            packed = quantize.pack_keys(key[None], Smoothing(shift[:1], scale[:1]), self.dtype)[0]
        index = jnp.asarray(rng.integers(0, ROWS, (self.heads, self.selected)), jnp.int32)
        valid = rng.random((self.heads, self.selected)) < 0.7
        valid[0], valid[-1] = True, False
        q = jnp.asarray(rng.normal(size=(self.heads, self.group, self.size)), jnp.float32)
        bias = jnp.asarray(rng.normal(size=(self.heads, self.group, self.selected)), jnp.float32)
        key, value = Scattered(packed, index, self.dtype, smoothing), Scattered(value, index, self.dtype)
        return q, key, value, jnp.asarray(valid), bias if self.bias else None


@functools.partial(jax.jit, static_argnums=5)
def _attend(q, key, value, valid, bias, cap):
    return attention.attend_scattered(q, key, value, valid, bias, cap)


def check(case: Case):
    q, key, value, valid, bias = case.drawn()
    found = _attend(q, key, value, valid, bias, case.cap)
    expected = attention.attend_part(q, key.gathered(), value.gathered(), valid, bias, case.cap)
    check_parts_agree(found, expected)


@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_any_head_size(size):
    check(Case(size=size))


@pytest.mark.parametrize("group", [1, 3, 8, 17])
def test_any_group(group):
    check(Case(group=group, dtype="bfloat16", bias=group == 3))


@pytest.mark.parametrize("selected", [1, 31, 32, 33, 2500])
def test_any_number_of_rows(selected):
    """The last is more than a tile of each of the most programs."""
    check(Case(selected=selected, dtype="bfloat16"))


@pytest.mark.parametrize("dtype", quantize.BITS)
@pytest.mark.parametrize("smoothed", [False, True])
@pytest.mark.parametrize("size", [16, 80])
def test_rows_in_few_bits(dtype, smoothed, size):
    check(Case(dtype=dtype, smoothed=smoothed, size=size))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", *quantize.BITS])
def test_soft_cap_and_bias(dtype):
    check(Case(dtype=dtype, cap=2.0, bias=True, group=3, size=32))


def test_rows_that_do_not_count_are_not_seen():
    q, key, value, valid, bias = Case().drawn()
    counted = np.zeros(ROWS, bool)
    counted[np.asarray(key.index)[1][np.asarray(valid)[1]]] = True
    one = slice(1, 2)
    spoilt = [dataclasses.replace(x, pool=jnp.where(counted[:, None], x.pool, jnp.nan), index=x.index[one])
              for x in (key, value)]
    clean = [dataclasses.replace(x, index=x.index[one]) for x in (key, value)]
    assert not counted.all()
    jax.tree.map(np.testing.assert_array_equal, _attend(q[one], *spoilt, valid[one], bias, None),
                 _attend(q[one], *clean, valid[one], bias, None))


def test_indices_out_of_range_are_clipped():
    q, key, value, valid, _ = Case().drawn()
    far = [dataclasses.replace(x, index=jnp.where(x.index == 0, -5, jnp.where(x.index == ROWS - 1, 10**6, x.index)))
           for x in (key, value)]
    jax.tree.map(np.testing.assert_array_equal, _attend(q, *far, valid, None, None),
                 _attend(q, key, value, valid, None, None))


def test_several_sequences_share_a_pool():
    """Goes through `jax.vmap`, which leaves the pool as it is."""
    q, key, value, valid, _ = Case().drawn()
    rolled = [jnp.stack([x, jnp.roll(x, 1, axis=0)]) for x in (q, valid, key.index)]

    def one(q, valid, index):
        rows = [dataclasses.replace(x, index=index) for x in (key, value)]
        return attention.attend_scattered(q, *rows, valid)

    found = jax.jit(jax.vmap(one))(*rolled)
    for i in range(2):
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y, atol=1e-6), found,
                     jax.jit(one)(*(x[i] for x in rolled)))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_estimate_is_what_is_read(dtype, monkeypatch):
    """Counts the numbers that the programs load of a pool where all rows count."""
    case, seen, load = Case(dtype=dtype, heads=2, selected=64), [], scattered_attention.plgpu.load
    q, key, value, valid, _ = case.drawn()
    row = key.pool.shape[1] * key.pool.dtype.itemsize

    def counted(ref, *, mask, other):
        if ref.ref.shape == key.pool.shape:
            jax.debug.callback(lambda mask: seen.append(int(mask.sum()) * key.pool.dtype.itemsize), mask)
        return load(ref, mask=mask, other=other)

    monkeypatch.setattr(scattered_attention.plgpu, "load", counted)
    jax.block_until_ready(jax.jit(attention.attend_scattered)(q, key, value, jnp.ones_like(valid)))
    jax.effects_barrier()
    assert sum(seen) == case.heads * case.selected * 2 * row
    (call,) = [eqn for eqn in jax.make_jaxpr(attention.attend_scattered)(q, key, value, valid).eqns
               if eqn.primitive.name == "pallas_call"]
    programs = int(np.prod(call.params["grid_mapping"].grid))
    others = sum(x.aval.size * x.aval.dtype.itemsize for x in (*call.invars[:5], *call.outvars))
    others += (programs // case.heads - 1) * q[0].size * 4 * case.heads  # each program of a head reads its queries
    others += (programs // case.heads - 1) * case.heads * case.group * 4  # and what a shift adds
    assert int(call.params["metadata"]["bytes_accessed_by_each"]) * programs == sum(seen) + others


@pytest.mark.parametrize(("rows", "dtype", "served"), [
    (2**24, "int8", True), (2**24 + 1, "int8", False), (2**25 + 1, "int4", True), (2**24 + 1, "bfloat16", True)])
def test_bytes_beyond_32_bits_are_left_to_xla(rows, dtype, served):
    found = []
    jax.eval_shape(lambda pool: found.append(attention._in_reach(Scattered(pool, jnp.zeros((1, 1), jnp.int32), dtype))),
                   jax.ShapeDtypeStruct((rows, 128), quantize.array_type(dtype)))
    assert found == [served]


def test_no_rows_are_left_to_xla():
    q, key, value, valid, _ = Case().drawn()
    none = [dataclasses.replace(x, index=x.index[:, :0]) for x in (key, value)]
    assert not attention._in_reach(none[0])
    assert not attention.attend_part(q, *none, valid[:, :0]).total.any()


@pytest.mark.parametrize(("name", "dtype"), [("full", "float32"), ("quest", "int8"), ("dynakv", "bfloat16")])
def test_methods_decode_as_by_xla(name, dtype, monkeypatch):
    """Numbers of blocks, more than these small methods need, differ so that neither takes programs of the other."""
    stream, outs, called, attend = Stream.draw(1), [], [], attention.attend_scattered
    monkeypatch.setattr(attention, "attend_scattered", lambda *args: called.append(args) or attend(*args))
    for kernel in (False, True):
        monkeypatch.setattr(attention, "_by_triton", lambda kernel=kernel: kernel)
        monkeypatch.setattr(attention.kernels, "COMPILED", False)
        more = {"page": 4 + 4 * kernel} if name == "full" else {"max_blocks": 2000 + kernel}
        outs.append(Sim(dataclasses.replace(METHODS[name], **more), stream, [50, 20], dtype=dtype).run(8))
        assert bool(called) == kernel
    np.testing.assert_allclose(*outs, atol=2e-5 if dtype == "float32" else 2e-4, rtol=0)
