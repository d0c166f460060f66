"""Prompts of tasks for a tokenizer that puts a space before every text: they are what one text would be."""

import dataclasses
import json
import pathlib

import pytest

from kvjax.eval import tasks
from kvjax.eval.tasks import needles, prompts
from kvjax.models.tokenizer import TextTokenizer

GOLDENS = pathlib.Path(__file__).parents[2] / "goldens" / "tokenizers"
TEMPLATE = "<s>[INST] {{ messages[0].content }} [/INST]{{ eos_token }} the"


@pytest.fixture
def request_of_llama(request_for, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((GOLDENS / "llama2.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    return dataclasses.replace(request_for(length=900, count=2), tokenizer=TextTokenizer.from_directory(tmp_path))


def test_a_prompt_in_parts_is_one_text(request_of_llama):
    context, question = "The key of the door", "\nis the the"
    first, last = prompts.split(request_of_llama, context, question)
    assert [*first, *last] == request_of_llama.tokenizer.encode(context + question) and first[0] == 1


def test_a_message_in_parts_is_one_text(request_of_llama):
    """Where the template goes on behind a special token, too."""
    tokenizer = request_of_llama.tokenizer
    first, last = prompts.split(request_of_llama, "The key of the door", "\nis the the", chat=True)
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "The key of the door\nis the the"}])
    assert [*first, *last] == tokenizer.encode(whole, add_special_tokens=False)


def test_what_begins_as_every_text_does_begins_once(request_of_llama):
    first, _ = prompts.split(request_of_llama, "<s>The key", "\nis")
    assert first == tuple(request_of_llama.tokenizer.encode("<s>The key"))


def test_what_is_hidden_in_a_text_has_no_space_put_before_it(request_of_llama):
    tokenizer = request_of_llama.tokenizer
    assert list(needles.encode(tokenizer.tokenizer, "\nkey")) == tokenizer.encode("x\nkey")[3:]
    (one, _) = tasks.draw("passkey", request_of_llama)
    assert "\nThe pass key is " in tokenizer.decode(one.context)
    assert tokenizer.decode([*one.context, *one.question]).endswith("\nThe pass key is")


def test_a_prompt_fits_with_its_answer(request_of_llama):
    tokenizer = request_of_llama.tokenizer
    for one in tasks.draw("niah_single_1", request_of_llama):
        taken = len(tokenizer.encode(one.context)) + len(tokenizer.encode_continuation(one.question))
        assert taken + one.max_new_tokens <= request_of_llama.length
