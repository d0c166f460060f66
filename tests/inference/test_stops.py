"""Texts that end an answer: special tokens, text, and both in one."""

import json
import pathlib

import pytest
from tokenizers import AddedToken, Tokenizer

from kvjax.inference.stops import Stops
from kvjax.models.tokenizer import TextTokenizer

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens" / "tokenizers"
END, TURN = "<|im_end|>", "<|im_start|>"


@pytest.fixture(params=["byte_level", "llama2"])
def tokenizer(request, tmp_path):
    """With two special tokens and one that is not."""
    made = Tokenizer.from_file(str(GOLDENS / f"{request.param}.json"))
    made.add_special_tokens([TURN, END])
    made.add_tokens([AddedToken("<tool>", normalized=False)])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return TextTokenizer.from_directory(tmp_path)


def answered(tokenizer, text, *marks, after="The key is"):
    """The text of an answer that would be `text`, drawn token by token, and how many tokens were drawn and kept."""
    stops, before = Stops(tokenizer, marks), tokenizer.encode(after)
    ids, drawn = tokenizer.encode_continuation(text, before), []
    for i in ids:
        if i in stops.ids:
            break
        drawn.append(i)
        if stops.complete(drawn):
            break
    kept, said = stops.cut(drawn, before)
    assert kept == ids[: len(kept)]
    return said, len(drawn), len(kept)


@pytest.mark.parametrize(("text", "mark", "expected"), [
    (f" the key{END}\nmore", f"{END}\n", " the key"), (f" the key{END}\nmore", END, " the key"),
    (f" the key{END}{TURN}user", f"{END}{TURN}", " the key"), (f" the key.{END} more", f"key.{END}", " the "),
    (f" the{END}there{END}\n\nmore", f"{END}\n", f" the{END}there"), (f"{END}\nmore", f"{END}\n", ""),
    (" the key. More", "key.", " the key."), (" the key<tool>x", "y<tool>", " the key<tool>"),
    (" é😀, ok", "😀", " é😀"), (" 日本語。 ok", "語。", " 日本語。"),
    (" the key", "\n", " the key"), (f" the{END}key", f"{END}\n", f" the{END}key"),
])
def test_what_an_answer_is_that_a_mark_ends(tokenizer, text, mark, expected):
    said, drawn, kept = answered(tokenizer, text, mark)
    assert said == tokenizer.decode_continuation(tokenizer.encode_continuation(expected)) and kept <= drawn


def test_the_first_of_several_marks_ends_an_answer(tokenizer):
    marks = ("zzz", f"{END}\n", "key")
    assert answered(tokenizer, f" the{END}\nkey", *marks)[0] == " the"
    assert answered(tokenizer, f" the key{END}\n", *marks)[0] == " the key"


def test_a_mark_ends_an_answer_where_it_is_whole_and_its_tokens_are_cut(tokenizer):
    text = f" the key{END}"
    said, drawn, kept = answered(tokenizer, f"{text}\nmore", f"{END}\n")
    assert drawn == len(tokenizer.encode_continuation(f"{text}\n"))
    assert (kept, said) == (len(tokenizer.encode_continuation(" the key")), " the key")


def test_characters_of_many_tokens_are_found_in_a_long_answer(tokenizer):
    """Given one run of characters of several tokens each, longer than what is decoded for the mark alone."""
    assert answered(tokenizer, "語" * 40 + "。本", "。")[0] == "語" * 40 + "。"


def test_without_marks_no_answer_ends(tokenizer):
    stops = Stops(tokenizer, ())
    assert stops.ids == () and not stops.complete([5, 6]) and not Stops(None, ()).complete([5])
    assert Stops(None, ()).cut([5, 6], [7]) == ([5, 6], "")
