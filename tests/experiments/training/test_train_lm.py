"""What the reference models are trained on: nothing that is held out, and the same rows whoever draws them."""

import dataclasses
import pathlib
import re

import ml_collections
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from configs.train_lm import get_config
from experiments.common import REFERENCE
from experiments.training import lm_data, train_lm
from kvjax.errors import CheckpointError, ConfigError
from kvjax.eval.tasks import corpus, needles
from kvjax.models import checkpoint
from kvjax.models.transformer import Transformer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(REFERENCE / "tokenizer.json"))


@pytest.mark.parametrize(("changes", "error", "words"), [
    ({"tokenizer": "/nowhere.json"}, ConfigError, "tokenizer=/nowhere.json cannot be used"),
    ({"stages": ()}, ConfigError, "stages is empty"), ({"stages": ((128, 2),)}, ConfigError, r"stage \(128, 2\)"),
    ({"stages": (((128, 0), 2),)}, ConfigError, "rows="), ({"stages": (((9999,), 2),)}, ConfigError, "a row of 9999"),
    ({"drawers": 0}, ConfigError, "drawers=0"), ({"dtype": "int7"}, ConfigError, "int7"),
    ({"start": "/nowhere"}, CheckpointError, "/nowhere"),
])
def test_bad_settings_are_found_before_anything_is_written(tmp_path, changes, error, words):
    config = get_config("smoke")
    config.update(changes)
    with pytest.raises(error, match=words):
        train_lm.run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_training_goes_on_from_tied_embeddings_alone(tmp_path, tokenizer):
    config = get_config("smoke")
    wanted = train_lm.model_config(config, tokenizer)
    model = Transformer(dataclasses.replace(wanted, tie_embeddings=False))
    config.start = ""
    checkpoint.save_params(train_lm.first_params(config, model), model.config, tmp_path)
    config.start = str(tmp_path)
    with pytest.warns(UserWarning, match="lm_head"), pytest.raises(ConfigError, match="unembedding of its own"):
        train_lm.first_params(config, Transformer(wanted))


def test_a_tokenizer_marks_beginning_and_end(tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"<|bos|>": 0, "a": 1})).save(str(path))
    with pytest.raises(ConfigError, match=r"has no token <\|eos\|>"):
        train_lm.read_tokenizer(str(path))


@pytest.mark.parametrize("preset", ["cpu", "long", "smoke"])
def test_presets_find_their_files_from_any_directory(tmp_path, monkeypatch, preset):
    monkeypatch.chdir(tmp_path)
    config = get_config(preset)
    train_lm.check(config)
    assert train_lm.read_tokenizer(config.tokenizer).get_vocab_size() > 0
    assert not config.start or pathlib.Path(config.start).is_dir()


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
