"""What XLA is told that small kernels access, against the blocks that their steps are given."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.kernels import code_scores, lines


def told(function, *args) -> int:
    """The bytes that the estimate of the one kernel in a function has."""
    (call,) = [eqn for eqn in jax.make_jaxpr(function)(*args).eqns if eqn.primitive.name == "pallas_call"]
    return call.params["cost_estimate"].bytes_accessed


def counting(module, name, seen, monkeypatch):
    """Notes the bytes of the blocks of each step of a kernel."""
    kernel = getattr(module, name)

    def counted(*refs, **settings):
        given = [int(np.prod(ref.shape)) * ref.dtype.itemsize for ref in refs]
        jax.debug.callback(lambda: seen.append(given))
        kernel(*refs, **settings)

    monkeypatch.setattr(module, name, counted)


def ran(function, *args):
    jax.block_until_ready(function(*args))
    jax.effects_barrier()


@pytest.mark.parametrize(("dtype", "axis"), [("float32", 2), ("bfloat16", 2), ("float32", 1), ("uint8", 1)])
def test_lines(dtype, axis, monkeypatch):
    """Numbers of lines, four bytes each, come on top."""
    seen, x = [], jnp.zeros((3, 64, 256), dtype)
    at, new = jnp.asarray([0, 40, 63], jnp.int32), jnp.zeros((3, x.shape[3 - axis]), dtype)
    counting(lines, "_change", seen, monkeypatch)
    counting(lines, "_take", seen, monkeypatch)
    change, take = functools.partial(lines.change, how="set", axis=axis), functools.partial(lines.take, axis=axis)
    for function, args in ((change, (x, at, new)), (take, (x, at))):
        seen.clear()
        ran(function, *args)
        assert len(seen) == 3 and told(function, *args) == sum(sum(step[1:]) for step in seen) + 4 * 3


def test_scores_of_codes(monkeypatch):
    """A head's table is read once for all of its steps."""
    seen, table, code = [], jnp.zeros((3, 2, 8, 16)), jnp.zeros((3, 2, 4096), jnp.uint8)
    counting(code_scores, "_score", seen, monkeypatch)
    ran(code_scores.score, table, code)
    assert len(seen) == 3 * 4
    assert told(code_scores.score, table, code) == sum(step[1] + step[2] for step in seen) + 3 * seen[0][0]
