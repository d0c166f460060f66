"""What the reference models are trained on: nothing that is held out, and the same rows whoever draws them."""

import re

import ml_collections
import numpy as np
import pytest
from tokenizers import Tokenizer

from experiments import lm_data, train_lm
from experiments.common import REFERENCE
from kvjax.tasks import corpus, needles


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(REFERENCE / "tokenizer.json"))


@pytest.fixture(scope="module")
def stream(tokenizer):
    text = "\n".join(corpus.stdlib_documents(held_out=True))[:40_000]
    return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)


def test_made_words_are_many_and_none_is_held_out():
    rng, held_out = np.random.default_rng(0), set(corpus.key_words(held_out=True))
    words = {word for _ in range(100) for word in needles.made_words(rng, 30)}
    assert len(words) > 2_500 and not words & held_out
    assert all(re.fullmatch("[a-z]{4,9}", word) for word in words)


def test_made_needles_have_one_number_and_it_is_not_held_out(tokenizer, stream):
    rng = np.random.default_rng(0)
    for _ in range(200):
        facts = needles.made_needles(rng, tokenizer, stream, count=3)
        assert len({fact.cue for fact in facts}) == 3
        for fact in facts:
            assert re.findall(r"\d+", fact.sentence) == [fact.value]
            assert not corpus.is_held_out(fact.value, 0.1)
            assert not any(fact.cue.startswith(template.split("{")[0]) for template in needles.HELD_OUT_TEMPLATES)


def test_processes_draw_what_one_would(tokenizer, stream):
    mixture = lm_data.Mixture(recall=0.2, needles=0.5, passkey=0.2, made_needles=0.5)
    rows = lm_data.Rows(tokenizer, stream, mixture, max_position=512)
    config = ml_collections.ConfigDict({"seed": 3, "drawers": 2, "batch_tokens": 512})
    plan = [128, 256, 128, 64, 256]
    found = list(train_lm.batches(rows, config, plan, start=2))
    assert [(step, length) for step, length, _ in found] == [(2, 128), (3, 64), (4, 256)]
    for step, length, batch in found:
        expected = rows.batch((3, step), 512 // length, length)
        for name, array in batch.items():
            np.testing.assert_array_equal(array, expected[name])
