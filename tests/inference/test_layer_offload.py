"""Layers that wait in a store: the same tokens, less memory, and nothing lost when the store fails."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import METHODS, either
from tiny import CAPACITY, CONFIG, PROMPT, decoded, drawn, make_params, start

import kvjax
from kvjax.errors import ConfigError, ReadFailed, StaleCache
from kvjax.inference import decode, layer_offload, prefill
from kvjax.inference.plan import Slots, make_plan, outline
from kvjax.llm import LLM
from kvjax.store.flash.store import FlashStore
from kvjax.store.host import HostStore

STEPS = 12
DEEP = dataclasses.replace(CONFIG, num_layers=4, windows=(None,) * 4)


@pytest.mark.parametrize("name", METHODS)
def test_the_layers_of_every_method_come_back_as_they_were(name, tmp_path):
    """Every array of the state and of the pool, in memory or over a store, filled with noise."""
    plan = make_plan(CONFIG, METHODS[name], 2, CAPACITY)
    rng = np.random.default_rng(0)
    for stored in (False, True):
        outlines = [outline(plan, i, stored, Slots()) for i in range(CONFIG.num_layers)]
        layers = tuple(drawn(one, rng) for one in outlines)
        offloaded = layer_offload.offload_all(FlashStore(directory=tmp_path), layers)
        assert not jax.tree.leaves(offloaded)
        back = layer_offload.everything(offloaded)
        assert jax.tree.structure(back) == jax.tree.structure(layers)
        for one, again in zip(jax.tree.leaves(layers), jax.tree.leaves(back), strict=True):
            assert one.dtype == again.dtype
            np.testing.assert_array_equal(one, again)
        layer_offload.close(offloaded)


@pytest.mark.parametrize(("name", "prefetch"), [("full", "off"), ("dynakv", "off"), ("kvswap", "layer")])
def test_parked_layers_decode_the_same_bits(params, tokens, name, prefetch, tmp_path):
    plan, resident, logits, branch = start(params, tokens, METHODS[name], HostStore(), prefetch=prefetch)
    _, offloaded, same, other = start(
        params, tokens, METHODS[name], FlashStore(directory=tmp_path), prefetch=prefetch,
        offload=FlashStore(directory=tmp_path)
    )
    np.testing.assert_array_equal(logits, same)
    resident, expected = decoded(plan, params, resident, tokens, STEPS)
    offloaded, got = decoded(plan, params, offloaded, tokens, STEPS)
    np.testing.assert_array_equal(expected, got)
    loaded = layer_offload.everything(offloaded.layers)
    for one, again in zip(_contents(resident.layers), _contents(loaded), strict=True):
        np.testing.assert_array_equal(one, again)
    branch.close()
    other.close()
    layer_offload.close(offloaded.layers)


def _contents(layers):
    """All but how many rows were handed to the store so far."""
    return jax.tree.leaves([(one.state, one.pool.rows, one.pool.table) for one in layers])


def test_layers_in_memory_may_be_parked_too(params, tokens, tmp_path):
    """With no other store: keys and values go to and fro with their layer."""
    plan, resident, *_ = start(params, tokens, METHODS["quest"])
    _, offloaded, *_ = start(params, tokens, METHODS["quest"], offload=FlashStore(directory=tmp_path))
    _, expected = decoded(plan, params, resident, tokens, STEPS)
    np.testing.assert_array_equal(expected, decoded(plan, params, offloaded, tokens, STEPS)[1])


def test_a_prompt_may_be_parked_with_no_other_store(tmp_path):
    llm, context, method = _model(DEEP), list(range(1, 50)), METHODS["quest"]
    offloaded = llm.prefill(context, method=method, slots=kvjax.Slots(offload=FlashStore(directory=tmp_path)))
    assert not jax.tree.leaves(offloaded.state.layers)
    expected = llm.generate([1, 2], llm.prefill(context, method=method), max_new_tokens=4).tokens
    assert llm.generate([1, 2], offloaded, max_new_tokens=4).tokens == expected
    offloaded.close()


def test_memory_is_that_of_two_layers(tmp_path):
    llm = _model(DEEP)
    context, method = list(range(1, 50)), kvjax.Quest(budget=24, sinks=2, window=4, page=4)
    resident = llm.prefill(context, method=method, store=HostStore())
    offloaded = llm.prefill(context, method=method, store=HostStore(),
                            slots=kvjax.Slots(offload=FlashStore(directory=tmp_path)))
    assert not jax.tree.leaves(offloaded.state.layers), "no array is left in memory between steps"
    assert offloaded.resident_bytes == pytest.approx(resident.resident_bytes / 2, rel=0.02)
    resident.close()
    offloaded.close()
    assert not list(tmp_path.iterdir()), "its temporary file went with it"


def test_a_prompt_that_is_not_read_leaves_no_file(tmp_path, monkeypatch):
    """Refused, or failed while layers are offloaded; the exception may be kept, as notebooks do."""
    llm, context = _model(DEEP), list(range(1, 50))
    slots = kvjax.Slots(offload=FlashStore(file=tmp_path / "p.kv"))
    with pytest.raises(ConfigError, match="h2o") as kept:
        llm.prefill(context, method=kvjax.H2O(budget=24, sinks=2, window=4), store=HostStore(), slots=slots, chunk=8)
    assert not list(tmp_path.iterdir()), kept
    with monkeypatch.context() as broken:
        broken.setattr(layer_offload, "offload", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError) as kept:
            llm.prefill(context, method=METHODS["quest"], store=HostStore(), slots=slots)
    llm.prefill(context, method=METHODS["quest"], store=HostStore(), slots=slots).close()  # no lock was left


def _model(config):
    return LLM(config, make_params(config, sharper=1))


@pytest.mark.parametrize("name", either(
    "full", "dynakv", "shadowkv", "kvswap", slow=("quest", "arkvale", "loki")))
def test_only_pages_that_changed_are_written(params, tokens, name, tmp_path, monkeypatch):
    """Tries pages of tokens, and of vectors that stand for many blocks, whichever way they lie in memory."""
    monkeypatch.setattr(layer_offload, "PAGE_BYTES", 512)
    plan, length = make_plan(CONFIG, METHODS[name], 2, 4000), jnp.asarray(PROMPT)
    slots = Slots(offload=FlashStore(directory=tmp_path, staging_bytes=0))
    state, _ = prefill.prefill(plan, params, tokens[:, : max(PROMPT)], length, None, slots)
    branch = state.layers[0].branch
    pages = sum(len(one.sums) for one in state.layers)
    before = branch.stats().blocks_written
    state, _ = decoded(plan, params, state, tokens, STEPS)
    branch.flush()
    assert pages == before
    assert branch.stats().blocks_written - before < STEPS * pages / 100
    layer_offload.close(state.layers)


def test_a_question_leaves_the_parked_cache_as_it_is(tmp_path):
    llm, question = _model(CONFIG), [7, 8, 9]
    slots = kvjax.Slots(offload=FlashStore(directory=tmp_path))
    cache = llm.prefill(list(range(1, 50)), method=METHODS["quest"], store=HostStore(), slots=slots)
    first = llm.generate(question, cache, max_new_tokens=8)
    assert first.usage.offloaded.bytes_read > 0
    assert llm.generate(question, cache, max_new_tokens=8).tokens == first.tokens
    grown = llm.extend(cache, question, chunk=2)
    assert grown.length == [52]
    whole = llm.prefill(list(range(1, 50)), method=METHODS["quest"], store=HostStore())
    np.testing.assert_array_equal(grown.logits, llm.extend(whole, question, chunk=2).logits)


def test_saved_and_restored(tmp_path):
    llm = _model(CONFIG)
    slots = kvjax.Slots(offload=FlashStore(directory=tmp_path))
    cache = llm.prefill(list(range(1, 50)), method=METHODS["quest"], store=HostStore(), slots=slots)
    cache.save(tmp_path / "saved")
    expected = llm.generate([7, 8], cache, max_new_tokens=8).tokens
    again = llm.restore(tmp_path / "saved", method=METHODS["quest"], slots=slots)
    assert layer_offload.is_offloaded(again.state.layers)
    assert llm.generate([7, 8], again, max_new_tokens=8).tokens == expected
    again.close()


@pytest.mark.parametrize("call", range(6))
def test_a_failed_read_of_a_layer_ends_the_token_and_nothing_else(params, tokens, call, tmp_path, monkeypatch):
    """Two layers are opened twice each in a token; whichever read fails, the retry decodes the same bits."""
    plan, expected, _, _kept = start(params, tokens, METHODS["dynakv"], HostStore())
    _, state, _, _blocks = start(params, tokens, METHODS["dynakv"], HostStore(), offload=HostStore())
    state, _ = decoded(plan, params, state, tokens, 3)
    branch, calls = state.layers[0].branch, iter(range(100))
    read = type(branch).read_into

    def failing(self, *args):
        if self is branch and next(calls) == call:
            self._errors.save(ReadFailed("injected"))
            return False
        return read(self, *args)

    monkeypatch.setattr(type(branch), "read_into", failing)
    out, i = [], 3
    while i < STEPS:
        try:
            done = decode.step(plan, params, state, tokens[np.arange(2), np.asarray(PROMPT) + i], donate=True)
        except ReadFailed as error:
            state = error.state
            continue
        state, i = done.state, i + 1
        out.append(np.asarray(done.logits))
    np.testing.assert_array_equal(decoded(plan, params, expected, tokens, STEPS)[1][3:], np.stack(out))
    assert next(calls) > 4 * (STEPS - 3), "the failure was injected"


def test_ctrl_c_amid_a_parked_layer_stays_ctrl_c(params, tokens, monkeypatch):
    plan, state, *_ = start(params, tokens, METHODS["quest"], offload=HostStore())
    expected = decode.step(plan, params, start(params, tokens, METHODS["quest"])[1], tokens[:, 1]).logits

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(state.layers[0].branch, "_load", interrupt)
        decode.step(plan, params, state, tokens[:, 0])
    np.testing.assert_array_equal(decode.step(plan, params, state, tokens[:, 1]).logits, expected)


def test_layers_that_cannot_all_be_parked_leave_no_lock(params, tokens, tmp_path, monkeypatch):
    """While the exception is kept, as notebooks do."""
    _, state, *_ = start(params, tokens, METHODS["quest"])
    store = FlashStore(file=tmp_path / "p.kv")
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError) as kept:
        broken.setattr(layer_offload, "offload", lambda *_: 1 / 0)
        layer_offload.offload_all(store, state.layers)
    layer_offload.close(layer_offload.offload_all(store, state.layers))
    assert kept.traceback


def test_bad_use_has_typed_errors(params, tokens, tmp_path):
    plan, state, *_ = start(params, tokens, METHODS["quest"], offload=HostStore())
    fed = tokens[np.arange(2), np.asarray(PROMPT)]
    with pytest.raises(ConfigError, match="staged"):
        decode.step(plan, params, state, fed, driver="fused")
    decode.step(plan, params, state, fed)
    with pytest.raises(StaleCache, match="generation"):
        decode.step(plan, params, state, fed)
