"""Which tokens are delimiters, and the file of their weights."""

import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

import kvjax
from kvjax.errors import ConfigError, WriteFailed
from kvjax.methods.shared.delimiter_texts import delimiter_texts, ends_sentence, is_delimiter
from kvjax.methods.shared.delimiters import DelimiterCounts, Delimiters

TEXTS = {3: ".", 5: ",", 9: "\n", 11: ");"}


@pytest.mark.parametrize("text", [".", " ,", "\n\n    ", "):", "。", "…", "” ", "\t\r\n"])
def test_punctuation_and_line_breaks_are_delimiters(text):
    assert is_delimiter(text)


@pytest.mark.parametrize("text", ["", "  ", "\t", "a.", "1,", "=", "\ufffd", "\x1c", ".x"])
def test_other_texts_are_none(text):
    assert not is_delimiter(text)


def test_sentences_end_at_their_marks_only():
    assert all(map(ends_sentence, [".", '."', " ?", "。", "…"])) and not any(map(ends_sentence, [",", "\n", ":"]))


def test_ids_come_from_the_tokenizer_and_special_tokens_are_none():
    vocab = {"▁the": 0, "▁": 1, ".": 2, "▁!": 3, "<0x0A>": 4, "x": 5}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="x"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    tokenizer.add_special_tokens(["---"])
    found = delimiter_texts(tokenizer)
    assert set(found) == {2, 3, 4} and found[4] == "\n"


def test_ids_of_a_byte_level_vocabulary_with_gaps():
    vocab = {"Ġthe": 0, "Ċ": 4, "!": 7, "ĠĠ": 8, ").": 40}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert delimiter_texts(tokenizer) == {4: "\n", 7: "!", 40: ")."}


def tallied(seed=0):
    tally, rng = DelimiterCounts(16), np.random.default_rng(seed)
    tokens = rng.choice([1, 3, 5, 9], size=400)
    tally.add(tokens, np.where(tokens == 3, 0.5, 0.1) + 0.01 * rng.normal(size=400))
    return tally


def test_a_table_has_the_mean_scores_and_says_what_it_has_not_seen():
    tally = tallied()
    table = tally.table("model", TEXTS)
    np.testing.assert_allclose(table.scores[:3], tally.mean()[[3, 5, 9]])
    seen = tally.count[[3, 5, 9]]
    assert table.counts == (*seen, 0) and np.isclose(table.scores[3], (tally.total[[3, 5, 9]]).sum() / seen.sum())
    weights = table.weights()
    assert weights[3] == 1.0 and weights.max() == 1.0 and set(np.flatnonzero(weights >= 0)) == set(TEXTS)
    assert set(np.flatnonzero(table.sentence_weights() >= 0)) == {3}
    assert (tally.standard_error()[[3, 5, 9]] < 0.002).all() and np.isnan(tally.standard_error()[11])


def test_a_tally_leaves_out_the_tokens_without_a_score():
    tally = DelimiterCounts(4)
    tally.add(np.array([1, 1, 2]), np.array([0.5, 0.25]))
    np.testing.assert_array_equal(tally.mean()[[1, 2]], [0.375, np.nan])


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8, unique=True))
def test_reversing_turns_the_order_around_and_keeps_the_scores(scores):
    tokens = tuple(range(len(scores)))
    table = Delimiters("model", 16, tokens, tuple("." * len(scores)), tuple(scores), (9,) * len(scores))
    back = table.reversed()
    assert sorted(back.scores) == sorted(table.scores) and back.reversed() == table
    np.testing.assert_array_equal(np.argsort(back.scores), np.argsort(scores)[::-1])


def test_a_file_gives_the_table_back(tmp_path):
    table = tallied().table("model", TEXTS)
    table.save(tmp_path / "table.json")
    assert Delimiters.load(tmp_path / "table.json") == table


def test_a_table_that_cannot_be_written_is_a_typed_error(tmp_path):
    with pytest.raises(WriteFailed, match="another path"):
        tallied().table("model", TEXTS).save(tmp_path / "nowhere" / "table.json")


@pytest.mark.parametrize("content", [
    None, "{}", "no json", '{"fingerprint": "x", "vocab_size": 2, "delimiters": 1}',
    '{"fingerprint": "x", "vocab_size": 2, "delimiters": [[2, ".", 0.5, 9]]}',
    '{"fingerprint": "x", "vocab_size": 2, "delimiters": [[1, ".", null, 9]]}',
])
def test_a_file_that_is_no_table_is_refused(tmp_path, content):
    path = tmp_path / "table.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"table\.json"):
        Delimiters.load(path)


def test_texts_without_delimiters_are_refused():
    with pytest.raises(ConfigError, match="no delimiter"):
        DelimiterCounts(16).table("model", TEXTS)


@pytest.mark.parametrize("name", ["reference", "reference_8k"])
def test_the_shipped_table_is_the_shipped_models(name):
    reference = pathlib.Path(kvjax.__file__).parent / name
    Delimiters.load(reference / "delimiters.json").check_model(kvjax.load(reference).identity)
