"""The main job on a model and a text of one's own."""

import dataclasses
import json

import pytest
from tiny import CONFIG, make_params
from tokenizers import Tokenizer, models, pre_tokenizers

import kvjax
from configs.demo import get_config
from experiments import demo
from kvjax.errors import ConfigError, KvjaxError, PromptError

TEMPLATE = "{% for message in messages %}user {{ message.content }} bot {% endfor %}"
METHODS = ({"name": "quest", "budget": 24, "sinks": 2, "window": 4, "page": 4},
           {"name": "dynakv", "budget": 24, "sinks": 2, "window": 4, "cluster": 4, "buffer": 3})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a small model, a tokenizer of words and a chat template."""
    path = tmp_path_factory.mktemp("model")
    words = {f"w{i}": i for i in range(CONFIG.vocab_size - 3)} | {
        word: CONFIG.vocab_size - 3 + i for i, word in enumerate(("user", "bot", "?"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    kvjax.save(kvjax.LLM(CONFIG, make_params()), path)
    return path


def make_config(model, text: str, directory, **settings):
    file = directory / "text.txt"
    file.write_text(text)
    config = get_config("smoke")
    config.update(model=str(model), prompt_file=str(file), question="w5 w6", methods=METHODS, max_new_tokens=3,
                  **settings)
    return config


@pytest.mark.parametrize("settings", [{}, {"chat": True, "chunk": 16}], ids=["plain", "chat_in_chunks"])
def test_a_text_of_ones_own_is_read_and_asked_about(model, tmp_path, settings, capsys):
    config = make_config(model, " ".join(f"w{i % 40}" for i in range(60)), tmp_path, **settings)
    demo.run(config, str(tmp_path / "run"))
    rows = json.loads((tmp_path / "run" / "summary.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["quest@24", "dynakv@24"]
    for row in rows:
        assert row["answers"] and row["bytes_read_per_token"] > 0 and row["accuracy"] is None
        assert row["context"] == 60 + (1 if config.chat else 0)
        assert (row["recall"] is None) == config.chat
    assert "quest@24" in capsys.readouterr().out


@pytest.mark.parametrize(("given", "most"), [(0, 64), (5, 5)])
def test_an_answer_to_a_text_of_ones_own_may_be_long(model, tmp_path, monkeypatch, given, most):
    asked, config = [], make_config(model, "w1 w2 w3 w4", tmp_path, store="host")
    config.update(max_new_tokens=given, methods=METHODS[:1])
    generate = kvjax.LLM.generate
    monkeypatch.setattr(kvjax.LLM, "generate", lambda *args, **given: asked.append(given["max_new_tokens"])
                        or generate(*args, **given))
    demo.run(config, str(tmp_path / "run"))
    assert asked == [most, most]


def test_an_answer_about_needles_has_room_for_their_digits():
    assert demo.answer_tokens(get_config()) == 8


def test_a_run_goes_on_and_is_not_mixed_with_another(model, tmp_path, monkeypatch):
    """Of a text that is shorter than what recall looks for, it is not measured, and the results stay JSON."""
    config = make_config(model, "w1 w2 w3 w4", tmp_path)
    demo.run(config, str(tmp_path / "run"))
    text = (tmp_path / "run" / "summary.json").read_text()
    assert "NaN" not in text and json.loads(text)["rows"][0]["recall"] is None
    monkeypatch.setattr(demo, "answer_all", lambda *args: pytest.fail("measured again"))
    demo.run(config, str(tmp_path / "run"))
    (tmp_path / "text.txt").write_text("w4 w3 w2 w1")
    with pytest.raises(ConfigError, match="another text or model"):
        demo.run(config, str(tmp_path / "run"))
    config.question = "w7"
    with pytest.raises(ConfigError, match="another configuration: question"):
        demo.run(config, str(tmp_path / "run"))


def test_a_name_that_is_too_long_is_no_text_and_no_model(model, tmp_path):
    config = make_config(model, "w1 w2 w3", tmp_path)
    for field, words in (("prompt_file", "cannot be read"), ("model", "cannot be looked at")):
        changed = config.copy_and_resolve_references()
        changed[field] = "n" * 5000
        with pytest.raises(KvjaxError, match=words):
            demo.run(changed, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_chat_template_that_alters_messages_is_refused(model):
    llm = kvjax.load(model)
    for template in ("user bot", "{{ messages[0].content }} {{ messages[0].content }}"):
        other = kvjax.LLM(CONFIG, llm.params, dataclasses.replace(llm.tokenizer, template=template))
        with pytest.raises(PromptError, match="chat=False"):
            demo._in_template(other, "w1 w2", "w3")


def test_type_and_slots_of_a_method_have_their_effect(model, tmp_path):
    changes = {}, {"label": "int8", "dtype": "int8"}, {"label": "again", "slots": {"keep": False}}
    config = make_config(model, " ".join(f"w{i % 40}" for i in range(60)), tmp_path, store="host")
    config.methods = tuple({**METHODS[0], **change} for change in changes)
    demo.run(config, str(tmp_path / "run"))
    rows = json.loads((tmp_path / "run" / "summary.json").read_text())["rows"]
    (usual, int8, again) = ([row[key] for key in ("resident_bytes", "hit_rate")] for row in rows)
    assert int8[0] < usual[0] and again[1] == 0.0 < usual[1]


@pytest.mark.parametrize(("settings", "changes", "words"), [
    ({**METHODS[0], "dtype": "int3"}, {}, "int3"), ({**METHODS[0], "slots": {"count": 1}}, {}, "slots=1"),
    ({**METHODS[0], "slots": {"keep": False}}, {"store": "memory"}, "slots are for blocks on a store"),
    ({"name": "shadowkv"}, {}, "shadowkv learns from the prompt"),
    ({"name": "rle", "int8": True}, {"chunk": 2}, "rle learns from the prompt"),
])
def test_methods_types_and_slots_that_do_not_fit_leave_nothing_behind(model, tmp_path, settings, changes, words):
    config = make_config(model, "w1 w2 w3", tmp_path, **changes)
    config.methods = (settings,)
    with pytest.raises(KvjaxError, match=words):
        demo.run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("changes", "words"), [
    ({"chat": True}, "chat=True"), ({"seed": -1}, "seed=-1"), ({"digits": -1}, "digits=-1"),
    ({"digits": 1}, "digits=1"), ({"digits": 30}, "digits=30"), ({"recall_k": -2}, "recall_k=-2"),
    ({"methods": ({"name": "quest", "whole": True},)}, "no use for a method's whole"),
])
def test_settings_that_make_no_job_are_refused(changes, words):
    config = get_config("smoke")
    config.update(changes)
    with pytest.raises(ConfigError, match=words):
        demo.run(config, "unused")


@pytest.mark.parametrize("needle", ["Hello {nokey}", "{", "{}", "{key.x}", 5])
def test_a_needle_has_at_most_a_key_to_fill_in(needle):
    assert demo._cue("The number of {key} is", "word") == "The number of word is"
    with pytest.raises(ConfigError, match="is not a sentence"):
        demo._cue(needle, "word")
