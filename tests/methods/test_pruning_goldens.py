"""What evicting methods keep, and their next logits, as kvpress 0.5.5 gave them (`scripts/make_method_goldens.py`)."""

import pathlib

import numpy as np
import pruning
import pytest

import kvjax


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(pathlib.Path(__file__).parents[1] / "goldens" / "pruned.npz"))


@pytest.fixture(scope="module")
def llm():
    return kvjax.load(pathlib.Path(kvjax.__file__).parent / "reference")


@pytest.mark.parametrize("name", pruning.NAMES)
def test_the_same_tokens_are_kept_and_the_next_logits_are_theirs(golden, llm, name):
    pruning.compare(llm, name, golden)


@pytest.mark.parametrize("name", pruning.NAMES)
def test_dropping_tokens_shows_in_the_logits(golden, name):
    """The comparison could have failed."""
    assert np.abs(golden[f"{name}_logits"] - golden[f"{name}_whole"]).max() > 0.05
