"""What a cache says that it takes, against what its arrays and files take."""

import os

import pytest
from harness import METHODS
from tiny import make_params

import kvjax
from tests.test_llm import CONFIG  # the small random model

SLOTS = {"flash": kvjax.Slots(), "host": kvjax.Slots(), "memory": None, "passing": kvjax.Slots(keep=False)}


@pytest.fixture(scope="module")
def llm():
    return kvjax.LLM(CONFIG, make_params(CONFIG, seed=3, sharper=4))


@pytest.mark.parametrize("where", SLOTS)
@pytest.mark.parametrize("name", ["full", "quest", "dynakv", "kvswap", "icecache", "streaming_llm"])
def test_parts_add_up(llm, name, where, tmp_path):
    store = {"memory": None, "host": kvjax.HostStore()}.get(where, kvjax.FlashStore(directory=tmp_path))
    tokens = [1 + i % 30 for i in range(150)]
    with llm.prefill(tokens, method=METHODS[name], store=store, slots=SLOTS[where], capacity=256) as cache:
        cache.flush()
        memory = cache.memory()
        assert memory.at("device") == cache.resident_bytes
        stored = sum(entry.stat().st_size for entry in os.scandir(tmp_path))
        geometry = None if store is None else cache.branch.geometry
        blocks = geometry.total_blocks * geometry.block_bytes if where == "host" else 0
        assert memory.at("host") == cache.store_bytes + blocks
        assert memory.at("flash") == pytest.approx(stored, abs=1 << 20) and (memory.at("flash") > 0) == (stored > 0)
        assert memory.bytes["tail", "device"] > 0
        assert ("blocks", "device") in memory.bytes if where == "memory" else ("slots", "device") in memory.bytes
        table = str(memory).splitlines()
        assert table[0].split() == ["MiB", "device", "host", "flash"] and table[-1].startswith("total")
        assert len({len(line) for line in table}) == 1


def test_offloaded_layers_are_on_flash(llm, tmp_path):
    slots = kvjax.Slots(offload=kvjax.FlashStore(directory=tmp_path))
    tokens = [1 + i % 30 for i in range(150)]
    with llm.prefill(tokens, method=METHODS["quest"], slots=slots, capacity=256) as cache:
        memory = cache.memory()
        assert memory.bytes["layers", "flash"] > 0 and memory.at("device") == cache.resident_bytes
