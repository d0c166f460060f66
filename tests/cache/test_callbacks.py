"""How compiled programs call back: our own way and JAX's do the same, and whatever happens there, a program goes on."""

import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import callbacks
from kvjax.cache.pool import StoreRef
from kvjax.errors import StoreError
from kvjax.ops import quantize
from kvjax.store import interface
from kvjax.store.geometry import DTYPES, Geometry, as_stored
from kvjax.store.host import HostStore

pytestmark = pytest.mark.skipif(callbacks.default_backend() != "buffer", reason="of programs on CPU")
compiled = pytest.mark.skipif(not callbacks.COMPILED, reason="kvjax was installed without its compiled part")
BLOCK, SLOT = jnp.asarray([[[3, 0], [1, 4]]], jnp.int32), jnp.asarray([[[1, 2], [0, 1]]], jnp.int32)


@pytest.fixture(params=[pytest.param(True, marks=compiled), False], ids=["ours", "jax"])
def way(request, monkeypatch):
    monkeypatch.setattr(callbacks, "COMPILED", request.param)


def filled(dtype: str = "float32"):
    """A branch of four blocks of three rows for each of two heads, its line, and the blocks."""
    branch = HostStore().create(Geometry(1, 1, 2, 4, 3, 8, dtype), "")
    blocks = np.random.default_rng(0).integers(-9, 9, (1, 2, 4, 3, 8)).astype(DTYPES[dtype])
    branch.write_layer(0, blocks, np.full((1, 2, 4), 3, np.int32))
    return branch, StoreRef(jnp.int32(branch.handle), jnp.int32(0)), blocks


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_read_into_their_slots(way, dtype):
    branch, line, blocks = filled(dtype)
    rows = jnp.full((1, 2, 3, 3, 8), 7, quantize.array_type(dtype))
    read, ok = jax.jit(lambda rows: callbacks.read_in_place(rows, line, jnp.int32(0), BLOCK, SLOT))(rows)
    expected = np.array(as_stored(np.asarray(rows)))
    expected[0, 0, [1, 2]], expected[0, 1, 0] = blocks[0, 0, [3, 0]], blocks[0, 1, 1]
    assert ok
    np.testing.assert_array_equal(as_stored(np.asarray(read)), expected)
    branch.close()


@pytest.mark.parametrize("misses", [0, 1, 3, 10, 32])
def test_only_blocks_that_are_read_cross_over_to_an_accelerator(monkeypatch, misses):
    """At most four times as many, and nobody is called where there are none."""
    rng, crossed, shape = np.random.default_rng(0), [], (2, 2, 8)  # 32 needed blocks
    branch = HostStore().create(Geometry(1, 2, 2, 20, 3, 8, "float32"), "")
    blocks = rng.normal(size=(2, 2, 20, 3, 8)).astype(np.float32)
    branch.write_layer(0, blocks, np.full((2, 2, 20), 3, np.int32))
    line, read_copies = StoreRef(jnp.int32(branch.handle), jnp.int32(0)), callbacks._read_copies

    def counted(*operands):
        fetched, ok = read_copies(*operands)
        crossed.append(fetched.nbytes)
        return fetched, ok

    monkeypatch.setattr(callbacks, "_read_copies", counted)
    need = rng.permuted(np.tile(np.arange(20), (2, 2, 1)), axis=-1)[..., :8]
    missing = (rng.permutation(32) < misses).reshape(shape)
    block, like = jnp.asarray(np.where(missing, need, 20), jnp.int32), jnp.zeros((2, 2, 11, 3, 8))
    read = jax.jit(lambda block: callbacks.read_blocks(like, line, jnp.int32(0), block, 20))
    fetched, ok = read(block)
    expected = np.where(missing[..., None, None], np.take_along_axis(blocks, need[..., None, None], axis=2), 0)
    assert ok
    np.testing.assert_array_equal(fetched, expected)
    assert sum(crossed) <= 4 * misses * blocks[0, 0, 0].nbytes and bool(crossed) == (misses > 0)
    branch.discard()
    assert bool(read(block)[1]) == (misses == 0), "a branch that is closed cannot be read"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_blocks_are_put(way, dtype):
    branch, line, blocks = filled(dtype)
    ones, kind = np.ones((1, 2, 3, 8), DTYPES[dtype]), quantize.array_type(dtype)

    @jax.jit
    def put(packed):
        first = callbacks.effect("put_rows", "buffer", line, jnp.int32(0), BLOCK[..., 0], SLOT[..., 0], packed[:, :, 0])
        return first + callbacks.effect("put_blocks", "buffer", line, jnp.int32(0), BLOCK[..., 1:], packed[:, :, None])

    assert put(jnp.asarray(ones.view(kind) if dtype == "bfloat16" else ones)) == 2
    branch.commit(0)
    blocks[0, 0, 3, 1], blocks[0, 1, 1, 0], blocks[0, 0, 0] = 1, 1, 1
    found = np.zeros((1, 2, 4, 3, 8), DTYPES[dtype])
    every = np.tile(np.arange(4, dtype=np.int32), (1, 2, 1))
    assert branch.read_into(0, 1, every, every, found)
    np.testing.assert_array_equal(found, blocks)
    branch.close()


def test_what_goes_wrong_is_kept_in_the_branch(way):
    branch, line, _ = filled()
    rows = jnp.ones((1, 2, 3, 3, 8))
    read, ok = jax.jit(lambda rows: callbacks.read_in_place(rows, line, jnp.int32(9), BLOCK, SLOT))(rows)
    assert not ok and "layer 9" in str(branch.take_error())
    np.testing.assert_array_equal(read, rows)
    branch.close()
    assert jax.jit(lambda block: callbacks.effect("submit", "buffer", line, jnp.int32(0), block))(BLOCK) == 1, "a hint"


def test_a_branch_that_is_gone_is_no_answer(way):
    line = StoreRef(jnp.int32(2**31 - 1), jnp.int32(0))
    assert jax.jit(lambda block: callbacks.effect("submit", "buffer", line, jnp.int32(0), block))(BLOCK) == 0


@compiled
def test_what_is_raised_outside_a_branch_is_kept_in_it():
    """Raises as Ctrl-C does where Python has no frame but a callback's."""
    branch, line, _ = filled()
    at = line, jnp.int32(0), BLOCK[..., 0], SLOT[..., 0]
    put = jax.jit(lambda packed: callbacks.effect("put_rows", "buffer", *at, packed))
    with mock.patch.object(callbacks, "_call", side_effect=KeyboardInterrupt):
        assert put(jnp.ones((1, 2, 8))) == 0
    with pytest.raises(StoreError) as caught:
        branch.commit(0)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert put(jnp.ones((1, 2, 8))) == 1
    branch.commit(0)
    branch.close()


@compiled
def test_a_program_fails_if_nobody_can_be_told(monkeypatch):
    _, line, _ = filled()
    told = []

    def broken(handle):
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(sys, "unraisablehook", told.append)
    monkeypatch.setattr(interface, "lookup", broken)
    submit = jax.jit(lambda block: callbacks.effect("submit", "buffer", line, jnp.int32(0), block))
    with pytest.raises(jax.errors.JaxRuntimeError, match="it raised"):
        submit(BLOCK).block_until_ready()
    assert "broken" in str(told[0].exc_value)
    with pytest.raises(jax.errors.JaxRuntimeError, match="it raised"):
        jax.block_until_ready(callbacks._in_buffers("submit", (jnp.ones(3, jnp.complex64),)))


@compiled
@pytest.mark.parametrize("operands,function", [(1, 99), (1, -1), (9, 0)], ids=["beyond", "negative", "operands"])
def test_a_call_of_nothing_is_refused(operands, function):
    call = jax.ffi.ffi_call("kvjax_callback", [jax.ShapeDtypeStruct((), jnp.int32)])
    with pytest.raises(jax.errors.JaxRuntimeError, match="callback"):
        jax.block_until_ready(call(*[jnp.int32(0)] * operands, function=np.int32(function)))
