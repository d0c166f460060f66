"""`kvjax.typing.pytree`: frozen dataclasses that JAX takes apart and puts together."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.typing import Array, Float, pytree


@pytree
class Line:
    a: Float[Array, "N"]
    b: Float[Array, "N"] | None
    name: str = dataclasses.field(default="line", metadata={"static": True})

    def __post_init__(self):
        if self.a is None:
            raise ValueError("a line has a")


@pytree(kw_only=True)
class Longer(Line):
    c: Float[Array, "N"]


def longer() -> Longer:
    return Longer(a=jnp.ones(2), b=None, c=jnp.zeros(2), name="long")


def test_static_fields_are_no_children_and_the_others_keep_their_names():
    leaves, structure = jax.tree_util.tree_flatten_with_path(longer())
    assert [jax.tree_util.keystr(path) for path, _ in leaves] == [".a", ".c"]
    again = jax.tree.unflatten(structure, [leaf for _, leaf in leaves])
    assert (type(again), again.name, again.b) == (Longer, "long", None)
    assert structure == jax.tree.structure(longer())
    assert structure != jax.tree.structure(dataclasses.replace(longer(), name="other"))


def test_jax_puts_anything_together_and_users_only_what_is_valid():
    assert jax.tree.map(lambda leaf: None, longer()).a is None
    with pytest.raises(ValueError, match="a line has a"):
        dataclasses.replace(longer(), a=None)


def test_compiled_functions_take_and_give_them():
    def doubled(line: Longer) -> Longer:
        assert line.name == "long"
        return dataclasses.replace(line, a=2 * line.a, c=line.c + 1)

    found = jax.jit(doubled)(longer())
    np.testing.assert_array_equal([found.a, found.c], [[2, 2], [1, 1]])


def test_they_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        longer().a = jnp.ones(3)
