"""Tokenizers and chat templates of a model directory."""

import dataclasses
import datetime
import hashlib
import json
import os

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from kvjax.errors import CheckpointError, PromptError
from kvjax.models.tokenizer import TextTokenizer

BOS, EOS, TURN = "<s>", "</s>", "<|turn|>"
HELLO = [{"role": "user", "content": "Hello"}]
TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
    {% if message.role not in ["user", "assistant"] %}
        {{ raise_exception("unknown role " + message.role) }}
    {% endif %}
<|{{ message.role }}|>{{ message.content }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def byte_level():
    """A byte-level tokenizer without merges: one id for each byte after the three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([BOS, EOS, TURN, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS, TURN])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


@pytest.fixture
def read(tmp_path):
    """Makes a TextTokenizer from a tokenizer.json and whatever other files are given by name."""
    byte_level().save(str(tmp_path / "tokenizer.json"))

    def reader(files=None, **settings):
        files = {"tokenizer_config.json": {"bos_token": BOS, "eos_token": EOS} | settings} | (files or {})
        for name, content in files.items():
            (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return TextTokenizer.from_directory(tmp_path)

    return reader


# ---------------------------------------------------------------- text and ids


def test_text_starts_with_the_bos_token(read):
    assert read().encode("a")[0] == 0


@pytest.mark.parametrize(("single", "settings", "expected"), [
    (f"{BOS} $A", {}, (0,)), (f"{BOS} $A {EOS}", {}, (0,)), (f"$A {EOS}", {"bos_token": None}, ()),
    (f"{EOS} $A {EOS}", {"bos_token": EOS}, (1,)), ("$A", {}, ()), (f"{BOS} $A {EOS}", {"eos_token": TURN}, (0,)),
])
def test_what_texts_end_with_begins_none(read, tmp_path, single, settings, expected):
    """Given tokenizers that begin texts, end them, both, with the same token, and neither."""
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[(BOS, 0), (EOS, 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert read(**settings).start_ids == expected


@pytest.mark.parametrize("text", [BOS, f"{BOS}ab", f"{BOS}{BOS}"])
def test_nothing_is_put_before_a_text_that_begins_with_it(read, text):
    tokenizer = read()
    assert tokenizer.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode(" " + text)[:2] == [0, tokenizer.encode(" ")[1]]


def test_no_token_is_put_before_a_templated_text(read):
    tokenizer = read(chat_template=TEMPLATE)
    assert tokenizer.encode(tokenizer.apply_chat_template(HELLO)).count(0) == 1


def test_special_tokens_can_be_left_out(read):
    tokenizer = read()
    assert tokenizer.encode("ab", add_special_tokens=False) == tokenizer.encode("ab")[1:]


@pytest.mark.parametrize("text", ["", "plain text", "naïve café 🦜 日本語", " two  spaces\n\ttab "])
def test_decode_undoes_encode(read, text):
    tokenizer = read()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_truncation_and_padding_of_the_file_are_off(read, tmp_path):
    trained = byte_level()
    trained.enable_truncation(4)
    trained.enable_padding(length=4)
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read()
    assert [len(tokenizer.encode(text)) for text in ("a", "abcdefgh")] == [2, 9]


# ---------------------------------------------------------------- special ids


def test_ids_of_the_special_tokens(read):
    tokenizer = read()
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (1,))


def test_special_token_may_be_an_object(read):
    tokenizer = read(bos_token={"content": TURN, "lstrip": False}, eos_token={"content": BOS})
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (2, (0,))


@pytest.mark.parametrize(("more", "eos"), [({}, 1), ({"added_tokens_decoder": {}}, 2)])
def test_the_map_of_special_tokens_counts_or_fills_in(read, more, eos):
    """It is the older of the two files, and only what settings with added tokens leave out is read from it then."""
    special = {"bos_token": BOS, "eos_token": EOS}
    tokenizer = read({"tokenizer_config.json": {"eos_token": TURN} | more, "special_tokens_map.json": special})
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (eos,))


def test_null_special_tokens_have_no_id(read):
    tokenizer = read(bos_token=None, eos_token=None, add_bos_token=True)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (None, ())


def test_special_token_outside_the_vocabulary_is_added(read):
    tokenizer = read(bos_token="<nowhere>", eos_token="<nowhere>")
    following = 3 + 256
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (following, (following,))
    assert tokenizer.encode("<nowhere>") == [0, following]


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"generation_config.json": {"eos_token_id": [2, 1]}, "config.json": {"eos_token_id": 7}}, (2, 1, 7)),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 7}}, (7, 1)),
        ({"generation_config.json": {}}, (1,)),
    ],
)
def test_eos_ids_are_those_of_all_files(read, files, expected):
    assert read(files).eos_ids == expected


def test_tokenizer_json_alone_is_enough(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.template) == (None, (), None)


# ---------------------------------------------------------------- chat templates


def test_template_sees_messages_and_special_tokens(read):
    text = read(chat_template=TEMPLATE).apply_chat_template(HELLO)
    assert text == "<s><|user|>Hello</s>\n<|assistant|>"


def test_generation_prompt_can_be_left_out(read):
    text = read(chat_template=TEMPLATE).apply_chat_template(HELLO, add_generation_prompt=False)
    assert text == "<s><|user|>Hello</s>\n"


def test_template_in_its_own_file_comes_first(read):
    tokenizer = read({"chat_template.jinja": "own file ü"}, chat_template="settings")
    assert tokenizer.apply_chat_template(HELLO) == "own file ü"


def test_default_of_several_named_templates(read):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert read(chat_template=named).apply_chat_template(HELLO) == "plain"


@pytest.mark.parametrize(
    "template, expected",
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<é>"}'),
        ("{{ messages[0].content | tojson(ensure_ascii=True) }}", '"<\\u00e9>"'),
        ("{{ messages | tojson(indent=1) }}", '[\n {\n  "role": "user",\n  "content": "<é>"\n }\n]'),
        ("{% if tools is not none %}tools{% else %}none{% endif %}", "none"),
        ("{% for m in messages %}a{% break %}b{% endfor %}", "a"),
        ("x{% generation %}{{ messages[0].role }}{% endgeneration %}y", "xusery"),
        ("{{ pad_token }}", "<pad>"),
    ],
)
def test_what_templates_expect_of_hugging_face(read, template, expected):
    tokenizer = read(chat_template=template, pad_token="<pad>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "<é>"}]) == expected


def test_template_can_ask_for_the_date(read):
    text = read(chat_template='{{ strftime_now("%Y-%m-%d") }}').apply_chat_template(HELLO)
    assert abs(datetime.date.fromisoformat(text) - datetime.date.today()) <= datetime.timedelta(days=1)


def test_template_refuses_messages(read):
    with pytest.raises(PromptError, match="unknown role wizard"):
        read(chat_template=TEMPLATE).apply_chat_template([{"role": "wizard", "content": "Hello"}])


def test_model_without_template(read, tmp_path):
    with pytest.raises(CheckpointError, match=f"{tmp_path}: no chat template in tokenizer_config.json"):
        read().apply_chat_template(HELLO)


@pytest.mark.parametrize("template", [
    "{% if %}", "{{ nothing.at.all }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}", "{{ messages[0].content + 1 }}",
])
def test_broken_or_unsafe_template(read, tmp_path, template):
    with pytest.raises(CheckpointError, match=f"{tmp_path}: the chat template does not work"):
        read(chat_template=template).apply_chat_template(HELLO)


@pytest.mark.parametrize("template", [3, {"default": "x"}, [{"name": "tool_use", "template": "x"}], [["default", "x"]]])
def test_template_of_a_wrong_kind(read, template):
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template is"):
        read(chat_template=template)


def test_template_file_that_is_no_text(read, tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read"):
        read()


def test_what_is_saved_over_another_model_has_its_own_template_and_tokens_or_none(read, tmp_path):
    old = read({"chat_template.jinja": "old"})
    for template in ("new", None):
        (tmp_path / "chat_template.jinja").write_text("old")
        (tmp_path / "special_tokens_map.json").write_text('{"sep_token": "another model\'s"}')
        with dataclasses.replace(old, template=template).saving(tmp_path):
            assert (tmp_path / "chat_template.jinja").exists()
        again = TextTokenizer.from_directory(tmp_path)
        assert again.template == template and again.special_tokens == old.special_tokens


# ---------------------------------------------------------------- identity and bad files


def test_fingerprint_is_that_of_the_file(read, tmp_path):
    assert read().fingerprint == hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()[:16]


def test_value_is_frozen(read):
    with pytest.raises(dataclasses.FrozenInstanceError):
        read().bos_id = 3


def test_missing_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        TextTokenizer.from_directory(tmp_path)


def test_missing_directory(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: not a directory"):
        TextTokenizer.from_directory(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(read, tmp_path, name):
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name}: cannot be read .*FIFO"):
        read()


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff\xfe", b'{"model": {"type": "New"}}'])
def test_corrupt_tokenizer(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        TextTokenizer.from_directory(tmp_path)


def test_corrupt_settings(read):
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not readable as JSON"):
        read({"tokenizer_config.json": "{"})
