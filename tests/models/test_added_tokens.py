"""Tokens that files beside tokenizer.json name; right values are those of transformers 5.2."""

import json
import pathlib
import shutil

import pytest

from kvjax.errors import CheckpointError
from kvjax.models.tokenizer import TextTokenizer

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens" / "tokenizers"
EXPECTED = json.loads((GOLDENS / "expected.json").read_text())
SETTINGS, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
NEXT = 480  # the first id that tokenizer.json leaves


def token(content, special=True, **flags):
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": special, **flags}


def by_id(*tokens):
    return {"added_tokens_decoder": {str(NEXT + i): one for i, one in enumerate(tokens)}}


START, END = token("<|im_start|>"), token("<|im_end|>")
CASES = {
    "added_in_config": {SETTINGS: {"eos_token": "<|im_end|>"} | by_id(START, END)},
    "added_json": {ADDED: {"<|im_start|>": NEXT, "<|im_end|>": NEXT + 1}},
}


@pytest.fixture
def read(tmp_path):
    """Makes a TextTokenizer of a golden tokenizer.json, to which tokens may be added, and of other files by name."""
    def reader(files=None, golden="byte_level", tokens=()):
        layout = json.loads((GOLDENS / f"{golden}.json").read_text())
        layout["added_tokens"] += [{"id": NEXT + i, **one} for i, one in enumerate(tokens)]
        (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
        for name, content in {SETTINGS: {}, **(files or {})}.items():
            if name == SETTINGS:
                content = {"bos_token": "<s>", "eos_token": "</s>"} | content
            (tmp_path / name).write_text(json.dumps(content))
        return TextTokenizer.from_directory(tmp_path)

    return reader


@pytest.mark.parametrize("case", [*CASES, "llama2"])
def test_ids_and_texts_are_theirs(read, case):
    tokenizer = read(CASES.get(case), "llama2" if case == "llama2" else "byte_level")
    for text, ids, decoded in EXPECTED[case]:
        assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == decoded


@pytest.mark.parametrize(("files", "tokens", "expected"), [
    (by_id(token("<x>", True)), [token("<x>", False)], {NEXT: "<x>"}),
    (by_id(token("<x>", False)), [token("<x>", True)], {}),
    ({"additional_special_tokens": ["<x>"]}, [token("<x>", False)], {}),
    ({"additional_special_tokens": ["<x>", token("<y>")]}, [], {NEXT: "<x>", NEXT + 1: "<y>"}),
    ({"extra_special_tokens": ["<y>"]} | by_id(token("<x>", False)), [], {NEXT + 1: "<y>"}),
    ({"extra_special_tokens": {"image_token": "<x>", "video": "<v>"}}, [], {NEXT: "<x>", NEXT + 1: "<v>"}),
    ({"pad_token": "<x>"}, [token("<x>", False)], {NEXT: "<x>"}),
    ({"pad_token": "<x>", "image_token": "<y>"}, [], {NEXT: "<x>", NEXT + 1: "<y>"}),
    ({"pad_token": "!"}, [], {2: "!"}),
    ({"pad_token": "<x>"} | by_id(token("<x>", False)), [], {NEXT: "<x>"}),
    ({"pad_token": {"content": "<x>", "__type": "AddedToken", "special": False}}, [], {NEXT: "<x>"}),
    ({"pad_token": "", "add_bos_token": True, "unk_token": None}, [], {}),
])
def test_what_is_special(read, files, tokens, expected):
    tokenizer = read({SETTINGS: files}, tokens=tokens)
    assert {i: text for text, i in tokenizer.special_ids.items() if i > 1} == expected
    for i, text in expected.items():
        assert tokenizer.encode(f"a{text}b") == [66, i, 67] and tokenizer.decode([66, i, 67]) == "ab"


@pytest.mark.parametrize(("files", "special"), [
    ({ADDED: {"<x>": NEXT}}, False), ({ADDED: {"<x>": NEXT}, SETTINGS: {"pad_token": "<x>"}}, True),
    ({ADDED: {"<x>": NEXT}, SETTINGS: {"additional_special_tokens": ["<x>"]}}, True),
    ({ADDED: {"<x>": NEXT}, SETTINGS: by_id(token("<x>", False))}, False),
    ({ADDED: {"<x>": NEXT}, MAP: {"pad_token": token("<x>", lstrip=True)}}, True),
])
def test_tokens_of_a_file_of_their_own_are_special_if_another_names_them(read, files, special):
    tokenizer = read(files)
    assert tokenizer.encode("a<x>") == [66, NEXT] and ("<x>" in tokenizer.special_ids) == special


def test_tokens_of_both_files_have_the_ids_that_they_say(read):
    tokenizer = read({SETTINGS: by_id(token("<x>")), ADDED: {"<z>": NEXT + 2, "<y>": NEXT + 1}})
    assert tokenizer.encode("<z><y><x>") == [NEXT + 2, NEXT + 1, NEXT]


def test_flags_of_the_map_count(read):
    tokenizer = read({MAP: {"pad_token": token("<x>", lstrip=True)}})
    assert tokenizer.encode("a  <x>") == [66, NEXT]


@pytest.mark.parametrize(("files", "tokens"), [
    ({SETTINGS: {"added_tokens_decoder": {str(NEXT + 1): START}}}, ()),  # what lies between is no token
    ({SETTINGS: by_id(START)}, [token("<z>")]), ({SETTINGS: {"added_tokens_decoder": {"7": token("<s>")}}}, ()),
    ({ADDED: {"<x>": NEXT + 1}}, ()), ({ADDED: {"<x>": NEXT, "<y>": NEXT}}, ()),
    ({ADDED: {"<x>": NEXT + 1}, SETTINGS: by_id(token("<x>"))}, ()),
])
def test_another_id_than_the_files_say(read, files, tokens):
    with pytest.raises(CheckpointError, match=r"(tokenizer_config|added_tokens)\.json: the token '<.*>' is to have"):
        read(files, tokens=tokens)


@pytest.mark.parametrize(("name", "content", "words"), [
    (SETTINGS, {"added_tokens_decoder": ["<x>"]}, "expected tokens by their ids"),
    (SETTINGS, {"added_tokens_decoder": {"x": START}}, "expected an id"),
    (SETTINGS, {"added_tokens_decoder": {"²": START}}, "expected an id"),
    (SETTINGS, {"added_tokens_decoder": {str(NEXT): "<x>"}}, "expected an id"),
    (SETTINGS, {"added_tokens_decoder": {str(NEXT): {"special": True}}}, "expected a token's text"),
    (SETTINGS, {"added_tokens_decoder": {str(NEXT): START | {"lstrip": 1}}}, "expected a token's text"),
    (SETTINGS, {"additional_special_tokens": "<x>"}, "expected a list of tokens"),
    (MAP, {"additional_special_tokens": [3]}, "expected a token's text"),
    (SETTINGS, {"pad_token": START | {"special": "yes"}}, "expected a token's text"),
    (ADDED, {"<x>": "480"}, "expected an integer"), (ADDED, {"<x>": True}, "expected an integer"),
    (ADDED, {"<x>": -1}, "expected an integer"),
])
def test_entries_that_are_no_tokens(read, name, content, words):
    with pytest.raises(CheckpointError, match=rf"{name}: .*{words}"):
        read({name: content})


@pytest.mark.parametrize("case", CASES)
def test_added_tokens_are_saved_and_part_of_the_fingerprint(read, tmp_path, case):
    plain, tokenizer = read().fingerprint, read(CASES[case])
    assert tokenizer.fingerprint != plain
    other = tmp_path / "other"
    other.mkdir()
    (other / ADDED).write_text('{"<another model\'s>": 480}')
    with tokenizer.saving(other):
        pass
    again = TextTokenizer.from_directory(other)
    assert (again.fingerprint, again.special_ids) == (tokenizer.fingerprint, tokenizer.special_ids)
    assert (again.eos_ids, again.special_tokens) == (tokenizer.eos_ids, tokenizer.special_tokens)
    for text, ids, _ in EXPECTED[case]:
        assert again.encode(text) == ids


def test_whether_an_added_token_is_special_is_part_of_the_fingerprint(read):
    assert read({SETTINGS: by_id(START)}).fingerprint != read({SETTINGS: by_id(START | {"special": False})}).fingerprint


def test_a_link_to_nowhere_is_no_missing_file(read, tmp_path):
    """As a download that broke off leaves behind."""
    shutil.copy(GOLDENS / "byte_level.json", tmp_path / "tokenizer.json")
    (tmp_path / ADDED).symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=ADDED):
        TextTokenizer.from_directory(tmp_path)
