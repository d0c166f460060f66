"""`check_method`: every method passes, and each broken one is told which law it breaks."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from harness import METHODS, either
from tiny import CONFIG

import kvjax
from kvjax.cache.check import check_method
from kvjax.cache.types import Selection
from kvjax.errors import MethodError
from kvjax.methods.quest import Quest


# One of each kind: the laws run over all of them.
@pytest.mark.parametrize("name", either("full", "streaming_llm", "magicpig", "dynakv", slow=("quest", "h2o")))
def test_methods_keep_the_contract(name):
    check_method(METHODS[name])


@dataclasses.dataclass(frozen=True)
class Twice(Quest):
    def select(self, spec, index, view, q):
        selection = super().select(spec, index, view, q)
        return dataclasses.replace(selection, block=selection.block.at[:, 1].set(selection.block[:, 0]))


@dataclasses.dataclass(frozen=True)
class Empty(Quest):
    def select(self, spec, index, view, q):
        block = jnp.arange(spec.num_blocks - spec.max_blocks, spec.num_blocks, dtype=jnp.int32)
        return Selection(jnp.broadcast_to(block, (spec.kv_heads, spec.max_blocks)))


@dataclasses.dataclass(frozen=True)
class TooMany(Quest):
    def select(self, spec, index, view, q):
        selection = super().select(spec, index, view, q)
        return dataclasses.replace(selection, block=jnp.repeat(selection.block, 2, axis=-1))


@dataclasses.dataclass(frozen=True)
class Floats(Quest):
    def select(self, spec, index, view, q):
        selection = super().select(spec, index, view, q)
        return dataclasses.replace(selection, block=selection.block.astype(jnp.float32))


class NoDataclass(Quest):
    extra = 3


@dataclasses.dataclass(frozen=True)
class NoHash(Quest):
    __hash__ = None


@dataclasses.dataclass(frozen=True)
class Forgets(Quest):
    def append(self, spec, index, view, evicted):
        index, placement = super().append(spec, index, view, evicted)
        return index, dataclasses.replace(placement, block=jnp.full_like(placement.block, spec.num_blocks))


@dataclasses.dataclass(frozen=True)
class AlwaysAppends(Quest):
    def append(self, spec, index, view, evicted):
        moved = dataclasses.replace(evicted, pos=evicted.pos + 9, valid=jnp.bool_(True))
        return super().append(spec, index, view, moved)


@dataclasses.dataclass(frozen=True)
class Grows(Quest):
    def build(self, spec, index, context):
        index, placement = super().build(spec, index, context)
        return dataclasses.replace(index, far=jnp.concatenate([index.far, index.far])), placement


@dataclasses.dataclass(frozen=True)
class NoPlacement(Quest):
    def build(self, spec, index, context):
        index, placement = super().build(spec, index, context)
        return index, placement.block


@dataclasses.dataclass(frozen=True)
class Python(Quest):
    def select(self, spec, index, view, q):
        return super().select(spec, index, view, q) if float(q.sum()) > 0 else None


@pytest.mark.parametrize(("kind", "law"), [
    (Twice, "names a block twice"), (Empty, "a block without tokens"), (TooMany, r"int32\[2, 12\]"),
    (Floats, "block is float32|cannot be traced"), (NoDataclass, "no frozen dataclass"), (NoHash, "cannot be hashed"),
    (Forgets, "append loses token"),
    (AlwaysAppends, "where none leaves"), (Grows, "other shapes"), (NoPlacement, "build returns|cannot be traced"),
    (Python, "cannot be traced"),
])
def test_a_broken_law_is_named(kind, law):
    """But for types that the checks of this suite see first."""
    with pytest.raises(MethodError, match=law):
        check_method(kind(budget=96, window=8, page=8))


@pytest.mark.parametrize("kind", [TooMany, Floats, NoDataclass, Grows])
def test_prefill_refuses_what_cannot_be_right(kind, params, tokens):
    llm = kvjax.LLM(CONFIG, params)
    with pytest.raises(MethodError):
        llm.prefill(np.asarray(tokens[0]).tolist(), method=kind(budget=64, window=8, page=8))
