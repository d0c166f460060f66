"""Ranking of blocks, the kernels of it, and barriers: against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiled
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from kvjax.ops import barriers, kernels, rotary, topk


def numbers(*shape, seed=0):
    return np.random.default_rng((*shape, seed)).normal(size=shape).astype(np.float32)


# Products with vectors that lie dimension by dimension ---------------------------------------------


def products(vectors, q):
    return topk.vector_products(jnp.asarray(vectors), jnp.asarray(q))


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5, 6, 11])
@pytest.mark.parametrize("size", [1, 3, 4, 66])
@pytest.mark.parametrize("count", [0, 1, 8, 29, 1024, 2053, 4101])
def test_products_with_vectors(count, size, queries):
    vectors, q = numbers(3, size, count), numbers(3, queries, size)
    expected = np.float64(q) @ np.float64(vectors)
    np.testing.assert_allclose(products(vectors, q), expected, rtol=1e-5, atol=1e-5)


def test_threads_share_many_vectors():
    vectors, q = numbers(4, 64, 9001), numbers(4, 5, 64)
    found, expected = jax.jit(products), np.float64(q) @ np.float64(vectors)
    for _ in range(20):
        np.testing.assert_allclose(found(vectors, q), expected, rtol=1e-5, atol=1e-5)


@compiled
def test_products_of_a_batch_are_those_of_each_alone():
    vectors, q = numbers(5, 2, 16, 70), numbers(5, 2, 3, 16)
    batch = jax.vmap(products)(vectors, q)
    for i in range(5):
        np.testing.assert_array_equal(batch[i], products(vectors[i], q[i]))


# The mean of softmaxes -----------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 3.0, 3000.0])
@pytest.mark.parametrize("count", [1, 7, 8, 45])
@pytest.mark.parametrize("group", [1, 4])
def test_the_mean_of_softmaxes(group, count, scale):
    scores = scale * numbers(3, group, count)
    scores[:, :, count // 2 + 1 :] = -1e30  # as methods mark what is not there
    found = jax.jit(topk.aggregate, static_argnums=1)(scores, "softmax_mean")
    np.testing.assert_allclose(found, softmax(np.float64(scores), axis=-1).mean(1), rtol=1e-5, atol=1e-30)


def test_threads_share_many_scores():
    scores = 3 * numbers(4, 4, 9001)
    expected = softmax(np.float64(scores), axis=-1).mean(1)
    found = jax.jit(functools.partial(topk.aggregate, rule="softmax_mean"))
    for _ in range(20):
        np.testing.assert_allclose(found(scores), expected, rtol=1e-5)


# The best blocks -----------------------------------------------------------------------------------

top_blocks = jax.jit(topk.top_blocks, static_argnames="count")


def sorted_blocks(scores, occupied, count):
    """The same of a stable sort, in which -0.0 comes after 0.0, as in XLA's order of floats."""
    scores = np.where(occupied & (scores > -np.inf), scores, -np.inf)
    order = np.lexsort((np.signbit(scores), -scores), axis=-1)[:, :count]
    return np.where(np.take_along_axis(scores, order, axis=-1) > -np.inf, order, scores.shape[-1])


@settings(max_examples=300)
@given(
    st.integers(0, 10**6), st.sampled_from([1, 2, 5, 30, 61]),
    st.sampled_from(["few", "many", "sorted", "extremes", "zeros"]),
)
def test_the_best_blocks_are_those_of_a_stable_sort(seed, count, kind):
    """Given scores of which many are equal, or none; sorted, so that each is better than those before; infinite; or
    zeros of both signs."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(3, 61)).astype(np.float32)
    if kind == "few":
        scores = rng.integers(0, 4, scores.shape).astype(np.float32)
    elif kind == "sorted":
        scores = np.sort(scores)
    elif kind == "zeros":
        scores = np.where(rng.random(scores.shape) < 0.6, np.copysign(0.0, scores), scores).astype(np.float32)
    elif kind == "extremes":
        scores = np.where(rng.random(scores.shape) < 0.3, rng.choice([-np.inf, np.inf]), scores).astype(np.float32)
    occupied = rng.random(scores.shape) < rng.choice([0, 0.3, 1])
    np.testing.assert_array_equal(top_blocks(scores, occupied, count), sorted_blocks(scores, occupied, count))


# All of them ---------------------------------------------------------------------------------------


def test_what_is_written_out_stays_what_it_is():
    x = numbers(3, 4, 5)
    np.testing.assert_array_equal(barriers.written_out(jnp.asarray(x)), x)
    np.testing.assert_array_equal(jax.vmap(barriers.written_out)(x), x)
    half = jnp.asarray(x, jnp.bfloat16)
    np.testing.assert_array_equal(barriers.written_out(half), half)


@compiled
def test_angles_have_one_cosine():
    """However many results are made of rotated vectors. XLA:CPU would compute it again in the fusion of each."""
    def results(x, positions, keys):
        turned = rotary.rotate(x, positions, np.ones(8, np.float32))
        return turned, jnp.einsum("bhd,nd->bhn", turned, keys), turned.sum()

    lowered = jax.jit(results).lower(jnp.ones((1, 4, 16)), jnp.ones(1, jnp.int32), jnp.ones((9, 16)))
    assert lowered.compile().as_text().count(" cosine(") == 1


CALLS = {  # operands, results and what to say of others
    "vector_products": ([np.zeros((3, 8, 5)), np.zeros((3, 2, 8))], [((3, 2, 5), np.float32)], "vectors: "),
    "copy": ([np.zeros((3, 5))], [((3, 5), np.float32)], "copy: "),
}


def spoilt_calls() -> list:
    """Each operand and result with another size along each axis, and of another type."""
    calls = []
    for name, (operands, results, said) in CALLS.items():
        arrays = [(x.shape, np.float32 if x.dtype == np.float64 else x.dtype) for x in operands] + results
        for i, (shape, kind) in enumerate(arrays):
            other = np.float32 if kind != np.float32 else np.int32
            spoilt = [(shape, other)] + [
                ((*shape[:axis], shape[axis] + 1, *shape[axis + 1 :]), kind) for axis in range(len(shape))
            ]
            for number, one in enumerate(spoilt):
                changed = [*arrays[:i], one, *arrays[i + 1 :]]
                calls.append(pytest.param(name, changed, len(operands), said, id=f"{name}-{i}-{number}"))
    return calls


def call(name: str, operands: list, results: list):
    results = [jax.ShapeDtypeStruct(*one) for one in results]
    return kernels.call(name, results if len(results) > 1 else results[0], *map(jnp.asarray, operands))


@compiled
@pytest.mark.parametrize(("name", "arrays", "operands", "said"), spoilt_calls())
def test_other_sizes_and_types_are_refused(name, arrays, operands, said):
    with pytest.raises(jax.errors.JaxRuntimeError, match=said):
        call(name, [np.zeros(*one) for one in arrays[:operands]], arrays[operands:])


@compiled
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_these_sizes_are_fine(name):
    """Without this the test above could say nothing."""
    call(name, *CALLS[name][:2])
