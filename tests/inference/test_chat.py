"""Conversations: turns on one cache, equal to the same text read at once."""

import json

import numpy as np
import pytest
from tiny import make_params
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import kvjax
from kvjax.errors import CheckpointError, ConfigError, FormatMismatch, NotFinite, PromptError, ReadFailed
from kvjax.models.config import ModelConfig

LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789 .\n"]
SPECIAL = ["<eos>", "<user>", "<model>", "<end>", "<think>"]
CONFIG = ModelConfig(
    family="llama", vocab_size=len(LETTERS) + len(SPECIAL), hidden_size=32, intermediate_size=48, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=8, max_position=1024, tie_embeddings=True, eos_token_ids=(len(LETTERS) + 3,),
)
METHOD = kvjax.Full()
DOCUMENT = "the quick brown fox jumps over the lazy dog 0123456789"
PLAIN = (
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<model>' if m.role == 'assistant' else '' }}"
    "{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<model>{{ '<think>' if think else '' }}{% endif %}"
)
TRIMS = PLAIN.replace("{{ m.content }}", "{{ (m.content | trim)[:3] if m.role == 'assistant' else m.content }}")


def model(path, template):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(LETTERS)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<end>"} | ({} if template is None else {"chat_template": template})
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    kvjax.save(kvjax.LLM(CONFIG, make_params(CONFIG, seed=3, sharper=4)), path)
    return kvjax.load(path)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return model(tmp_path_factory.mktemp("chat"), PLAIN)


@pytest.fixture(scope="module")
def trimming(tmp_path_factory):
    return model(tmp_path_factory.mktemp("trims"), TRIMS)


def read_at_once(llm, messages, most=10, **more):
    """The cache of a whole conversation up to the next answer, and the greedy answer."""
    text = llm.tokenizer.apply_chat_template(messages, **more)
    *ids, last = llm.tokenizer.encode(text, add_special_tokens=False)
    cache = llm.prefill(ids, method=METHOD, capacity=1024)
    return llm.generate([last], cache, max_new_tokens=most)


def said(llm, result):
    """Tokens that a cache holds, those that are pending included."""
    return result.cache.length[0] + sum(map(len, result.cache.pending))


def test_turns_by_the_loop_are_those_by_single_tokens(llm):
    """With pending tokens between turns, and marks that the host looks for."""
    with llm.chat(DOCUMENT, method=METHOD, capacity=1024) as chat, llm.chat(
        DOCUMENT, method=METHOD, capacity=1024
    ) as other:
        for question in ("what is it?", "and then?"):
            by_loop = chat.ask(question, max_new_tokens=10, driver="loop", stop=("e", "zz"))
            expected = other.ask(question, max_new_tokens=10, stop=("e", "zz"))
            assert (by_loop.tokens, by_loop.text, by_loop.ended) == (expected.tokens, expected.text, expected.ended)
        pieces = list(chat.stream("why?", max_new_tokens=10, driver="loop"))
        assert "".join(map(str, pieces)) == other.ask("why?", max_new_tokens=10).text


@pytest.mark.parametrize("context", ["", DOCUMENT])
@pytest.mark.parametrize("system", [None, "be brief"])
@pytest.mark.parametrize("which", ["llm", "trimming"])
def test_every_turn_is_as_if_all_had_been_read_at_once(which, context, system, request):
    llm = request.getfixturevalue(which)
    with llm.chat(context, system=system, method=METHOD, capacity=1024) as chat:
        for question in ("what is it?", "and then?", "why?"):
            result = chat.ask(question, max_new_tokens=10)
            expected = read_at_once(llm, chat.messages[:-1])
            assert result.text == expected.text and said(llm, result) == said(llm, expected)
            np.testing.assert_allclose(result.cache.logits, expected.cache.logits, atol=2e-4)
        assert [message["role"] for message in chat.messages if message["role"] != "system"] == ["user",
                                                                                                 "assistant"] * 3
        first = next(message["content"] for message in chat.messages if message["role"] == "user")
        assert first == (f"{DOCUMENT}\n\nwhat is it?" if context else "what is it?")


def test_only_new_text_is_read(llm):
    with llm.chat(DOCUMENT, method=METHOD, capacity=1024) as chat:
        chat.ask("what is it?", max_new_tokens=5)
        second = chat.ask("and then?", max_new_tokens=5)
        assert second.usage.tokens < 40, "less than the document alone"


def test_answers_of_a_chat_come_in_pieces(llm):
    with llm.chat(DOCUMENT, method=METHOD, capacity=1024) as chat:
        pieces = list(chat.stream("what is it?", max_new_tokens=8))
        assert "".join(map(str, pieces)) == read_at_once(llm, chat.messages[:-1], most=8).text
        assert pieces[-1].result.text == chat.messages[-1]["content"]


def test_a_turn_that_is_left_early_did_not_happen(llm):
    with llm.chat(DOCUMENT, method=METHOD, capacity=1024) as chat:
        with chat.stream("what is it?", max_new_tokens=8) as stream:
            next(stream)
        with pytest.raises(PromptError, match="larger capacity"):
            chat.ask("x" * 2000)
        assert chat.messages == []
        assert chat.ask("why?", max_new_tokens=8).text == read_at_once(llm, chat.messages[:-1], most=8).text


def test_a_stop_that_is_cut_off_is_not_part_of_the_conversation(llm):
    with llm.chat(DOCUMENT, method=METHOD, capacity=1024) as chat:
        free = chat.ask("what is it?", max_new_tokens=10, eos=())
        mark = llm.tokenizer.codec.spell(free.tokens[0])
        special = next((text for text in SPECIAL if text in mark), None)
    with llm.chat(DOCUMENT, method=METHOD, capacity=1024) as chat:
        stop = () if special is None else mark[mark.index(special) - 1 :][: len(special) + 1]
        chat.ask("what is it?", max_new_tokens=10, eos=(), stop=stop)
        result = chat.ask("and then?", max_new_tokens=10)
        assert result.text == read_at_once(llm, chat.messages[:-1]).text


def test_variables_of_the_template(llm):
    with llm.chat(template={"think": True}, method=METHOD, capacity=1024) as chat:
        result = chat.ask("why?", max_new_tokens=5)
        assert result.text == read_at_once(llm, chat.messages[:-1], most=5, think=True).text
    assert llm.tokenizer.apply_chat_template([], think=True).endswith("<think>")
    with pytest.raises(PromptError, match="JSON"):
        llm.tokenizer.apply_chat_template([], think=object())


@pytest.mark.parametrize("which", ["llm", "trimming"])
def test_a_conversation_goes_on_in_another_process(which, request, tmp_path):
    llm = request.getfixturevalue(which)
    store = kvjax.FlashStore(file=tmp_path / "blocks.kv")
    with llm.chat(DOCUMENT, method=METHOD, store=store, template={"think": False}, capacity=1024) as chat:
        chat.ask("what is it?", max_new_tokens=8)
        chat.save(tmp_path)
        messages = chat.messages
        expected = chat.ask("and then?", max_new_tokens=8).text
    with llm.restore_chat(tmp_path) as chat:
        assert chat.messages == messages
        assert chat.ask("and then?", max_new_tokens=8).text == expected
    assert (tmp_path / "chat.json").stat().st_mode & 0o777 == 0o600


def test_a_conversation_that_cannot_be_taken_up_is_refused(llm, tmp_path):
    with llm.chat(DOCUMENT, method=METHOD, capacity=1024) as chat:
        chat.save(tmp_path)
        result = chat.ask("why?", max_new_tokens=4)
        result.cache.save(tmp_path)
    with pytest.raises(FormatMismatch, match="another cache was saved there since"):
        llm.restore_chat(tmp_path)
    for content in (b"{", b"[]", b"{}", b'{"template": {}, "messages": [], "context": "", "text": "", "last": 3}'):
        (tmp_path / "chat.json").write_bytes(content)
        with pytest.raises(ReadFailed, match="not a conversation"):
            llm.restore_chat(tmp_path)
    (tmp_path / "chat.json").unlink()
    with pytest.raises(ReadFailed, match="not a conversation"):
        llm.restore_chat(tmp_path)
    with llm.chat(method=METHOD) as chat, pytest.raises(PromptError, match="empty"):
        chat.save(tmp_path)


def test_a_context_that_was_read_before_is_taken(llm, tmp_path):
    with llm.chat(DOCUMENT, method=METHOD, capacity=1024) as chat:
        chat.cache.save(tmp_path)
        expected = chat.ask("why?", max_new_tokens=8).text
    with llm.chat(DOCUMENT, cache=llm.restore(tmp_path)) as chat:
        assert chat.ask("why?", max_new_tokens=8).text == expected
    with pytest.raises(PromptError, match="give the context that it was made of"):
        llm.chat(DOCUMENT[:-1], cache=llm.restore(tmp_path))


def test_a_chat_closes_what_it_opened(llm, tmp_path):
    with llm.chat(DOCUMENT, method=METHOD, store=kvjax.FlashStore(directory=tmp_path), capacity=1024) as chat:
        for question in ("why?", "and then?"):
            chat.ask(question, max_new_tokens=4)
        opened = chat.cache.branch.family
        assert len([branch for branch in opened if not branch._closed]) == 2
        for _ in range(2):  # answers whose end was cut off, and from which no turn goes on
            said = chat.ask("what is it?", max_new_tokens=9, eos=()).text
            chat.ask("what is it?", max_new_tokens=9, eos=(), stop=said[4:7])
            assert len([branch for branch in opened if not branch._closed]) <= 3
        chat.close()
    assert list(tmp_path.iterdir()) == [] and chat.cache is None


def test_what_a_template_rewrites_is_read_again_as_the_cache_was_made(trimming, tmp_path):
    with trimming.chat(DOCUMENT, method=kvjax.Quest(budget=48, window=8, page=4), dtype="bfloat16") as chat:
        chat.ask("what is it?", max_new_tokens=8, eos=())
        chat.save(tmp_path)
        method = chat.cache.plan.method
    with trimming.restore_chat(tmp_path) as chat:
        chat.ask("and then?", max_new_tokens=8)
        assert (chat.cache.plan.method, chat.cache.plan.dtype) == (method, "bfloat16")


def test_what_cannot_be_a_conversation(llm, tmp_path):
    with llm.chat(method=METHOD, capacity=1024) as chat, pytest.raises(PromptError, match="question="):
        chat.ask("")
    with pytest.raises(ConfigError, match="give the context"):
        llm.chat(cache=llm.prefill("the fox", method=METHOD, capacity=64))
    two = llm.prefill(["the fox", "a dog"], method=METHOD, capacity=64)
    with pytest.raises(ConfigError, match="one sequence"):
        llm.chat("the fox", cache=two)
    with pytest.raises(ConfigError, match="tokenizer"):
        kvjax.LLM(CONFIG, llm.params).chat("a")
    with pytest.raises(CheckpointError, match="no chat template"):
        model(tmp_path / "base", None).chat()
    with pytest.raises(PromptError, match="alters or repeats"):
        model(tmp_path / "twice", PLAIN + "{{ messages[0].content }}").chat("a")


def test_an_error_of_the_model_leaves_the_conversation_as_it_was(llm, monkeypatch):
    with llm.chat(DOCUMENT, method=METHOD, capacity=1024) as chat:
        before = chat.cache
        monkeypatch.setattr("kvjax.inference.generate.check_drawn", lambda *_: (_ for _ in ()).throw(NotFinite("x")))
        with pytest.raises(NotFinite):
            chat.ask("why?")
        assert chat.cache is before and chat.messages == []
