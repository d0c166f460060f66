"""What evicting methods keep, against kvpress on the reference model and another text; needs the extra `oracles`.

The golden files of tests/methods/test_pruning_goldens.py come from the same code.
"""

import pathlib

import numpy as np
import pruning
import pytest

import kvjax

pytestmark = pytest.mark.oracles
REFERENCE = str(pathlib.Path(kvjax.__file__).parent / "reference")


@pytest.fixture(scope="module")
def theirs():
    from scripts import make_method_goldens

    text = pathlib.Path(kvjax.llm.__file__).read_text()
    return make_method_goldens.pruned(REFERENCE, text)


@pytest.mark.parametrize("name", pruning.NAMES)
def test_the_same_tokens_are_kept_and_the_next_logits_are_theirs(theirs, name):
    pruning.compare(kvjax.load(REFERENCE), name, theirs)


def test_the_tokens_are_ours(theirs):
    text = pathlib.Path(kvjax.llm.__file__).read_text()
    tokens = kvjax.load(REFERENCE).encode(text, start=True)
    np.testing.assert_array_equal(theirs["tokens"], tokens[: len(theirs["tokens"])])
