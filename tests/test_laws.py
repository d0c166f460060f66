"""The laws of the contract, over every method and every store."""

import dataclasses
import functools
import re

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import APART, CAPACITY, METHODS, PAPERS, UNLIKE, Sim, Stream, check_every_token_has_one_place

from kvjax.attend import AttentionCache, attend, init_cache, prefill_cache
from kvjax.cache.residency import POLICIES
from kvjax.cache.types import Placement
from kvjax.methods import DynaKV, Quest, SnapKV
from kvjax.store.flash.layout import LAYOUTS
from kvjax.store.flash.store import FlashStore
from kvjax.store.host import HostStore

# A worker that finds what another one is still writing to the cache of programs compiles for itself, and says so.
pytestmark = pytest.mark.filterwarnings("error", "ignore:Error .* persistent compilation cache entry")


def over(methods, unmarked, mark):
    """Parametrises over methods, and marks those that are not named."""
    return pytest.mark.parametrize("method", [
        pytest.param(method, id=name, marks=() if name in unmarked else mark) for name, method in methods.items()
    ])


every_method = over(METHODS, UNLIKE + PAPERS, pytest.mark.alike)
# Of laws that no method can break by itself, the others' programs take a while to compile.
every_kind = over(METHODS, UNLIKE, pytest.mark.slow)
_stored = {name: method for name, method in METHODS.items() if name != "streaming_llm"}  # which has no blocks
stored = pytest.mark.parametrize("method", _stored.values(), ids=_stored)
OF_ALL_KINDS = ("full", "oracle", "streaming_llm", "quest", "dynakv", "kvswap", "kvswap_4bit", "raw")


@pytest.fixture(params=["host", "flash", "mmap"])
def store(request, tmp_path):
    if request.param == "host":
        return HostStore()
    return FlashStore(directory=tmp_path, engine="mmap" if request.param == "mmap" else None)


def unlimited(method):
    """The method with a budget that covers every token."""
    blocks = 10_000 if not method.evicts else None
    return dataclasses.replace(method, budget=CAPACITY, max_blocks=blocks)


# 1. ------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("prompt", [40, 3], ids=["prompt", "from_scratch"])
def test_a_budget_that_covers_everything_gives_full_attention(method, prompt):
    stream = Stream.draw(0)
    sim = Sim(unlimited(method), stream, [prompt, max(1, prompt - 2)])
    for _ in range(25):
        at = sim.at.copy()
        out, _ = sim.step()
        for b in range(2):
            np.testing.assert_allclose(out[b], harness.dense_attention(stream, b, at[b]), atol=2e-5, rtol=0)


@every_kind
def test_capped_scores_and_sink_logits_are_those_of_full_attention(method):
    """Gemma 2's and gpt-oss's attention: no method knows of them."""
    stream, prompt, steps, cap = Stream.draw(0), [80, 78], 8, 1.5
    learned = np.random.default_rng(1).normal(size=harness.HEADS * harness.GROUP).astype(np.float32)
    cache = init_cache(unlimited(method), batch=2, kv_heads=harness.HEADS, group=harness.GROUP, head_dim=harness.SIZE,
                       capacity=CAPACITY, soft_cap=cap)
    k, v, q, token = (array[:, :80] for array in (stream.k, stream.v, stream.q, stream.token))
    read = k, v, np.asarray(prompt, np.int32), q, token
    cache = prefill_cache(cache, *map(jnp.asarray, read), sink_logits=jnp.asarray(learned))
    for step in range(steps):
        b, at = np.arange(2), np.asarray(prompt) + step
        newest = (array[b, at] for array in (stream.q, stream.k, stream.v, stream.token))
        out, cache = attend(cache, *map(jnp.asarray, newest), sink_logits=jnp.asarray(learned))
        for row in range(2):
            expected = harness.dense_attention(stream, row, at[row], cap=cap, sink_logits=learned)
            np.testing.assert_allclose(out[row], expected, atol=2e-5, rtol=0)


# 2. ------------------------------------------------------------------------------------------


@every_method
def test_attended_tokens_are_unique_valid_and_within_the_budget(method):
    """And the output is the attention over exactly these, unless they are a sample, whose rows have weights."""
    stream = Stream.draw(1)
    sim, spec = Sim(method, stream, [50, 20]), harness.plan_of(method).spec
    for _ in range(30):
        before = [[sim.places(b, h) for h in range(harness.HEADS)] for b in range(2)]
        at = sim.at.copy()
        out, report = sim.step()
        selected, attended = np.asarray(report.selected), np.asarray(report.attended)
        for b in range(2):
            seen = []
            for head in range(harness.HEADS):
                places = before[b][head]
                tail = places["sinks"] + places["window"] + places["held"] + [int(at[b])]
                if method.attends_all:
                    chosen = places["blocks"]
                else:
                    chosen = [int(p) for p in selected[b, head] if p >= 0 and p not in places["held"]]
                assert len(set(chosen)) == len(chosen) and set(chosen) <= set(places["blocks"])
                assert attended[b, head] == len(chosen) + len(tail) <= spec.budget
                assert set(range(spec.sinks)) | {at[b], at[b] - 1} <= set(tail) | set(chosen)
                seen.append(tail + chosen)
            if not method.samples:
                np.testing.assert_allclose(out[b], harness.attention_over(stream, b, at[b], seen), atol=2e-5, rtol=0)


@stored
def test_the_budget_is_used_up(method):
    """A method that attends less than it may would look cheap for the wrong reason; a sample is as large as it is."""
    if method.samples:
        return
    sim, spec = Sim(method, Stream.draw(1), [80, 78]), harness.plan_of(method).spec  # the last page is short in one
    _, report = sim.step()
    expected = np.minimum(spec.budget, [81, 79]) * np.ones((harness.HEADS, 1))
    np.testing.assert_array_equal(np.asarray(report.attended).T, expected)


# 3. ------------------------------------------------------------------------------------------


@every_method
def test_rows_of_a_batch_do_not_see_each_other(method):
    stream = Stream.draw(2)
    other = Stream.draw(13).beside(stream.row(1))
    one, changed = Sim(method, stream, [45, 17]).run(25), Sim(method, other, [20, 17]).run(25)
    np.testing.assert_array_equal(one[:, 1], changed[:, 1])
    assert not np.array_equal(one[:, 0], changed[:, 0])


# A batch of one is a program of its own: of the others it takes a while to compile.
@over({**METHODS, "raw": dataclasses.replace(METHODS["kvswap"], aggregation="mean")}, OF_ALL_KINDS, pytest.mark.slow)
def test_rows_of_a_batch_are_bit_equal_to_running_alone(method):
    stream = Stream.draw(2)
    together = Sim(method, stream, [45, 17]).run(25)
    for b, prompt in enumerate([45, 17]):
        alone = Sim(method, stream.row(b), [prompt]).run(25)
        np.testing.assert_allclose(together[:, b], alone[:, 0], atol=APART, rtol=0)


@every_method
def test_heads_do_not_see_each_other(method):
    if method.head_shared:
        return
    stream = Stream.draw(3)
    changed = Stream(stream.q.copy(), stream.k.copy(), stream.v.copy())
    changed.k[:, :, 1] += 1.0
    changed.q[:, :, harness.GROUP :] *= -1.0
    one, other = Sim(method, stream, [40, 20]).run(20), Sim(method, changed, [40, 20]).run(20)
    np.testing.assert_array_equal(one[:, :, : harness.GROUP], other[:, :, : harness.GROUP])
    assert not np.array_equal(one[:, :, harness.GROUP :], other[:, :, harness.GROUP :])


@every_method
def test_an_inactive_sequence_stays_as_it_is(method):
    sim = Sim(method, Stream.draw(4), [40, 30])
    sim.run(5)
    frozen = _leaves_but_loaded(sim.cache)
    sim.step([True, False])
    for before, now in zip(frozen, _leaves_but_loaded(sim.cache), strict=True):
        np.testing.assert_array_equal(before[1], now[1])


def _leaves_but_loaded(cache):
    """`loaded` describes the newest step and not the sequence."""
    cache = jax.device_get(cache)
    state = dataclasses.replace(cache.state, loaded=0 * cache.state.loaded)
    return jax.tree.leaves(dataclasses.replace(cache, state=state))


# 4. ------------------------------------------------------------------------------------------


@every_method
def test_one_trace_serves_every_step_and_nothing_changes_shape(method):
    sim = Sim(method, Stream.draw(5), [30, 10])
    before, tree = sum(harness.TRACES.values()), jax.tree.structure(sim.cache)
    shapes = _shapes(sim.cache)
    sim.run(40)
    assert jax.tree.structure(sim.cache) == tree
    assert _shapes(sim.cache) == shapes
    assert sum(harness.TRACES.values()) - before <= 1


def _shapes(cache):
    """Returns what a program is compiled for: weak types are others than the same types that are not weak."""
    return [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(cache)]


@every_method
def test_jax_enable_x64_changes_no_type_and_no_bit(method):
    """Nor is anything computed in 64 bits on the way."""
    narrow = Sim(method, Stream.draw(5), [50, 20])
    expected = narrow.run(10)
    with jax.enable_x64(True):
        wide = Sim(method, Stream.draw(5), [50, 20])
        np.testing.assert_array_equal(wide.run(10), expected)
        for program in wide.programs():
            assert not re.search(r"f64\[\d", str(program))  # but for Python's numbers, of which there is f64[]
    assert _shapes(wide.cache) == _shapes(narrow.cache)
    for one, other in zip(*(jax.tree.leaves(jax.device_get(sim.cache)) for sim in (wide, narrow)), strict=True):
        np.testing.assert_array_equal(one, other)


# 5. ------------------------------------------------------------------------------------------


@every_method
def test_flash_and_memory_give_equal_bits(method, store):
    """Every token is in the same place, too: so what the other laws find in memory holds on flash."""
    stream = Stream.draw(6)
    in_memory, on_flash = Sim(method, stream, [40, 25]), Sim(method, stream, [40, 25], store=store)
    np.testing.assert_array_equal(in_memory.run(45), on_flash.run(45))
    for one, other in zip(*(jax.tree.leaves(sim.state()) for sim in (in_memory, on_flash)), strict=True):
        exact = not np.issubdtype(one.dtype, np.floating)
        np.testing.assert_allclose(one, other, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5)


@pytest.mark.parametrize(
    ("policy", "name"), [(policy, "dynakv" if policy == "cluster" else "quest") for policy in POLICIES]
)
def test_no_residency_policy_changes_the_output(policy, name):
    """With a few slots to spare, so that a policy has a choice, while blocks grow and, in dynakv, split."""
    method, stream = METHODS[name], Stream.draw(6)
    slots = harness.plan_of(method).spec.max_blocks + 3
    stored = Sim(method, stream, [40, 25], store=HostStore(), policy=policy, slots=slots)
    np.testing.assert_array_equal(stored.run(45), _in_memory(name))


@functools.cache
def _in_memory(name):
    return Sim(METHODS[name], Stream.draw(6), [40, 25]).run(45)


@pytest.mark.parametrize("name", ["quest", "dynakv", "dynakv_merge"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "sequential"])
def test_every_layout_gives_equal_bits(name, layout, tmp_path):
    """Nothing is staged for long, so that what is read back has been on flash, also of blocks that merging emptied."""
    store = FlashStore(directory=tmp_path, layout=layout, staging_bytes=0)
    stored = Sim(METHODS[name], Stream.draw(6), [40, 25], store=store)
    np.testing.assert_array_equal(stored.run(45), _in_memory(name))


@pytest.mark.parametrize("method", [
    pytest.param(method, id=name) for name, method in _stored.items() if method.keeps_keys
])
def test_blocks_with_runs_stored_once_give_equal_bits(method, small_pages, tmp_path):
    """In bytes instead of floats: `test_packing`, which has the programs of these."""
    harness.check_runs_stored_once(method, tmp_path)


@pytest.mark.parametrize("name", ["full", "quest", "dynakv"])
def test_more_slots_and_other_callbacks_give_equal_bits(name, store):
    method, stream = METHODS[name], Stream.draw(7)
    spec = harness.plan_of(method).spec
    few = Sim(method, stream, [60, 25], store=store)
    many = Sim(method, stream, [60, 25], store=store, slots=spec.num_blocks + 2, backend="io")
    np.testing.assert_array_equal(few.run(30), many.run(30))
    assert many.branch.stats().blocks_read <= few.branch.stats().blocks_read


# 6. ------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("prompt", [(50, 9), (1, 2), (95, 40)])
def test_every_token_is_in_exactly_one_place(method, prompt):
    sim = Sim(method, Stream.draw(8), prompt)
    check_every_token_has_one_place(sim)
    for _ in range(CAPACITY - max(prompt)):
        sim.step()
        check_every_token_has_one_place(sim)
        loaded = np.asarray(sim.cache.state.loaded)
        assert (loaded == loaded[:, :1]).all() or not method.fetches_alike
    pos = np.asarray(sim.cache.state.pos)
    if prompt == (50, 9):  # a wrong claim fails above; here, none is missing
        assert (pos == pos[:, :1]).all() == method.places_alike


@pytest.mark.parametrize("name", ["dynakv", "dynakv_merge"])
def test_clusters_split_and_get_empty_only_where_they_merge(name):
    """Else the laws would say little about either."""
    sim, emptied = Sim(METHODS[name], Stream.draw(8), [50, 9]), 0
    for _ in range(40):
        before = sim.state().count
        sim.step()
        emptied += np.sum((before > 0) & (sim.state().count == 0))
    assert (sim.state().index.splits > 0).all()
    assert (emptied > 0) == (METHODS[name].merge > 0)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.evicts])
def test_what_was_dropped_does_not_come_back(name):
    sim = Sim(METHODS[name], Stream.draw(8), [50, 9])
    kept = [_kept(sim, b) for b in range(2)]
    for _ in range(40):
        sim.step()
        for b in range(2):
            before, kept[b] = kept[b], _kept(sim, b)
            assert all(new - old == {sim.at[b] - 1} for old, new in zip(before, kept[b], strict=True))


def _kept(sim, b):
    """Positions that each KV head still has."""
    return [{p for kept in sim.places(b, head).values() for p in kept} for head in range(harness.HEADS)]


@dataclasses.dataclass(frozen=True)
class ForgetsEveryFifth(Quest):
    """Mutant: tells the machinery to drop some tokens."""

    def append(self, spec, index, view, evicted):
        index, placement = super().append(spec, index, view, evicted)
        gone = (evicted.pos % 5 == 0) & evicted.valid
        return index, Placement(jnp.where(gone, spec.num_blocks, placement.block), placement.row)


@dataclasses.dataclass(frozen=True)
class LosesASplitRow(DynaKV):
    """Mutant: a split leaves one row out."""

    def adapt(self, spec, index, view, block, keys, pos):
        index, edits = super().adapt(spec, index, view, block, keys, pos)
        return index, dataclasses.replace(edits, rows=edits.rows.at[:, 0, 0].set(-1))


@dataclasses.dataclass(frozen=True)
class WritesTwice(Quest):
    """Mutant: puts every token into row 0 of its page."""

    def append(self, spec, index, view, evicted):
        index, placement = super().append(spec, index, view, evicted)
        return index, Placement(placement.block, jnp.zeros_like(placement.row))


@dataclasses.dataclass(frozen=True)
class DropsTheLeaving(SnapKV):
    """Mutant: forgets the token for which it made room."""

    def append(self, spec, index, view, evicted):
        index, placement = super().append(spec, index, view, evicted)
        return index, Placement(jnp.full_like(placement.block, spec.num_blocks), placement.row)


@pytest.mark.parametrize("mutant", [
    ForgetsEveryFifth(budget=24, sinks=2, window=4, page=4), WritesTwice(budget=24, sinks=2, window=4, page=4),
    LosesASplitRow(budget=24, sinks=2, window=4, cluster=4, buffer=3, threshold=1.2),
    DropsTheLeaving(budget=24, sinks=2, window=4, page=4, observation=6),
], ids=lambda m: m.name)
def test_a_leaked_place_is_caught(mutant):
    sim = Sim(mutant, Stream.draw(8), [50, 10])
    with pytest.raises(AssertionError):
        for _ in range(40):
            sim.step()
            check_every_token_has_one_place(sim)


# 7. ------------------------------------------------------------------------------------------


@every_method
def test_a_prompt_of_one_token_works(method):
    stream = Stream.draw(9)
    sim = Sim(method, stream, [1, 2])
    out, _ = sim.step()
    for b, at in enumerate([1, 2]):
        np.testing.assert_allclose(out[b], harness.dense_attention(stream, b, at), atol=2e-5, rtol=0)


@every_method
def test_a_second_prompt_starts_clean(method):
    """In a cache that holds a longer prompt and what was decoded after it."""
    used, second = Sim(method, Stream.draw(10), [80, 80]), Stream.draw(11)
    used.run(10)
    spec = used.plan.spec
    length = jnp.maximum(jnp.asarray([30, 25]), method.least_prompt(spec) + spec.sinks + spec.ring)
    held = AttentionCache(used.cache, jnp.asarray(used.at), used.plan)
    empty = jax.tree.map(jnp.zeros_like, held)
    q, key, value, token = (jnp.asarray(array) for array in (second.q, second.k, second.v, second.token))
    again, fresh = (prefill_cache(cache, key, value, length, q, token) for cache in (held, empty))
    assert jax.tree.structure(again) == jax.tree.structure(fresh)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(fresh), strict=True):
        np.testing.assert_allclose(one, other, atol=APART, rtol=0)


@pytest.mark.parametrize("name", ["quest", "dynakv"])
def test_a_second_prompt_on_a_store_starts_clean(name, store):
    """While what the first one wrote is there, and after it is gone."""
    method, second = METHODS[name], Stream.draw(11)
    used = Sim(method, Stream.draw(10), [60, 60], store=store)
    used.run(10)
    expected = Sim(method, second, [30, 25]).run(10)
    np.testing.assert_array_equal(Sim(method, second, [30, 25], store=store).run(10), expected)
    used.branch.close()
    np.testing.assert_array_equal(Sim(method, second, [30, 25], store=store).run(10), expected)


@stored
def test_a_retry_after_a_failed_step_equals_an_unfailed_run(method, store):
    """A stale generation makes the read fail; afterwards everything is as if it had not happened."""
    stream = Stream.draw(12)
    good, bad = Sim(method, stream, [60, 40], store=store), Sim(method, stream, [60, 40], store=store)
    expected = good.run(20)
    bad.run(8)
    bad.branch.generation += 1
    line, bad_line = Sim.line, property(lambda self: dataclasses.replace(
        line.fget(self), generation=jnp.int32(self.branch.generation - 1)))
    try:
        Sim.line = bad_line
        with pytest.raises(Exception, match="generation"):
            bad.step()
    finally:
        Sim.line = line
        bad.branch.generation -= 1
    np.testing.assert_array_equal(expected[8:], bad.run(12))
