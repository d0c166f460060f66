"""The method that kvjax/methods/README.md tells how to write is one."""

import pathlib
import re

import numpy as np
import pytest
from harness import CAPACITY, Sim, Stream, check_every_token_has_one_place, dense_attention

import kvjax.methods
from kvjax.store.flash.store import FlashStore

README = (pathlib.Path(kvjax.methods.__file__).parent / "README.md").read_text()


@pytest.fixture(scope="module")
def means():
    names: dict = {"__name__": "tutorial"}
    exec(re.search(r"```python\n(.*?)```", README, re.S).group(1), names)
    return names["Means"]


def test_it_attends_everything_where_the_budget_allows(means):
    stream = Stream.draw(0)
    sim = Sim(means(budget=CAPACITY, sinks=2, window=4, page=4), stream, [40, 3])
    for _ in range(12):
        at = sim.at.copy()
        out, _ = sim.step()
        for b in range(2):
            np.testing.assert_allclose(out[b], dense_attention(stream, b, at[b]), atol=2e-5, rtol=0)
    check_every_token_has_one_place(sim)


def test_flash_equals_memory(means, tmp_path):
    method, stream = means(budget=24, sinks=2, window=4, page=4), Stream.draw(1)
    memory, flash = Sim(method, stream, [40, 3]), Sim(method, stream, [40, 3], FlashStore(directory=tmp_path))
    np.testing.assert_array_equal(memory.run(8), flash.run(8))
    flash.branch.close()


def test_it_keeps_the_contract(means):
    kvjax.check_method(means(budget=96, page=8))


def test_it_is_short():
    assert len(README.splitlines()) < 60
    names = (pathlib.Path(kvjax.methods.__file__).parents[2] / "docs" / "results" / "methods.md").read_text()
    assert all(f"`{name}`" in names for name in kvjax.methods.METHODS)
