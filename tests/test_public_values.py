"""Public values say what they are in one short line, and errors of names name the likely one."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from harness import either

import kvjax
from kvjax.errors import CheckpointError, ConfigError
from kvjax.inference.programs import keep_programs

REFERENCE = pathlib.Path(kvjax.__file__).parent / "reference"
CONTEXT = "The pass key is 29318. " * 12


@pytest.fixture(scope="module")
def llm():
    return kvjax.load(REFERENCE)


def test_every_value_is_one_short_line(llm, tmp_path):
    store = kvjax.FlashStore(file=tmp_path / "blocks.kv")
    with llm.prefill(CONTEXT, method=kvjax.Quest(budget=64, window=16), store=store) as cache:
        result = llm.generate("The", cache, max_new_tokens=40)
        scores = llm.score("The pass", cache)
        layer = kvjax.init_cache(kvjax.Quest(), batch=1, kv_heads=2, group=2, head_dim=8, capacity=1024)
        chat = kvjax.Chat(llm, llm.tokenizer, {}, {})
        values = (llm, store, cache, result, result.usage, scores, llm.read(CONTEXT), layer, kvjax.HostStore(), chat,
                  kvjax.Sampling(), kvjax.Slots(), kvjax.Slots(offload=store))
        for value in values:
            shown = repr(value)
            assert "\n" not in shown and len(shown) < 330, shown
            assert "object at 0x" not in shown
        for said in ("Quest(budget=64)", "tokens of", "MiB", str(tmp_path)):
            assert said in repr(cache)
        assert "ended='length'" in repr(result) and "tokens" in repr(result.usage)
        result.cache.close()
        scores.cache.close()


@pytest.mark.parametrize(("attempt", "says"), [
    (lambda: kvjax.METHODS["dynakw"], "did you mean dynakv?"), (lambda: kvjax.METHODS["Quest"], "did you mean quest?"),
    (lambda: kvjax.METHODS["zzz"], "use one of full, oracle"), (lambda: kvjax.Quest(budgett=3), "did you mean budget?"),
    (lambda: kvjax.DynaKV(clusters=3), "did you mean cluster?"), (lambda: kvjax.Quest(zzz=3), "it has budget, sinks"),
    (lambda: dataclasses.replace(kvjax.Quest(), pages=3), "did you mean page?"),
])
def test_a_wrong_name_is_told_the_right_one(attempt, says):
    with pytest.raises(ConfigError) as caught:
        attempt()
    assert says in str(caught.value)
    assert "dynakw" not in kvjax.METHODS and kvjax.METHODS.get("dynakw") is None


def test_a_name_on_a_hub_is_told_how_to_get_the_files():
    with pytest.raises(CheckpointError, match=r"hf download Qwen/Qwen3-0\.6B --local-dir DIR"):
        kvjax.load("Qwen/Qwen3-0.6B")
    with pytest.raises(CheckpointError, match="not a directory; download the model"):
        kvjax.load("/nowhere/at/all")


def test_the_home_directory_is_known(llm, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    kvjax.save(llm, "~/model")
    with kvjax.load("~/model").prefill(CONTEXT, store=kvjax.FlashStore(file="~/blocks.kv")) as cache:
        cache.save("~/saved")
    again = llm.restore("~/saved")
    again.close()
    assert kvjax.FlashStore(directory="~/kv").path == str(tmp_path / "kv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks.kv", "model", "saved"]


PROGRAM = """
import sys, jax, kvjax
kvjax.keep_programs()
seen = []
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event))
llm = kvjax.load(sys.argv[1])
with llm.prefill("The pass key is 29318.", method=kvjax.Quest(budget=64, window=16),
                 store=kvjax.FlashStore(directory=sys.argv[2])) as cache:
    for driver in ("staged", "fused"):
        text = llm.generate("The", cache, max_new_tokens=2, driver=driver).text
print(seen.count("/jax/compilation_cache/cache_misses"), seen.count("/jax/compilation_cache/cache_hits"), repr(text))
"""


def test_another_process_compiles_nothing(tmp_path):
    """Not even the programs that call a store, where the C part is compiled."""
    pytest.importorskip("kvjax.store.native._compiled")
    hidden = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | {"HOME": str(tmp_path)}
    first, second = (
        subprocess.run([sys.executable, "-c", PROGRAM, str(REFERENCE), str(tmp_path)], env=environment, check=True,
                       capture_output=True, text=True).stdout.split(maxsplit=2)
        for _ in range(2)
    )
    assert int(first[0]) > 20 and int(second[0]) == 0 and second[1] >= first[0] and first[2] == second[2]
    assert (tmp_path / ".cache" / "kvjax" / "programs").is_dir()


def test_a_directory_for_programs_that_was_chosen_stays(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        keep_programs()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        keep_programs(tmp_path / "other")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "other")
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


def test_contexts_of_many_lengths_need_few_capacities(llm):
    def capacity(length):
        return llm.prefill([5] * length, method=kvjax.Quest(budget=64, window=16)).plan.capacity

    lengths = (10, 200, 255, 257, 600, 900, 1000, 1024, 1200, 1400, 1500)
    assert all(capacity(length) - length >= 1024 for length in lengths)
    assert len({capacity(length) for length in lengths}) <= 5


@pytest.mark.parametrize("method", either(
    kvjax.StreamingLLM(budget=48), kvjax.H2O(budget=64, window=16), kvjax.SnapKV(budget=64, window=16),
    slow=(kvjax.ChunkKV(budget=64, window=16),),
), ids=lambda method: method.name)
def test_a_cache_that_does_not_grow_needs_no_capacity(llm, method):
    """It decodes past any size, in the memory that it had, and what a capacity would give."""
    with llm.prefill(CONTEXT, method=method) as endless, llm.prefill(CONTEXT, method=method, capacity=600) as bounded:
        text = [7 + i * 11 % 900 for i in range(200)]
        found, expected = (llm.score(text, cache) for cache in (endless, bounded))
        assert jnp.allclose(found.logprobs[0], expected.logprobs[0], atol=1e-5)
        assert found.cache.resident_bytes == endless.resident_bytes <= bounded.resident_bytes
        assert found.cache.length[0] > 64 and "of" not in repr(found.cache).split("tokens")[1].split(",")[0]


@pytest.mark.parametrize("method", [kvjax.StreamingLLM(budget=48), kvjax.H2O(budget=64, window=16)])
def test_a_cache_without_capacity_is_saved_and_restored(llm, method, tmp_path):
    with llm.prefill([CONTEXT, CONTEXT[:80]], method=method) as cache:
        cache.save(tmp_path)
        expected = llm.generate(["The", "a"], cache, max_new_tokens=5).tokens
    with llm.restore(tmp_path) as again:
        assert llm.generate(["The", "a"], again, max_new_tokens=5).tokens == expected
    int8 = llm.prefill(CONTEXT, method=method, dtype="int8")
    assert llm.generate("The", int8, max_new_tokens=3).usage.steps > 0
    dense = llm.prefill(CONTEXT, method=dataclasses.replace(method, dense_layers=1))
    assert dense.plan.capacity < 10**5, "a layer that keeps everything grows"
