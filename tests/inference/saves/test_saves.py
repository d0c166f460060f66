"""Caches that outlive their process: equal tokens after restoring, and all or nothing when a save is interrupted."""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import drawn

import kvjax
from kvjax import _files
from kvjax.cache.pool import StoreRef
from kvjax.errors import (
    ConfigError,
    FormatMismatch,
    KvjaxError,
    NoSpace,
    NothingSaved,
    ReadFailed,
    StaleCache,
    StoreLocked,
    WriteFailed,
)
from kvjax.inference import decode
from kvjax.inference.plan import Slots, State, make_plan, outline
from kvjax.inference.saves import place, restoring, saving, state_file
from kvjax.methods.shared.delimiters import Delimiters
from tests import test_llm
from tests.harness import DELIMITERS, METHODS
from tests.test_llm import CONTEXT, METHOD

llm = test_llm.llm  # a fixture
ROOT = pathlib.Path(__file__).resolve().parents[3]


def answers(model, cache, **kwargs) -> list:
    """Tokens that follow a question."""
    return model.generate("where", cache, max_new_tokens=5, **kwargs).tokens


def same(tree, expected) -> None:
    """Equal structures, types and bits."""
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == other.dtype
        np.testing.assert_array_equal(leaf, other)


def states(directory) -> int:
    """How many states a directory holds."""
    return len(list(pathlib.Path(directory).glob("state-*")))


def content(directory) -> list[str]:
    """Names in a directory."""
    return sorted(os.listdir(directory))


KINDS = {
    "memory": lambda path: None,
    "flash": lambda path: kvjax.FlashStore(file=path / "saved" / "blocks.kv"),
    "elsewhere": lambda path: kvjax.FlashStore(directory=path),
}


@pytest.fixture(params=KINDS)
def make(request, llm, tmp_path):
    """make(method, ...) -> a cache over one kind of store; all are closed at the end."""
    (tmp_path / "saved").mkdir()
    caches = []

    def prefill(context=CONTEXT, method=METHOD, **kwargs):
        caches.append(llm.prefill(context, method=method, store=KINDS[request.param](tmp_path), **kwargs))
        return caches[-1]

    yield prefill
    for cache in caches:
        cache.close()


def test_a_restored_cache_answers_alike(llm, make, tmp_path):
    cache = make()
    expected = answers(llm, cache)
    cache.save(tmp_path / "saved")
    cache.close()
    again = llm.restore(tmp_path / "saved")
    assert again.plan == cache.plan and again.length == cache.length
    same((again.logits, [one.state for one in again.state.layers]),
         (cache.logits, [one.state for one in cache.state.layers]))
    assert answers(llm, again) == expected
    again.close()


def test_numbers_of_numpy_are_saved_as_numbers(unchecked, llm, tmp_path):
    method = kvjax.Quest(budget=np.int64(24), sinks=2, window=4, page=4)
    cache = llm.prefill("abc" * 20, method=method, capacity=np.int64(90))
    cache.save(tmp_path / "saved")
    again = llm.restore(tmp_path / "saved", method=kvjax.Quest(budget=24, sinks=2, window=4, page=4))
    assert again.plan.capacity == 90 and llm.restore(tmp_path / "saved").plan.method == again.plan.method


def test_the_codec_of_a_store_is_kept(llm, small_pages, tmp_path):
    """Also where the file of the directory is a copy. The pages that are not full have a run of empty rows."""
    store = kvjax.FlashStore(directory=tmp_path, codec="rle", direct=False)
    cache = llm.prefill(CONTEXT, method=METHOD, store=store)
    assert cache.branch.stats().blocks_short > 0
    expected = answers(llm, cache)
    cache.save(tmp_path / "saved")
    cache.close()
    with pytest.raises(FormatMismatch, match="codec 'rle'"):
        llm.restore(tmp_path / "saved", codec="raw")
    again = llm.restore(tmp_path / "saved", direct=False)
    assert again.branch.codec == "rle" and answers(llm, again) == expected
    again.close()


def _outlines(plan):
    """The shape of every layer's cache in memory; nothing is computed, hence nothing compiled."""
    return [outline(plan, i, False, Slots()) for i in range(len(plan.layers))]


@pytest.mark.parametrize(("dtype", "name"), [
    *(("float32", name) for name in METHODS), *(("bfloat16", name) for name in ("full", "dynakv", "pqcache")),
])
def test_the_state_of_every_method_is_restored(tmp_path, name, dtype):
    """Every array of the state, filled with noise, and those without elements."""
    rng = np.random.default_rng(0)
    method = dataclasses.replace(METHODS[name], dense_layers=1)
    plan = make_plan(test_llm.CONFIG, method, 2, 96, dtype)
    layers = [drawn(one, rng) for one in _outlines(plan)]
    state = State(tuple(layers), jnp.array([3, 5], jnp.int32), StoreRef(jnp.int32(-1), jnp.int32(0)))
    logits = jnp.asarray(rng.normal(size=(2, test_llm.CONFIG.vocab_size)), jnp.float32)
    saving.save(tmp_path, plan, state, logits, ((7,), ()), None, "model")
    found = restoring.restore(tmp_path, test_llm.CONFIG, "model")
    assert found.plan == plan
    same((found.state, found.logits), (state, logits))


def test_an_answered_cache_is_saved_and_goes_on(llm, make, tmp_path):
    cache = make()
    first = llm.generate("abc", cache, max_new_tokens=5).cache
    expected = answers(llm, first)
    cache.save(tmp_path / "saved")
    first.save(tmp_path / "saved")
    for one in (first, cache):
        one.close()
    again = llm.restore(tmp_path / "saved")
    assert again.length == first.length and answers(llm, again) == expected
    again.close()


def test_another_process_answers_alike(llm, tmp_path):
    kvjax.save(llm, tmp_path / "model")
    cache = llm.prefill(CONTEXT, method=METHOD, store=kvjax.FlashStore(file=tmp_path / "blocks.kv"))
    cache.save(tmp_path)
    expected = answers(llm, cache)
    cache.close()
    program = f"""
import json, kvjax
llm = kvjax.load({str(tmp_path / "model")!r})
cache = llm.restore({str(tmp_path)!r})
print(json.dumps(llm.generate("where", cache, max_new_tokens=5).tokens))
llm.generate("abc", cache, max_new_tokens=6).cache.save({str(tmp_path)!r})
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, text=True, capture_output=True)
    assert json.loads(done.stdout) == expected
    again = llm.restore(tmp_path, read_only=True)
    assert again.length == [len(CONTEXT) + 3 + 5]
    again.close()


def test_many_readers_and_one_writer(llm, tmp_path):
    cache = llm.prefill(CONTEXT, method=METHOD, store=kvjax.FlashStore(file=tmp_path / "blocks.kv"))
    expected = answers(llm, cache)
    cache.save(tmp_path)
    with pytest.raises(StoreLocked):
        llm.restore(tmp_path)
    readers = [llm.restore(tmp_path, read_only=True, threads=1) for _ in range(2)]
    llm.generate("zzz", cache, max_new_tokens=4).cache.save(tmp_path)
    for reader in readers:
        assert answers(llm, reader) == expected
        with pytest.raises(WriteFailed, match="read-only"):
            reader.branch.save()
        reader.save(tmp_path.parent / f"copy{reader.branch.handle}")
        reader.close()
    cache.close()


def test_a_save_that_is_interrupted_is_not_visible(llm, make, tmp_path, monkeypatch):
    cache = make()
    expected = answers(llm, cache)
    cache.save(tmp_path / "saved")
    later = llm.generate("abc", cache, max_new_tokens=5).cache
    before = content(tmp_path / "saved")

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, "replace", interrupt)
    monkeypatch.setattr(saving, "_save_blocks", interrupt)
    with pytest.raises(KeyboardInterrupt):
        later.save(tmp_path / "saved")
    assert content(tmp_path / "saved") == before, "the save has removed what it made"
    monkeypatch.undo()
    later.close()
    cache.close()
    again = llm.restore(tmp_path / "saved")
    assert answers(llm, again) == expected
    again.close()


def test_a_state_that_cannot_be_written_changes_nothing(llm, make, tmp_path, monkeypatch):
    cache = make()
    cache.save(tmp_path / "saved")
    before = content(tmp_path / "saved")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoSpace, match="No space"):
        cache.save(tmp_path / "saved")
    monkeypatch.undo()
    assert content(tmp_path / "saved") == before
    expected = answers(llm, cache)
    cache.close()
    again = llm.restore(tmp_path / "saved", read_only=True)
    assert answers(llm, again) == expected
    again.close()


@pytest.mark.parametrize("kind", ["memory", "elsewhere"])
def test_what_the_system_refuses_at_the_end_is_typed(llm, tmp_path, monkeypatch, kind):
    cache = llm.prefill(CONTEXT, method=METHOD, store=KINDS[kind](tmp_path))
    cache.save(tmp_path / "saved")

    def refuse(*args):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched, pytest.raises(WriteFailed, match="Input/output error"):
        patched.setattr(_files, "sync_directory", refuse)
        cache.save(tmp_path / "saved")
    cache.save(tmp_path / "saved")
    cache.close()


@pytest.mark.parametrize("offload", [False, True])
def test_a_value_that_its_store_has_left_behind_is_refused(llm, tmp_path, offload):
    slots = kvjax.Slots(offload=kvjax.HostStore()) if offload else None
    cache = llm.prefill(CONTEXT, method=METHOD, store=kvjax.FlashStore(directory=tmp_path), slots=slots)
    decode.step(cache.plan, llm.params, cache.state, jnp.asarray([5]))
    for use in (lambda: llm.generate("abc", cache), cache.fork, lambda: cache.save(tmp_path / "saved")):
        with pytest.raises(StaleCache, match="fork before decoding"):
            use()
    assert not (tmp_path / "saved").exists()
    cache.close()


def test_what_does_not_fit_is_refused(llm, make, tmp_path):
    cache = make()
    with pytest.raises(NothingSaved, match="no saved"):
        llm.restore(tmp_path / "saved", read_only=True)
    with pytest.raises(ReadFailed, match="File name too long"):
        llm.restore(tmp_path / ("x" * 300))
    with pytest.raises(NothingSaved, match="does not exist"):
        llm.restore(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()
    for nothing in (lambda: llm.restore(""), lambda: cache.save(""), lambda: kvjax.FlashStore(file=""),
                    lambda: llm.restore("a\0b"), lambda: cache.save("a\0b")):
        with pytest.raises(ConfigError, match="path"):
            nothing()
    cache.save(tmp_path / "saved")
    cache.close()
    other = kvjax.LLM(llm.config, jax.tree.map(lambda leaf: leaf + 1, llm.params), llm.tokenizer)
    with pytest.raises(FormatMismatch, match="model"):
        other.restore(tmp_path / "saved")
    with pytest.raises(FormatMismatch, match="method"):
        llm.restore(tmp_path / "saved", method=dataclasses.replace(METHOD, budget=25))
    if cache.branch is not None:
        with pytest.raises(ConfigError, match="slots=1"):
            llm.restore(tmp_path / "saved", slots=kvjax.Slots(count=1))
    else:
        offloaded = kvjax.Slots(count=99, offload=kvjax.HostStore())
        for ignored in ({"slots": kvjax.Slots(count=99)}, {"slots": offloaded}, {"threads": 2}):
            with pytest.raises(ConfigError, match="saved from memory"):
                llm.restore(tmp_path / "saved", **ignored)
    llm.restore(tmp_path / "saved", method=METHOD).close()


@dataclasses.dataclass(frozen=True)
class Mine(kvjax.Quest):
    """A method that no registry knows."""


def test_a_method_of_your_own_is_given_again(llm, tmp_path):
    mine = Mine(budget=24, sinks=2, window=4, page=4)
    cache = llm.prefill(CONTEXT, method=mine)
    cache.save(tmp_path)
    with pytest.raises(ConfigError, match="Mine"):
        llm.restore(tmp_path)
    same(llm.restore(tmp_path, method=mine).state, cache.state)


def test_a_directory_keeps_its_kind(llm, tmp_path):
    memory = llm.prefill(CONTEXT, method=METHOD)
    flash = llm.prefill(CONTEXT, method=METHOD, store=kvjax.FlashStore(directory=tmp_path))
    memory.save(tmp_path / "memory")
    flash.save(tmp_path / "flash")
    for cache, name in ((memory, "flash"), (flash, "memory")):
        with pytest.raises(ConfigError, match="choose another directory"):
            cache.save(tmp_path / name)
    flash.close()


def test_files_of_the_user_stay(llm, make, tmp_path):
    """Also those that are called much like ours."""
    mine, left_over = tmp_path / "saved" / "state-of-work.md", tmp_path / "saved" / f"state-{'0' * 12}"
    mine.write_text("mine")
    left_over.mkdir()
    make().save(tmp_path / "saved")
    assert mine.exists() and not left_over.exists()


@pytest.mark.parametrize("content", ['{"name": "another tool"}', "[]"])
def test_a_file_of_somebody_else_is_no_cache_and_stays(llm, tmp_path, content):
    (tmp_path / "cache.json").write_text(content)
    cache = llm.prefill(CONTEXT, method=METHOD)
    for act in (lambda: cache.save(tmp_path), lambda: llm.restore(tmp_path)):
        with pytest.raises(FormatMismatch, match=r"cache\.json holds something else"):
            act()
    assert (tmp_path / "cache.json").read_text() == content
    assert [file.name for file in tmp_path.iterdir()] == ["cache.json"]


def test_what_a_directory_holds_is_looked_at_with_the_lock_held(llm, tmp_path, monkeypatch):
    """Given somebody who saves a cache of the other kind just before: that one stays."""
    memory = llm.prefill(CONTEXT, method=METHOD)
    flash = llm.prefill(CONTEXT, method=METHOD, store=kvjax.FlashStore(file=tmp_path / "elsewhere.kv"))
    locked = place.locked

    @contextlib.contextmanager
    def late(directory):
        monkeypatch.setattr(place, "locked", locked)
        flash.save(directory)
        with locked(directory):
            yield

    monkeypatch.setattr(place, "locked", late)
    with pytest.raises(ConfigError, match="holds a cache in a store"):
        memory.save(tmp_path / "saved")
    flash.close()
    assert llm.restore(tmp_path / "saved").length == memory.length


def test_what_a_branch_saved_by_itself_is_no_cache(llm, tmp_path):
    cache = llm.prefill(CONTEXT, method=METHOD, store=kvjax.FlashStore(file=tmp_path / "blocks.kv"))
    cache.branch.save()
    cache.save(tmp_path)  # the newest; the one before names no state
    cache.branch.save()
    cache.close()
    with pytest.raises(FormatMismatch, match=r"blocks\.kv holds something else"):
        llm.restore(tmp_path)


def test_what_is_decoded_while_a_cache_is_saved_is_in_no_save(llm, tmp_path, monkeypatch):
    """Given a token that is committed after the state was written: StaleCache, and the save before it stays."""
    cache = llm.prefill(CONTEXT, method=METHOD, store=kvjax.FlashStore(file=tmp_path / "blocks.kv"))
    cache.save(tmp_path)
    written = state_file.save

    def slow(*args):
        checksum = written(*args)
        decode.step(cache.plan, llm.params, cache.state, np.zeros(1, np.int32))
        return checksum

    monkeypatch.setattr(state_file, "save", slow)
    with pytest.raises(StaleCache):
        cache.save(tmp_path)
    cache.close()
    assert llm.restore(tmp_path).length == cache.length


def test_a_store_file_that_was_never_saved_hides_nothing(llm, tmp_path):
    memory = llm.prefill(CONTEXT, method=METHOD)
    memory.save(tmp_path)
    llm.prefill(CONTEXT, method=METHOD, store=kvjax.FlashStore(file=tmp_path / "blocks.kv")).close()
    again = llm.restore(tmp_path)
    assert again.branch is None and answers(llm, again) == answers(llm, memory)
    memory.save(tmp_path)


@pytest.mark.parametrize("bad", [
    {"slots": kvjax.Slots(count=1)}, {"slots": kvjax.Slots(host=1)},
    {"chunk": 0},
], ids=["count", "host", "chunk"])
def test_a_prefill_that_is_refused_loses_no_saved_cache(llm, tmp_path, bad):
    method, store = METHODS["quest"], kvjax.FlashStore(file=tmp_path / "blocks.kv")
    cache = llm.prefill(CONTEXT, method=method, store=store)
    cache.save(tmp_path)
    expected = answers(llm, cache)
    cache.close()
    with pytest.raises(ConfigError):
        llm.prefill(CONTEXT, method=method, store=store, **bad)
    with contextlib.closing(llm.restore(tmp_path)) as again:
        assert answers(llm, again) == expected


def _on_flash(llm, directory):
    return contextlib.closing(llm.prefill(CONTEXT, method=METHOD, store=kvjax.FlashStore(file=directory / "blocks.kv")))


def test_a_reader_that_is_overtaken_reads_what_was_saved_last(llm, tmp_path, monkeypatch):
    """Two saves while it reads the first one's state, which is gone then."""
    load = state_file.load
    with _on_flash(llm, tmp_path) as cache:
        cache.save(tmp_path)

        def overtaken(*args):
            monkeypatch.undo()
            for question in ("zz", "yy"):
                llm.generate(question, cache, max_new_tokens=2).cache.save(tmp_path)
            return load(*args)

        monkeypatch.setattr(state_file, "load", overtaken)
        with contextlib.closing(llm.restore(tmp_path, read_only=True)) as reader:
            assert reader.length == [len(CONTEXT) + 3]


def test_a_method_of_which_every_layer_is_dense_is_saved_by_its_name(llm, tmp_path):
    method = dataclasses.replace(METHODS["quest"], dense_layers=2)
    llm.prefill(CONTEXT, method=method).save(tmp_path)
    assert llm.restore(tmp_path).plan.method == llm.restore(tmp_path, method=method).plan.method == method


@pytest.mark.parametrize(("settings", "words"), [
    ({"method": "quest"}, "method='quest'"), ({"slots": 5}, "slots=5"), ({"bogus": 1}, "bogus"),
])
def test_what_restores_nothing_is_refused_by_name(unchecked, llm, tmp_path, settings, words):
    with _on_flash(llm, tmp_path) as cache:
        cache.save(tmp_path)
    with pytest.raises(ConfigError, match=words):
        llm.restore(tmp_path, **settings)


def test_one_save_at_a_time(llm, make, tmp_path):
    cache = make()
    with place.locked(tmp_path / "saved"), pytest.raises(StoreLocked, match="saved to"):
        cache.save(tmp_path / "saved")
    cache.save(tmp_path / "saved")


def test_a_file_in_use_is_not_replaced(llm, tmp_path):
    first = llm.prefill(CONTEXT, method=METHOD, store=kvjax.FlashStore(file=tmp_path / "blocks.kv"))
    second = llm.prefill(CONTEXT, method=METHOD, store=kvjax.FlashStore(directory=tmp_path))
    first.save(tmp_path)
    with pytest.raises(StoreLocked):
        second.save(tmp_path)
    first.close()
    second.save(tmp_path)
    second.close()
    assert states(tmp_path) == 1 and (tmp_path / "blocks.kv").exists()


@pytest.mark.parametrize("place", ["file/below", "file"])
def test_places_that_are_no_directory(llm, tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(KvjaxError, match="file"):
        llm.prefill(CONTEXT, method=METHOD).save(tmp_path / place)
    assert os.listdir(tmp_path) == ["file"]


def test_a_method_made_from_a_file_is_restored_from_any_directory(llm, tmp_path, monkeypatch):
    """Given a path that was relative to where the cache was made."""
    here, there = tmp_path / "here", tmp_path / "there"
    for path in (here, there):
        path.mkdir()
    table = Delimiters.load(DELIMITERS)
    dataclasses.replace(table, fingerprint=llm.identity).save(here / "table.json")
    monkeypatch.chdir(here)
    method = dataclasses.replace(METHODS["dynsplit"], table="table.json")
    cache = llm.prefill("text of some length, with stops. And more", method=method, capacity=90)
    cache.save("saved")
    expected = llm.generate("abc", cache, max_new_tokens=5).tokens
    monkeypatch.chdir(there)
    for given in (None, dataclasses.replace(method, table=str(here / "table.json"))):
        again = llm.restore(here / "saved", method=given)
        assert llm.generate("abc", again, max_new_tokens=5).tokens == expected
