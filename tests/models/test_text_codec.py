"""Texts in pieces: what continues a text has the ids and the text that it would have in the whole."""

import json
import pathlib
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

import kvjax
from kvjax.errors import CheckpointError, PromptError
from kvjax.models.text_codec import TextCodec, tokenizer_errors

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens" / "tokenizers"
REFERENCE = pathlib.Path(kvjax.__file__).parent / "reference"
TEXTS = (
    "Hello there, the pass key is 29318.\n", "  two  spaces\n\n\tand tabs ", "é😀 ok 日本語",
    "</s>\nHello</s> there</s>", "<s>[INST] the key? [/INST] the the</s><s>", "x", " ",
)


def llama(**changes):
    """The golden Llama-2 tokenizer with other parts."""
    layout = json.loads((GOLDENS / "llama2.json").read_text()) | changes
    return Tokenizer.from_str(json.dumps(layout))


def metaspace(scheme, split=True):
    """Llama-2's vocabulary as newer conversions have it."""
    made = llama(normalizer=None)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    made.decoder = decoders.Sequence([
        decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme, split=split),
    ])
    return made


def byte_level(prefix):
    made = Tokenizer.from_file(str(GOLDENS / "byte_level.json"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return made


def unigram():
    letters = "abcdefghiklnopqrstuvxy,.?12389[]/"
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁the", "the", "▁t", *letters, "▁key", "ss", "ll"]
    made = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, False))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="always", split=False)])
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


TOKENIZERS = {
    "reference": lambda: Tokenizer.from_file(str(REFERENCE / "tokenizer.json")),
    "byte_level": lambda: byte_level(False), "byte_level_prefix": lambda: byte_level(True), "llama2": llama,
    "always": lambda: metaspace("always"), "first": lambda: metaspace("first"), "never": lambda: metaspace("never"),
    "first_in_one": lambda: metaspace("first", split=False), "unigram": unigram,
}
PREFIXING = ("byte_level_prefix", "llama2", "always", "first", "first_in_one", "unigram")


@pytest.fixture(scope="module", params=TOKENIZERS)
def codec(request):
    return TextCodec(TOKENIZERS[request.param](), "DIR")


def check_pieces(codec, text):
    """At every place where the tokenizer cuts: both within the text, and where that ends there. Returns how many.

    A place within a word of the pre-tokenizer is none: where the word ends may hang on what comes after it.
    """
    whole, count = codec.tokenizer.encode(text, add_special_tokens=False), 0
    added = codec.tokenizer.get_added_tokens_decoder()
    has_words = len(set(codec.tokenizer.encode("a a", add_special_tokens=False).word_ids)) > 1
    for k, (_, cut) in enumerate(whole.offsets[:-1], 1):
        left = codec.encode(text[:cut])
        apart = not has_words or whole.word_ids[k - 1] != whole.word_ids[k]
        if apart and cut == whole.offsets[k][0] and left == whole.ids[:k]:
            count += 1
            assert left + codec.encode_continuation(text[cut:], left) == whole.ids, (text, cut)
            if left[-1] not in added:
                assert left + codec.encode_continuation(text[cut:]) == whole.ids, (text, cut)
    return count


@pytest.mark.parametrize("text", TEXTS)
def test_ids_of_pieces_are_those_of_the_whole(codec, text):
    assert check_pieces(codec, text) >= len(text.split()) - 1


PIECES = (" ", "the", "key", "a", "t", "\n", "é", "😀", ".", "12", "</s>", "<s>")


@given(text=st.lists(st.sampled_from(PIECES)).map("".join))
@settings(max_examples=60, deadline=None)
def test_ids_of_pieces_of_any_text(codec, text):
    check_pieces(codec, text)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_pieces_are_that_of_the_whole(codec, text):
    """Wherever ids are cut, within a character, too, whose text comes with what completes it."""
    ids = codec.encode_continuation(text)
    whole = rest = codec.decode_continuation(ids)
    for cut in range(len(ids) + 1):
        shown, last = codec.decode_continuation(ids[:cut]), rest
        rest = codec.decode_continuation(ids[cut:], ids[:cut])
        assert last.endswith(rest)
        assert shown + rest == whole or shown.endswith("\N{REPLACEMENT CHARACTER}")
    assert rest == ""


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", [" the key", "the key", "  the", "\nthe"])
def test_a_continuation_keeps_its_spaces(name, text):
    codec = TextCodec(TOKENIZERS[name](), "DIR")
    if name != "unigram" or "\n" not in text:  # which it does not know
        assert codec.decode_continuation(codec.encode_continuation(text)) == text


@pytest.mark.parametrize("name", PREFIXING)
def test_a_continuation_has_no_space_put_before_it(name):
    codec = TextCodec(TOKENIZERS[name](), "DIR")
    assert codec.encode_continuation("the") != codec.encode("the")
    assert codec.encode_continuation("</s>the") == codec.encode("</s>the")  # a text begins behind a special token


def test_words_that_a_prefix_marks_keep_it():
    """Given a tokenizer that cuts at white space, drops it, and marks where each word begins."""
    made = metaspace("always")
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always"),
    ])
    codec = TextCodec(made, "DIR")
    assert codec.encode("the key") == codec.encode("the") + codec.encode_continuation(" key")


def test_added_tokens_that_take_the_space_before_them():
    made = llama()
    made.add_tokens([AddedToken("<m>", lstrip=True, normalized=False), AddedToken("word", normalized=True)])
    codec = TextCodec(made, "DIR")
    for text in ("the  <m> key", "the word, sword <m>word"):
        check_pieces(codec, text)


@pytest.mark.parametrize(("name", "text"), [
    ("reference", "the<|eos|> the"), ("byte_level", "the</s> the<s>"), ("never", "the</s>the"), ("first", "<s>the the"),
])
def test_special_tokens_are_spelled(name, text):
    codec = TextCodec(TOKENIZERS[name](), "DIR")
    ids = codec.encode_continuation(text)
    assert codec.spell(ids) == text and codec.decode(ids) == re.sub("<.*?>", "", text)


def test_text_that_is_no_text(codec):
    for encode in (codec.encode, codec.encode_continuation):
        with pytest.raises(PromptError, match="character 1 of the text is half a surrogate pair"):
            encode("a\udcff")


# ---------------------------------------------------------------- tokenizers that fail


def giving_up():
    """A tokenizer whose regular expression needs more steps than its library takes, and then panics."""
    made = byte_level(False)
    made.pre_tokenizer = pre_tokenizers.Split(Regex("((a*)*)*$"), "isolated")
    return made


def test_a_panic_at_encoding_is_typed():
    codec = TextCodec(giving_up(), "DIR")
    for encode in (codec.encode, codec.encode_continuation):
        with pytest.raises(CheckpointError, match=r"^DIR: the tokenizer cannot encode the text .*retry-limit"):
            encode("a" * 40 + "c")


def test_a_text_that_a_tokenizer_cannot_encode():
    codec = TextCodec(Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]")), "DIR")
    with pytest.raises(CheckpointError, match=r"^DIR: the tokenizer cannot encode the text"):
        codec.encode("b")
    assert codec.decode_continuation([0]) == " a"


def test_ctrl_c_is_no_failure_of_the_tokenizer():
    with pytest.raises(KeyboardInterrupt), tokenizer_errors("DIR"):
        raise KeyboardInterrupt
