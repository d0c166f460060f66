"""Streams: pieces of text that are whole characters, and together what `generate` says."""

import gc

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from tiny import make_params
from tokenizers import Tokenizer

import kvjax
from kvjax.errors import ConfigError, PromptError
from kvjax.inference.answers import Answer
from kvjax.inference.stops import Stops
from kvjax.inference.stream import TextSoFar
from kvjax.models.config import ModelConfig
from kvjax.models.text_codec import PART_OF_CHARACTER
from kvjax.models.tokenizer import TextTokenizer
from tests.models.test_text_codec import REFERENCE, TOKENIZERS

METHOD = kvjax.Quest(budget=24, sinks=2, window=4, page=4)
CONTEXT = "Read the block, then write it. " * 3


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A small random model with the reference model's tokenizer, whose answers are bytes of all kinds."""
    size = Tokenizer.from_file(str(REFERENCE / "tokenizer.json")).get_vocab_size()
    config = ModelConfig(
        family="llama", vocab_size=size, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, max_position=512, tie_embeddings=True,
    )
    return kvjax.LLM(config, make_params(config, seed=3, sharper=4), TextTokenizer.from_directory(REFERENCE))


@pytest.fixture(scope="module")
def cache(llm):
    return llm.prefill(CONTEXT, method=METHOD, capacity=512)


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    TOKENIZERS[request.param]().save(str(path / "tokenizer.json"))
    return TextTokenizer.from_directory(path)


def pieces_of(tokenizer, before, tokens, marks=()):
    """The pieces of an answer that is drawn token by token, and the text of the whole."""
    stops = Stops(tokenizer, marks)
    text, answer, pieces = TextSoFar(stops, before), Answer(), []
    for token in tokens:
        answer.tokens.append(token)
        pieces.append(text.more(answer))
        if stops.complete(answer.tokens):
            break
    whole = stops.cut(answer.tokens, before)[1]
    return [*pieces, text.rest(whole)], whole


@settings(max_examples=60)
@given(st.data())
def test_pieces_are_the_text_whatever_is_drawn(tokenizer, data):
    ids = st.lists(st.integers(0, tokenizer.tokenizer.get_vocab_size() - 1), max_size=12)
    before, tokens = data.draw(ids), data.draw(ids)
    pieces, whole = pieces_of(tokenizer, before, tokens)
    assert "".join(pieces) == whole
    assert not any(piece.endswith(PART_OF_CHARACTER) for piece in pieces[:-1])


@settings(max_examples=40)
@given(st.data())
def test_a_token_that_completes_a_mark_is_known_to_be_able_to(tokenizer, data):
    """Given marks out of the very text, parts of characters and special tokens included."""
    size = tokenizer.tokenizer.get_vocab_size()
    tokens = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=12))
    text = tokenizer.codec.spell(tokens) or "a"
    starts = data.draw(st.lists(st.integers(0, len(text) - 1), min_size=1, max_size=3))
    stops = Stops(tokenizer, tuple(text[start : start + data.draw(st.integers(1, 4))] for start in starts))
    known = set(stops.completing(size))
    for n, token in enumerate(tokens, 1):
        if token in stops.ids:
            return
        if stops.complete(tokens[:n]):
            assert token in known
            return


def test_most_tokens_cannot_complete_a_mark():
    tokenizer = TextTokenizer.from_directory(REFERENCE)
    size, special = tokenizer.tokenizer.get_vocab_size(), next(iter(tokenizer.special_ids))
    for marks in (("\n\n",), (" key", "zzz"), (f"the{special}",)):
        assert 0 < len(Stops(tokenizer, marks).completing(size)) < size / 5
    assert Stops(tokenizer, (special,)).completing(size) == [] == Stops(None, ()).completing(size)


@pytest.mark.parametrize("text", ["Hello 日本語 the key", "é😀 ok", "a</s>b", "the</s>\nmore"])
@pytest.mark.parametrize("mark", ["</s>\n", "the</s>", "</s>b"])
def test_text_that_a_stop_may_cut_off_is_held_back(text, mark):
    tokenizer = TextTokenizer.from_directory(REFERENCE)
    special = next(iter(tokenizer.special_ids))
    text, mark = text.replace("</s>", special), mark.replace("</s>", special)
    pieces, whole = pieces_of(tokenizer, [], tokenizer.encode_continuation(text), (mark,))
    assert "".join(pieces) == whole


@pytest.mark.parametrize("how", [kvjax.Sampling(), kvjax.Sampling(temperature=1.5)])
def test_a_stream_says_what_generate_says(llm, cache, how):
    settings = {"max_new_tokens": 40, "sampling": how, "seed": 5}
    expected = llm.generate("Then", cache, **settings)
    pieces = list(llm.stream("Then", cache, **settings))
    assert "".join(map(str, pieces)) == expected.text and len(pieces) > 10
    assert [piece.result is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    last = pieces[-1].result
    assert (last.text, last.tokens, last.ended) == (expected.text, expected.tokens, expected.ended)
    np.testing.assert_array_equal(last.cache.logits, expected.cache.logits)
    assert last.cache.pending == expected.cache.pending


def test_a_batch_has_a_piece_of_each_sequence(llm):
    cache = llm.prefill([CONTEXT, CONTEXT[:50]], method=METHOD, capacity=512)
    expected = llm.generate(["Then", "it"], cache, max_new_tokens=12, sampling=kvjax.Sampling(temperature=1.0))
    pieces = list(llm.stream(["Then", "it"], cache, max_new_tokens=12, sampling=kvjax.Sampling(temperature=1.0)))
    assert ["".join(column) for column in zip(*(piece.text for piece in pieces), strict=True)] == expected.text
    assert pieces[-1].result.ended == expected.ended == ["length", "length"]


def test_why_an_answer_ended(llm, cache):
    first, second, *_ = llm.generate("Then", cache, max_new_tokens=4).tokens[0]
    by_eos = llm.generate("Then", cache, eos=second, max_new_tokens=4)
    assert (by_eos.ended, by_eos.tokens) == ("eos", [[first]])
    assert llm.generate("Then", cache, eos=(), max_new_tokens=4).ended == "length"
    text = llm.tokenizer.decode_continuation([first])
    assert llm.generate("Then", cache, stop=text, max_new_tokens=4).ended == "stop"
    assert llm.generate("Then", cache, max_new_tokens=0).ended == "length"


@pytest.mark.parametrize("eos", [-1, 10**6, [1, -1]])
def test_what_is_no_token_is_refused_as_eos(llm, cache, eos):
    with pytest.raises(ConfigError, match="eos="):
        llm.generate("Then", cache, eos=eos)


def test_arguments_are_checked_before_the_first_piece(llm, cache):
    with pytest.raises(PromptError):
        llm.stream("Then", cache, max_new_tokens=10**6)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        kvjax.LLM(llm.config, llm.params).stream([1], cache)


def test_a_stream_that_is_left_early_leaves_nothing(llm, tmp_path):
    """By its context, by `close`, and by being forgotten."""
    with llm.prefill(CONTEXT, method=METHOD, store=kvjax.FlashStore(directory=tmp_path), capacity=512) as cache:
        expected = llm.generate("Then", cache, max_new_tokens=3)
        expected.cache.close()
        before = len(cache.branch.family)
        with llm.stream("Then", cache) as stream:
            next(stream)
            assert len(cache.branch.family) == before + 1
        assert stream.result is None and list(stream) == []
        other = llm.stream("Then", cache)
        next(other)
        other.close()
        next(llm.stream("Then", cache))
        gc.collect()
        assert len([branch for branch in cache.branch.family if not branch._closed]) == 1
        again = llm.generate("Then", cache, max_new_tokens=3)
        assert again.tokens == expected.tokens
        again.cache.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [64, 65, 200])
def test_a_long_question_is_read_as_extend_reads_it(llm, cache, size):
    question = [5 + i * 7 % 1000 for i in range(size)]
    asked = llm.generate(question, cache, max_new_tokens=6)
    if size == 64:
        assert asked.usage.steps == 64 + 5
        return
    extended = llm.extend(cache, question)
    expected = llm.generate([], extended, max_new_tokens=6)
    assert asked.tokens == expected.tokens and asked.usage.steps == -(-size // 64) + 5
    np.testing.assert_array_equal(asked.cache.logits, expected.cache.logits)
    assert asked.usage.tokens == size + 5


def test_a_long_question_is_read_token_by_token_where_chunks_are_not_possible(llm, cache):
    question, seen = list(range(5, 75)), []
    llm.generate(question, cache, max_new_tokens=1, observer=lambda step, tokens: seen.append(int(tokens[0])))
    assert seen == question
    observing = llm.prefill(CONTEXT, method=kvjax.H2O(budget=24, sinks=2, window=4, page=4), capacity=512)
    assert llm.generate(question, observing, max_new_tokens=1).usage.steps == 70
