"""Windows of a long generation: full attention agrees with itself, a poor cache is found out."""

import pathlib

import numpy as np
import pytest

import kvjax
from kvjax.eval.tasks import drift


def test_full_attention_follows_itself_and_not_a_window():
    llm = kvjax.load(pathlib.Path(kvjax.__file__).parent / "reference")
    contexts = [llm.encode(text * 12, start=True) for text in ("def f(a):\n    return a\n\n", "import os\nx = 1\n")]
    own = drift.windows(llm, contexts, kvjax.Full(), 20, 8)
    assert [(one.start, one.stop) for one in own] == [(0, 8), (8, 16), (16, 24)]
    assert all(one.agreement == 1.0 for one in own)
    narrow = drift.windows(llm, contexts, kvjax.StreamingLLM(budget=6, sinks=1), 20, 8)
    assert np.mean([one.agreement for one in narrow]) < 1
    assert sum(one.nll for one in narrow) > sum(one.nll for one in own)


@pytest.mark.parametrize(("tokens", "where"), [
    ([1, 2, 3, 4, 1, 2, 3, 4, 9], [7]), ([5] * 7, [4, 5, 6]), ([1, 2, 3], []), ([], []),
])
def test_a_repeat_is_four_tokens_that_were_there_before(tokens, where):
    assert np.flatnonzero(drift.repeats(tokens)).tolist() == where
