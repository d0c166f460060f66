"""The main job on a model and a text of one's own."""

import dataclasses
import gc
import json
import math

import jax
import pytest
from tiny import CONFIG, make_params
from tokenizers import Tokenizer, models, pre_tokenizers

import kvjax
from configs.demo import get_config
from experiments import common
from experiments.demo import job, main_job, memory_limit, table
from experiments.demo.conversation import Conversation
from kvjax.errors import ConfigError, KvjaxError, PromptError
from kvjax.inference.plan import make_plan

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
                  memory=-1.0 if "store" in settings else 6.0)
    config.update(settings)
    return config


@pytest.mark.parametrize("settings", [{}, {"chat": True, "chunk": 16}], ids=["plain", "chat_in_chunks"])
def test_a_text_of_ones_own_is_read_and_asked_about(model, tmp_path, settings, capsys):
    config = make_config(model, " ".join(f"w{i % 40}" for i in range(60)), tmp_path, **settings)
    main_job.run(config, str(tmp_path / "run"))
    rows = json.loads((tmp_path / "run" / "summary.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["quest@24", "dynakv@24"]
    for row in rows:
        assert row["answers"] and row["bytes_read_per_token"] > 0 and row["accuracy"] is None
        assert row["context"] == 60 + (1 if config.chat else 0)
        assert row["direct"] is not None and row["memory_bytes"] <= row["limit_bytes"]
    assert "quest@24" in capsys.readouterr().out


@pytest.mark.parametrize(("given", "most"), [(0, 64), (5, 5)])
def test_an_answer_to_a_text_of_ones_own_may_be_long(model, tmp_path, monkeypatch, given, most):
    asked, config = [], make_config(model, "w1 w2 w3 w4", tmp_path, store="host")
    config.update(max_new_tokens=given, methods=METHODS[:1])
    ask = Conversation.ask
    monkeypatch.setattr(Conversation, "ask", lambda *args: asked.append(args[-1]) or ask(*args))
    main_job.run(config, str(tmp_path / "run"))
    assert asked == [most]


def test_an_answer_about_needles_has_room_for_their_digits():
    assert job.answer_tokens(get_config()) == 8


def test_a_run_goes_on_and_is_not_mixed_with_another(model, tmp_path, monkeypatch):
    config = make_config(model, "w1 w2 w3 w4", tmp_path)
    main_job.run(config, str(tmp_path / "run"))
    text = (tmp_path / "run" / "summary.json").read_text()
    assert "NaN" not in text
    monkeypatch.setattr(main_job, "answer_all", lambda *args: pytest.fail("measured again"))
    main_job.run(config, str(tmp_path / "run"))
    (tmp_path / "text.txt").write_text("w4 w3 w2 w1")
    with pytest.raises(ConfigError, match="another text or model"):
        main_job.run(config, str(tmp_path / "run"))
    config.question = "w7"
    with pytest.raises(ConfigError, match="another configuration: question"):
        main_job.run(config, str(tmp_path / "run"))


def test_a_name_that_is_too_long_is_no_text_and_no_model(model, tmp_path):
    config = make_config(model, "w1 w2 w3", tmp_path)
    for field, words in (("prompt_file", "cannot be read"), ("model", "cannot be looked at")):
        changed = config.copy_and_resolve_references()
        changed[field] = "n" * 5000
        with pytest.raises(KvjaxError, match=words):
            main_job.run(changed, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_chat_template_that_alters_messages_is_refused(model):
    llm = kvjax.load(model)
    for template in ("user bot", "{{ messages[0].content }} {{ messages[0].content }}"):
        other = kvjax.LLM(CONFIG, llm.params, dataclasses.replace(llm.tokenizer, template=template))
        with pytest.raises(PromptError, match="chat=False"):
            job._in_template(other, "w1 w2", "w3")


def test_type_and_slots_of_a_method_have_their_effect(model, tmp_path):
    changes = {}, {"label": "int8", "dtype": "int8"}, {"label": "again", "slots": {"keep": False}}
    config = make_config(model, " ".join(f"w{i % 40}" for i in range(60)), tmp_path, store="host")
    config.methods = tuple({**METHODS[0], **change} for change in changes)
    main_job.run(config, str(tmp_path / "run"))
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
        main_job.run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("changes", "words"), [
    ({"chat": True}, "chat=True"), ({"seed": -1}, "seed=-1"), ({"digits": -1}, "digits=-1"),
    ({"digits": 1}, "digits=1"), ({"digits": 30}, "digits=30"), ({"memory": -2.0}, "memory=-2"),
    ({"memory": math.inf}, "memory=inf"), ({"memory": 3.0, "store": "host"}, "limits caches on flash"),
    ({"driver": "quick"}, "unknown driver"),
    ({"methods": ({"name": "quest", "whole": True},)}, "no use for a method's whole"),
])
def test_settings_that_make_no_job_are_refused(changes, words):
    config = get_config("smoke")
    config.update(changes)
    with pytest.raises(ConfigError, match=words):
        main_job.run(config, "unused")


@pytest.mark.parametrize("needle", ["Hello {nokey}", "{", "{}", "{key.x}", 5])
def test_a_needle_has_at_most_a_key_to_fill_in(needle):
    assert job._cue("The number of {key} is", "word") == "The number of word is"
    with pytest.raises(ConfigError, match="is not a sentence"):
        job._cue(needle, "word")


@pytest.mark.parametrize("settings", METHODS, ids=lambda settings: settings["name"])
def test_a_method_has_as_many_slots_as_its_limit_leaves(settings):
    plan = make_plan(CONFIG, common.make_method(settings), 1, 512)
    least, most = plan.layers[0].spec.max_blocks + 1, plan.layers[0].spec.num_blocks + 1
    assert least + 7 < most
    for count in (least, least + 7, most):
        limit = memory_limit.resident_bytes(plan, kvjax.Slots(count=count)) + memory_limit.store_bytes_at_most(plan)
        assert memory_limit.fit_slots(plan, limit, "x") == kvjax.Slots(count=count)
        if count > least:
            assert memory_limit.fit_slots(plan, limit - 1, "x") == kvjax.Slots(count=count - 1)
    assert memory_limit.fit_slots(plan, 1 << 40, "x").count == most  # more would never be used


def test_full_attention_shares_slots_where_its_blocks_do_not_fit_and_is_refused_where_those_of_a_layer_do_not():
    plan = make_plan(CONFIG, kvjax.Full(page=4), 1, 512)
    whole, shared = (memory_limit.resident_bytes(plan, slots) for slots in (kvjax.Slots(), kvjax.Slots(keep=False)))
    assert shared < 0.6 * whole  # of two layers
    store = memory_limit.store_bytes_at_most(plan)
    assert memory_limit.fit_slots(plan, whole + store, "full").keep
    for limit in (whole + store - 1, shared + store):
        assert memory_limit.fit_slots(plan, limit, "full") == kvjax.Slots(keep=False)
    with pytest.raises(ConfigError, match=r"^full needs 4\.7 MiB and the limit is 4\.6; raise --config\.memory"):
        memory_limit.fit_slots(plan, shared + store - 1, "full")


@pytest.mark.parametrize("settings", [{"name": "full"}, {**METHODS[0], "slots": {"count": 20}}])
def test_a_limit_that_cannot_be_kept_leaves_nothing_behind(model, tmp_path, settings):
    config = make_config(model, " ".join(f"w{i % 40}" for i in range(60)), tmp_path, memory=3.5)
    config.methods = (settings,)
    with pytest.raises(ConfigError, match=r"the limit is 3\.5; raise --config\.memory"):
        main_job.run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_cache_that_takes_more_than_was_planned_is_an_error(model, tmp_path, monkeypatch):
    config = make_config(model, "w1 w2 w3 w4", tmp_path)
    monkeypatch.setattr(Conversation, "_held", lambda self: 7 << 20)
    with pytest.raises(ConfigError, match=r"held 7\.0 MiB and the limit is 6\.0"):
        main_job.run(config, str(tmp_path / "run"))


@pytest.mark.parametrize("settings", [{"name": "full"}, *METHODS], ids=lambda settings: settings["name"])
def test_what_is_measured_is_what_jax_holds_of_a_cache(model, tmp_path, settings):
    llm = kvjax.load(model)
    llm.fingerprint  # noqa: B018, as its sample of the weights is kept
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    slots = kvjax.Slots(keep=False) if settings["name"] == "full" else None
    cache = llm.prefill([" ".join(f"w{i % 40}" for i in range(60))], method=common.make_method(settings),
                        store=kvjax.FlashStore(directory=tmp_path), slots=slots, capacity=128)
    talk = Conversation(llm, cache, "staged")
    logits = cache.logits.nbytes
    del cache
    held = []
    for question in ("w5 w6", "w7"):
        assert talk.ask(question, (), 3)
        gc.collect()
        held.append(sum(array.nbytes for array in jax.live_arrays()) - before)
    resident = talk.run.cache.resident_bytes
    assert talk.memory_bytes == resident + talk.run.cache.store_bytes
    assert max(held) - resident < logits + 256 * len(talk.seconds)  # and what a token reports, until it is counted
    assert talk.cost()["tokens"] == len(talk.seconds) - 2 == 7
    talk.close()


def test_answers_are_those_of_the_front_door(model, tmp_path):
    llm, text = kvjax.load(model), " ".join(f"w{i % 40}" for i in range(60))
    for settings in METHODS:
        cache = llm.prefill([text], method=common.make_method(settings), store=kvjax.FlashStore(directory=tmp_path),
                            capacity=128)
        first = llm.generate(["w5 w6"], cache, max_new_tokens=4)
        second = llm.generate(["w7"], first.cache, max_new_tokens=4)
        talk = Conversation(llm, cache, "staged")
        assert [talk.ask("w5 w6", (), 4), talk.ask("w7", (), 4)] == first.text + second.text
        for used in (first.cache, second.cache, talk):
            used.close()


@pytest.mark.parametrize(("row", "words"), [
    ({"store": "host"}, "from memory"), ({"store": "flash", "direct": True}, "O_DIRECT"),
    ({"store": "flash", "direct": False}, "times are those of memory"),
    ({"store": "flash:nvme", "direct": True, "disk": "nvme (emulated)"}, "from an emulated device, nvme"),
])
def test_the_table_says_where_reads_come_from(row, words):
    assert words in table.reads_of(row)
