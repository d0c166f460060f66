"""The three-line API: text in, text out, one prefilled cache for many questions."""

import dataclasses
import errno
import json
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import METHODS, either
from tiny import dense, make_params
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import kvjax
from kvjax.errors import (
    CheckpointError,
    ConfigError,
    FormatMismatch,
    NoSpace,
    NotFinite,
    PromptError,
    StoreClosed,
    StoreError,
)
from kvjax.eval.metrics import Probe
from kvjax.inference import arguments, chunked_prefill, decode, generate
from kvjax.models import checkpoint
from kvjax.models.config import ModelConfig
from kvjax.models.tokenizer import TextTokenizer
from kvjax.ops import quantize
from kvjax.store import interface
from tests.store.faults import FaultySystem

WORDS = ["<eos>", *"abcdefghijklmnopqrstuvwxyz0123456789", "."]
CONFIG = ModelConfig(
    family="llama", vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, max_position=256, tie_embeddings=True,
)
CONTEXT = "the quick brown fox jumps over the lazy dog 0123456789 " * 3
METHOD = kvjax.DynaKV(budget=24, sinks=2, window=4, cluster=4, buffer=3)
QUEST = kvjax.Quest(budget=24, sinks=2, window=4, page=4)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A small random model, written to disk and loaded as a user would."""
    path, params = tmp_path_factory.mktemp("model"), make_params(CONFIG, seed=3, sharper=4)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(path / "tokenizer.json"))
    kvjax.save(kvjax.LLM(CONFIG, params), path)
    return kvjax.load(path)


def test_a_saved_model_is_loaded_as_it_was(llm, tmp_path):
    kvjax.save(llm, tmp_path)
    again = kvjax.load(tmp_path)
    assert again.config == llm.config and again.fingerprint == llm.fingerprint
    jax.tree.map(np.testing.assert_array_equal, again.params, llm.params)


def test_one_cache_answers_many_questions_and_stays_as_it_was(llm, tmp_path):
    cache = llm.prefill(CONTEXT, method=METHOD, store=kvjax.FlashStore(directory=tmp_path))
    first = llm.generate("where", cache, max_new_tokens=8)
    other = llm.generate("who are you", cache, max_new_tokens=8)
    again = llm.generate("where", cache, max_new_tokens=8)
    assert first.tokens == again.tokens and first.tokens != other.tokens
    assert cache.length == [len(CONTEXT)]
    cache.close()


def test_an_answer_goes_on_from_the_cache_of_the_last_one(llm):
    cache = llm.prefill(CONTEXT, method=METHOD)
    first = llm.generate("ab", cache, max_new_tokens=3)
    then = llm.generate("cd", first.cache, max_new_tokens=3)
    told = [*llm.encode("ab", False), *first.tokens[0], *llm.encode("cd", False)]
    whole = llm.generate(told, cache, max_new_tokens=3)
    assert then.tokens == whole.tokens


def test_a_special_token_ends_an_answer(llm):
    """Whose text no answer has; beside marks of several tokens, which are found where one ends."""
    cache = llm.prefill(CONTEXT, method=METHOD)
    free = llm.generate("ab", cache, max_new_tokens=12)
    last = next(i for i, token in enumerate(free.tokens[0]) if i > 2 and token not in free.tokens[0][:i])
    ours = Tokenizer.from_str(llm.tokenizer.tokenizer.to_str())
    ours.add_special_tokens([WORDS[free.tokens[0][last]]])
    other = kvjax.LLM(CONFIG, llm.params, dataclasses.replace(llm.tokenizer, tokenizer=ours))
    for stop in (WORDS[free.tokens[0][last]], ("zzz", WORDS[free.tokens[0][last]])):
        assert other.generate("ab", cache, max_new_tokens=12, stop=stop).tokens == [free.tokens[0][:last]]
    mark = llm.tokenizer.decode(free.tokens[0][last - 1 : last + 1])
    assert llm.generate("ab", cache, max_new_tokens=12, stop=mark).tokens == [free.tokens[0][: last + 1]]


@pytest.mark.parametrize("method", [
    kvjax.SnapKV(budget=24, sinks=2, window=4), kvjax.ChunkKV(budget=24, sinks=2, window=4), METHODS["h2o"],
], ids=lambda method: method.name)
def test_a_method_that_has_to_see_all_of_a_prompt_refuses_chunks(llm, method):
    with pytest.raises(ConfigError, match=r"all of a prompt|single tokens"):
        llm.prefill(CONTEXT, method=method, chunk=16)
    if not method.observes:
        llm.prefill(CONTEXT, method=method, chunk=len(CONTEXT))


def test_a_model_in_another_type_is_the_same_for_what_is_fitted_to_it(llm):
    again = kvjax.load(llm.tokenizer.directory, dtype="bfloat16")
    assert again.identity == llm.identity and again.fingerprint != llm.fingerprint
    other = kvjax.LLM(CONFIG, make_params(CONFIG, seed=4), llm.tokenizer)
    assert other.identity != llm.identity


@pytest.mark.parametrize("method", [kvjax.PQCache(parts=3), kvjax.KVSwap(sigma=512)])
def test_a_method_that_does_not_fit_the_model_costs_no_saved_cache(llm, tmp_path, method):
    """Given a saved cache, and a method for which a new one cannot be made in its file: the file stays as it was."""
    path = tmp_path / "blocks.kv"
    cache = llm.prefill(CONTEXT, method=METHOD, store=kvjax.FlashStore(file=path))
    cache.save(tmp_path)
    cache.close()
    with pytest.raises(ConfigError):
        llm.prefill(CONTEXT, method=method, store=kvjax.FlashStore(file=path))
    llm.restore(tmp_path).close()


def test_what_is_in_memory_is_nothing_that_a_store_was_asked_for(llm):
    """Nothing of a cache in memory, and of a store's no block of its dense layer."""
    found = []
    for first in (0, 1):
        cache = llm.prefill(CONTEXT, method=dataclasses.replace(QUEST, dense_layers=first), store=kvjax.HostStore())
        found.append(llm.generate("ab", cache, max_new_tokens=3).usage.blocks_needed)
    assert 0 < found[1] < found[0]
    assert llm.generate("ab", llm.prefill(CONTEXT, method=QUEST), max_new_tokens=3).usage.blocks_needed == 0


def test_contexts_of_about_one_length_have_the_same_capacity(llm):
    assert {llm.prefill("a" * n, method=QUEST).plan.capacity for n in (3, 150, 256)} == {256 + 1024}
    assert llm.prefill("a" * 257, method=QUEST).plan.capacity == 512 + 1024


def test_a_long_run_is_counted_as_it_goes(llm, monkeypatch):
    cache = llm.prefill([CONTEXT, CONTEXT[:57]], method=METHOD, store=kvjax.HostStore())
    expected = llm.generate(["ab", "c"], cache, max_new_tokens=9).usage
    monkeypatch.setattr(generate, "_MOST_PENDING", 4)
    found = llm.generate(["ab", "c"], cache, max_new_tokens=9).usage
    for name in ("steps", "tokens", "attended_tokens", "blocks_needed", "blocks_read"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.steps == 10


@pytest.mark.parametrize("go_on", ["generate", "extend", "score", "save", "fork"])
def test_what_is_pending_goes_before_whatever_is_asked_next(llm, tmp_path, go_on):
    """The last token of an answer is not fed, and nobody has to think of it."""
    cache = llm.prefill([CONTEXT, CONTEXT[:57]], method=METHOD)
    half = llm.generate(["ab", "c"], cache, max_new_tokens=3)
    assert half.cache.pending == tuple((row[2],) for row in half.tokens)
    said = [[*llm.encode(question, False), *row] for question, row in zip(["ab", "c"], half.tokens, strict=True)]
    more = [llm.encode(text, False) for text in ("zz", "y")]
    expected = llm.generate([a + b for a, b in zip(said, more, strict=True)], cache, max_new_tokens=4)
    after = half.cache
    if go_on == "extend":
        after, more = llm.extend(after, ["zz", "y"], chunk=1), [[], []]
        assert after.pending == ()
    elif go_on == "fork":
        after = after.fork()
    elif go_on == "save":
        after.save(tmp_path)
        after = llm.restore(tmp_path)
    if go_on == "score":
        found, wanted = (llm.score(rows, one) for rows, one in (
            (more, after), ([a + b for a, b in zip(said, more, strict=True)], cache)))
        for some, every in zip(found.logprobs, wanted.logprobs, strict=True):
            np.testing.assert_array_equal(some, every[-len(some):])
        assert found.cache.pending == tuple((row[-1],) for row in more)
        after, more = found.cache, [[], []]
    rest = llm.generate(more, after, max_new_tokens=4)
    assert rest.tokens == expected.tokens and rest.cache.length == expected.cache.length
    full = dataclasses.replace(half.cache, plan=dataclasses.replace(cache.plan, capacity=max(half.cache.length) + 2))
    with pytest.raises(PromptError, match="up to"):
        llm.generate([[], []], full, max_new_tokens=2)


TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ end }}{% endfor %}"


@pytest.mark.parametrize("behind", [True, False])
def test_the_token_that_ends_an_answer_belongs_to_it_where_the_template_has_it(llm, behind):
    free = llm.generate("ab", llm.prefill(CONTEXT, method=METHOD), max_new_tokens=6).tokens[0]
    end = llm.tokenizer.tokenizer.id_to_token(free[2])
    codes = llm.tokenizer.tokenizer.from_str(llm.tokenizer.tokenizer.to_str())
    codes.add_special_tokens([end])
    tokenizer = dataclasses.replace(llm.tokenizer, tokenizer=codes, eos_ids=(free[2],), special_tokens={"end": end},
                                    template=TEMPLATE if behind else None)
    ending = kvjax.LLM(llm.config, llm.params, tokenizer)
    cache = ending.prefill(CONTEXT, method=METHOD)
    ended = ending.generate("ab", cache, max_new_tokens=6)
    assert ended.tokens == [free[:free.index(free[2])]]
    assert ended.cache.pending == (((free[2],) if behind else ()),)
    said = [*ending.encode("ab", False), *ended.tokens[0], *ended.cache.pending[0], *ending.encode("c", False)]
    assert (ending.generate("c", ended.cache, max_new_tokens=3).tokens
            == ending.generate([said], cache, max_new_tokens=3).tokens)


def _spoilt(llm, token: str, value: float):
    """The model, of which the embedding of a token is not finite."""
    params = jax.tree.map(jnp.copy, llm.params)
    embedding = params["embedding"]["embedding"].at[llm.encode(token, False)[0]].set(value)
    return kvjax.LLM(llm.config, {**params, "embedding": {"embedding": embedding}}, llm.tokenizer)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("driver", ["staged", "fused"])
def test_logits_that_are_not_finite_are_an_error_wherever_they_come_up(llm, value, driver, tmp_path):
    spoilt = _spoilt(llm, "z", value)
    words = rf"llama.*fingerprint '{spoilt.fingerprint}'.*float32.*float32.*dtype='bfloat16'"
    for store in (None, kvjax.FlashStore(directory=tmp_path)):
        with pytest.raises(NotFinite, match=words):
            spoilt.prefill("abcz", method=METHOD, store=store, capacity=64)
    with pytest.raises(NotFinite, match=words):
        spoilt.prefill("abcdefgz", method=METHOD, capacity=64, chunk=4)
    # A tied model has NaN in the logits of that token, whatever was fed.
    cache = llm.prefill(CONTEXT, method=METHOD)
    cache = dataclasses.replace(cache, fingerprint=spoilt.fingerprint)
    for sampling in (kvjax.Sampling(), kvjax.Sampling(temperature=1.0), kvjax.Sampling(temperature=1.0, top_k=3)):
        with pytest.raises(NotFinite, match="of sequence 0"):
            spoilt.generate("az", cache, max_new_tokens=3, sampling=sampling, driver=driver)
    with pytest.raises(NotFinite):
        spoilt.score("aza", cache, driver=driver)
    with pytest.raises(NotFinite):
        spoilt.extend(cache, "az", chunk=2)
    assert llm.generate("ab", dataclasses.replace(cache, fingerprint=llm.fingerprint), max_new_tokens=2).tokens


def test_a_sequence_that_has_ended_may_have_any_logits(llm):
    """Its own are of no interest to anybody."""
    cache, none = llm.prefill(["a", "b"], method=METHOD), np.array([-1, 3])
    generate.check_drawn(none, np.array([False, True]), llm.params, cache)
    with pytest.raises(NotFinite, match="sequence 0"):
        generate.check_drawn(none, np.array([True, True]), llm.params, cache)


def test_stores_and_drivers_answer_alike(llm, tmp_path):
    """Given a method with small programs: what drivers make of others is in `test_decode`."""
    memory, host, flash = (
        llm.prefill(CONTEXT, method=QUEST, store=store)
        for store in (None, kvjax.HostStore(), kvjax.FlashStore(directory=tmp_path))
    )
    expected = llm.generate("abc", memory, max_new_tokens=10).tokens
    assert llm.generate("abc", host, max_new_tokens=10).tokens == expected
    assert llm.generate("abc", flash, max_new_tokens=10).tokens == expected
    assert llm.generate("abc", flash, max_new_tokens=10, driver="fused").tokens == expected
    assert llm.generate("abc", flash, max_new_tokens=10, driver="loop").tokens == expected
    flash.close()


def test_a_batch_of_unequal_prompts_and_questions_equals_each_alone(llm):
    """With pages, as a batch rounds differently, and a split of a cluster may turn on the last bit."""
    contexts, questions = [CONTEXT, CONTEXT[:57]], ["abc", "wxyz0123"]
    capacity = len(CONTEXT) + 1024  # what a cache of the longer one has by itself
    together = llm.generate(questions, llm.prefill(contexts, method=QUEST, capacity=capacity), max_new_tokens=8)
    for i in range(2):
        alone = llm.generate(questions[i], llm.prefill(contexts[i], method=QUEST, capacity=capacity), max_new_tokens=8)
        assert together.tokens[i] == alone.tokens[0] and together.text[i] == alone.text


def test_sampling_depends_on_the_seed_alone(llm):
    cache, warm = llm.prefill(CONTEXT, method=METHOD), kvjax.Sampling(temperature=1.0, top_k=20, top_p=0.95)
    one = llm.generate("abc", cache, sampling=warm, seed=1, max_new_tokens=12).tokens
    assert llm.generate("abc", cache, sampling=warm, seed=1, max_new_tokens=12).tokens == one
    assert llm.generate("abc", cache, sampling=warm, seed=2, max_new_tokens=12).tokens != one


def test_generation_ends_at_a_stop_text_or_an_end_token(llm):
    cache = llm.prefill(CONTEXT, method=METHOD)
    free = llm.generate("abc", cache, max_new_tokens=8)
    mark = free.text.replace(" ", "")[2]
    stopped = llm.generate("abc", cache, max_new_tokens=8, stop=(mark,)).tokens
    assert len(stopped[0]) <= 3 and llm.generate("abc", cache, max_new_tokens=8, stop=mark).tokens == stopped
    longer = llm.generate("abc", cache, max_new_tokens=8, stop=mark + "!").tokens  # a text, not its characters
    assert longer == free.tokens
    knowing = dataclasses.replace(llm.tokenizer, eos_ids=(free.tokens[0][3],))  # no file of the model's names one
    other = kvjax.LLM(CONFIG, llm.params, knowing)
    assert len(other.generate("abc", other.prefill(CONTEXT, method=METHOD), max_new_tokens=8).tokens[0]) <= 3
    ending = kvjax.LLM(dataclasses.replace(CONFIG, eos_token_ids=(free.tokens[0][3],)), llm.params, llm.tokenizer)
    assert len(ending.generate("abc", ending.prefill(CONTEXT, method=METHOD), max_new_tokens=8).tokens[0]) <= 3


def test_the_probe_finds_full_recall_for_the_full_cache_and_less_for_a_window(llm):
    found, reading = {}, llm.read(CONTEXT)
    for method in (kvjax.Full(page=8), kvjax.Oracle(budget=24, sinks=2, window=4), kvjax.StreamingLLM(budget=24)):
        cache = llm.prefill(reading, method=method)
        probe = Probe(cache, reading, k=4)
        llm.generate("abcdef", cache, max_new_tokens=4, observer=probe)
        found[method.name] = probe.quality
    assert found["full"].recall == 1.0 and found["full"].attention_mass == pytest.approx(1.0)
    assert found["full"].output_error == pytest.approx(0.0, abs=1e-6)
    assert 0.0 < found["oracle"].output_error < found["streamingllm"].output_error
    assert 1.0 >= found["oracle"].attention_mass > found["streamingllm"].attention_mass
    assert found["oracle"].recall > 0.5 > found["streamingllm"].recall == 0.0


def test_a_probe_of_some_steps_measures_them_as_one_of_all_steps_does(llm):
    reading, layers = llm.read(CONTEXT), CONFIG.num_layers
    cache = llm.prefill(reading, method=METHOD)
    every, third = Probe(cache, reading, k=4), Probe(cache, reading, k=4, every=3)
    for probe in (every, third):
        llm.score("abcdefgh", cache, observer=probe)
    assert len(every.masses) == 7 * layers
    assert third.masses == [mass for step in (0, 3, 6) for mass in every.masses[step * layers : (step + 1) * layers]]


def test_scores_are_those_of_a_forward_pass_and_the_cache_stays(llm, tmp_path):
    contexts, texts = [CONTEXT, CONTEXT[:57]], ["abcde", "xy"]
    cache = llm.prefill(contexts, method=kvjax.Full(page=8), store=kvjax.FlashStore(directory=tmp_path))
    scores = llm.score(texts, cache)
    for i, (context, text) in enumerate(zip(contexts, texts, strict=True)):
        ids = np.asarray([llm.encode(context + text, start=True)])
        logits = dense(llm.params, ids, CONFIG)[0]
        before = jax.nn.log_softmax(logits)[-len(text) - 1 : -1]
        expected = np.asarray(before)[np.arange(len(text)), np.asarray(ids[0, -len(text) :])]
        np.testing.assert_allclose(scores.logprobs[i], expected, atol=2e-4)
        np.testing.assert_array_equal(scores.greedy[i], np.argmax(before, axis=-1) == ids[0, -len(text) :])
    assert scores.usage.steps == 4 and scores.cache.length == [len(CONTEXT) + 4, 57 + 1]
    assert cache.length == [len(CONTEXT), 57]
    answer = llm.generate(["a", "b"], cache, max_new_tokens=3)
    forced = llm.score([[llm.encode(q, False)[0], *t] for q, t in zip("ab", answer.tokens, strict=True)], cache)
    assert all(row[1:].all() for row in forced.greedy)  # what it says itself is what it finds likeliest
    cache.close()


def test_usage_counts_what_was_read(llm, tmp_path):
    cache = llm.prefill(CONTEXT, method=METHOD, store=kvjax.FlashStore(directory=tmp_path))
    usage = llm.generate("abc", cache, max_new_tokens=4).usage
    assert usage.steps == usage.tokens == 3 + 3 and usage.attended_tokens <= 24
    assert 0 < usage.store.blocks_read <= usage.blocks_read  # blocks of which all is yet to be written are in memory
    cache.close()


FEWER = dataclasses.replace(CONFIG, vocab_size=30)


def starting(llm):
    """The model with a tokenizer that begins every text with a token."""
    ours = Tokenizer.from_str(llm.tokenizer.tokenizer.to_str())
    ours.post_processor = processors.TemplateProcessing(single="a $A", special_tokens=[("a", WORDS.index("a"))])
    return kvjax.LLM(CONFIG, llm.params, dataclasses.replace(llm.tokenizer, tokenizer=ours))


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda llm, tmp: llm.prefill(""), PromptError, "empty"),
    (lambda llm, tmp: starting(llm).prefill(["a", ""]), PromptError, "empty"),
    (lambda llm, tmp: starting(llm).prefill(""), PromptError, "empty"),
    (lambda llm, tmp: llm.prefill(None), PromptError, "None is no text"),
    (lambda llm, tmp: llm.prefill([1.7, 2.2]), PromptError, "no sequence of token ids"),
    (lambda llm, tmp: kvjax.LLM(FEWER, make_params(FEWER), llm.tokenizer).prefill("9"), PromptError, "token id 36"),
    (lambda llm, tmp: llm.prefill(CONTEXT, capacity=10), PromptError, "capacity=10"),
    (lambda llm, tmp: llm.prefill(CONTEXT, method=kvjax.Quest(budget=40)), ConfigError, "sinks"),
    (lambda llm, tmp: llm.prefill(CONTEXT, store=kvjax.FlashStore(file=tmp / "no" / "such")), StoreError, "such"),
    (lambda llm, tmp: llm.generate(["a", "b"], llm.prefill(CONTEXT)), PromptError, "2 questions for 1"),
    (lambda llm, tmp: llm.score(["a", ""], llm.prefill([CONTEXT, CONTEXT])), PromptError, "is empty"),
    (lambda llm, tmp: llm.score("abcd", llm.prefill("abc", capacity=6)), PromptError, "7 tokens"),
    (lambda llm, tmp: llm.generate("a" * 50, llm.prefill("ab", capacity=60)), PromptError, "larger capacity"),
    (lambda llm, tmp: llm.prefill(CONTEXT, store=kvjax.FlashStore(directory=tmp, max_bytes=50_000)), NoSpace,
     "are needed, more than"),
    (lambda llm, tmp: kvjax.load(tmp / "nowhere"), CheckpointError, "nowhere"),
    (lambda llm, tmp: kvjax.Quest(aggregation="median"), ConfigError, "median"),
    (lambda llm, tmp: kvjax.Quest(page=0), ConfigError, "page=0"),
    (lambda llm, tmp: kvjax.Quest(dense_layers=-1), ConfigError, "dense_layers=-1"),
    (lambda llm, tmp: llm.prefill(CONTEXT, capacity=0), ConfigError, "capacity=0"),
    (lambda llm, tmp: llm.generate("a", llm.prefill("ab"), max_new_tokens=-1), PromptError, "max_new_tokens=-1"),
    (lambda llm, tmp: decode.check_driver("eager"), ConfigError, "unknown driver 'eager'"),
    (lambda llm, tmp: arguments.check_kinds("quest", None, None), ConfigError, "'quest' is no method"),
    (lambda llm, tmp: arguments.check_kinds(None, "/tmp", None), ConfigError, "'/tmp' is no store"),
    (lambda llm, tmp: llm.prefill(CONTEXT, store=kvjax.HostStore), ConfigError, "HostStore'> is no store"),
    (lambda llm, tmp: kvjax.Slots(offload=kvjax.FlashStore), ConfigError, "offload="),
    (lambda llm, tmp: arguments.check_kinds(None, kvjax.HostStore(), {"count": 3}), ConfigError, "kvjax.Slots"),
    (lambda llm, tmp: arguments.check_generation(2.5, kvjax.Sampling(), 0), PromptError, "max_new_tokens=2.5"),
    (lambda llm, tmp: arguments.check_generation(2, {}, 0), ConfigError, "kvjax.Sampling"),
    (lambda llm, tmp: arguments.check_generation(2, kvjax.Sampling(), None), ConfigError, "seed=None"),
    (lambda llm, tmp: arguments.check_generation(2, kvjax.Sampling(), 2**32), ConfigError, "to 2.32 - 1"),
    (lambda llm, tmp: llm.prefill("abc", capacity=2**31), ConfigError, "capacity=2147483648"),
    (lambda llm, tmp: llm.prefill("ab\ud800"), PromptError, "character 2"),
    (lambda llm, tmp: arguments.marks("", llm.tokenizer), ConfigError, "none of them empty"),
    (lambda llm, tmp: arguments.marks(5, llm.tokenizer), ConfigError, "stop=5"),
    (lambda llm, tmp: arguments.marks("a", None), ConfigError, "no tokenizer.json"),
    (lambda llm, tmp: arguments.check_cache(None), ConfigError, "result's .cache"),
    (lambda llm, tmp: chunked_prefill.check_chunk(2.5), ConfigError, "chunk=2.5"),
    (lambda llm, tmp: quantize.check(np.dtype("int8"), 8), ConfigError, "int8"),
    (lambda llm, tmp: llm.prefill([1, [2, 3]]), PromptError, "no text"),
    (lambda llm, tmp: llm.prefill({"a": 1}), PromptError, "no text"),
    (lambda llm, tmp: kvjax.Sampling(temperature=1e-38), ConfigError, "greedy"),
    (lambda llm, tmp: llm.prefill(CONTEXT, slots=kvjax.Slots(count=9)), ConfigError, "give a store"),
    (lambda llm, tmp: llm.prefill(CONTEXT, slots=kvjax.Slots(count=9, offload=kvjax.HostStore())), ConfigError,
     "give a store"),
    (lambda llm, tmp: llm.prefill(CONTEXT, method=QUEST, store=kvjax.HostStore(), slots=kvjax.Slots(count=1)),
     ConfigError, "slots=1"),
    (lambda llm, tmp: llm.prefill([1, 99]), PromptError, "token id 99"),
    (lambda llm, tmp: llm.generate([-1], llm.prefill("ab")), PromptError, "token id -1"),
    (lambda llm, tmp: kvjax.load(llm.tokenizer.directory, dtype="bf16"), ConfigError, "bf16"),
    (lambda llm, tmp: kvjax.load(llm.tokenizer.directory, dtype="float64"), ConfigError, "float64"),
    (lambda llm, tmp: kvjax.save(llm, llm.tokenizer.directory / "tokenizer.json"), CheckpointError, "choose another"),
], ids=["empty", "one_empty", "only_start", "nothing", "fractions", "foreign_tokenizer", "too_long", "budget",
        "store", "questions", "no_text", "no_room", "room", "space", "model", "rule", "page", "dense", "capacity",
        "negative", "driver", "no_method", "no_store", "store_class", "parked_class", "slots_kind", "length_kind",
        "sampling_kind", "seed_kind",
        "large_seed", "large_capacity", "half_a_character", "empty_stop", "stop_kind", "stop_without_text", "no_cache",
        "chunk_kind", "type_kind", "ragged", "mapping", "cold", "slots", "parked_slots", "no_slots",
        "id", "negative_id", "dtype",
        "wide_dtype", "file"])
def test_bad_input_gets_a_typed_error_that_names_the_cause(llm, tmp_path, call, error, words):
    with pytest.raises(error, match=words):
        call(llm, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_was_read_once_fills_the_same_cache_and_none_of_another_model(llm):
    reading = llm.read([CONTEXT, CONTEXT[:57]])
    for method in (METHOD, kvjax.StreamingLLM(budget=24)):
        answers = [llm.generate(["abc", "de"], llm.prefill(context, method=method), max_new_tokens=6)
                   for context in (reading, [CONTEXT, CONTEXT[:57]])]
        assert answers[0].tokens == answers[1].tokens
        np.testing.assert_array_equal(answers[0].cache.logits, answers[1].cache.logits)
    with pytest.raises(ConfigError, match="chunk=8"):
        llm.prefill(reading, method=METHOD, chunk=8)
    other = kvjax.LLM(CONFIG, jax.tree.map(lambda leaf: leaf + 1, llm.params), llm.tokenizer)
    with pytest.raises(FormatMismatch, match="read by the model"):
        other.prefill(reading, method=METHOD)
    with pytest.raises(FormatMismatch, match="the cache is of the model"):
        other.generate("a", llm.prefill("ab"))


def test_given_ids_may_be_arrays(llm):
    ids = llm.encode(CONTEXT, start=True)
    expected = llm.generate("abc", llm.prefill(ids, method=QUEST), max_new_tokens=4).tokens
    question = jnp.asarray(llm.encode("abc", start=False))
    assert llm.generate(question, llm.prefill(np.asarray(ids), method=QUEST), max_new_tokens=4).tokens == expected


def test_a_sequence_that_has_ended_reads_nothing(llm):
    """A batch with questions of unequal lengths needs the blocks that its sequences need alone."""
    contexts, questions = [CONTEXT, CONTEXT[:57]], ["a", "wxyz01234567"]
    capacity = len(CONTEXT) + 64
    usage = [
        llm.generate(question, llm.prefill(context, method=QUEST, store=kvjax.HostStore(), capacity=capacity),
                     max_new_tokens=1).usage
        for context, question in [*zip(contexts, questions, strict=True), (contexts, questions)]
    ]
    assert usage[2].steps == 12 and usage[2].tokens == 13
    assert usage[2].blocks_needed == usage[0].blocks_needed + usage[1].blocks_needed
    assert usage[2].blocks_read == usage[0].blocks_read + usage[1].blocks_read
    parts = usage[0].attended_tokens + 12 * usage[1].attended_tokens
    assert usage[2].attended_tokens == pytest.approx(parts / 13)


def test_a_generation_that_fails_closes_its_fork(llm):
    cache, handles = llm.prefill(CONTEXT, method=QUEST, store=kvjax.HostStore()), []

    def fail(step, tokens):
        handles.append(int(step.state.ref.handle))
        raise RuntimeError("observed")

    with pytest.raises(RuntimeError, match="observed") as caught:
        llm.generate("abc", cache, observer=fail)
    with pytest.raises(StoreClosed):
        interface.lookup(handles[0]).flush()
    cache.flush()
    assert caught.traceback  # which keeps the fork alive


def test_a_generation_that_fails_says_why_whatever_the_device_says(llm, tmp_path):
    """Given tokens that wait to be written to a device that is full: nobody wants them any more."""
    store = kvjax.FlashStore(directory=tmp_path)
    store.system = FaultySystem()
    cache = llm.prefill(CONTEXT, method=QUEST, store=store)
    cache.flush()

    def fail(step, tokens):
        store.system.fail("pwrite", errno.ENOSPC)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate("abcdefgh", cache, observer=fail)
    store.system.heal()
    assert llm.generate("abc", cache, max_new_tokens=4).tokens == llm.generate(
        "abc", llm.prefill(CONTEXT, method=QUEST), max_new_tokens=4
    ).tokens


@pytest.mark.parametrize(("settings", "driver"), either(
    ({}, "fused"), ({"lookahead": True}, "fused"), ({"reuse": 2}, "staged"),
    slow=(({}, "staged"), ({"lookahead": True}, "staged"), ({"reuse": 2}, "fused")),
))
def test_models_in_sixteen_bits_decode(llm, driver, settings):
    """Nearly as in 32 bits: the loss of a text is the same to what bfloat16 can tell."""
    half = kvjax.LLM(CONFIG, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), llm.params), llm.tokenizer)
    method = dataclasses.replace(QUEST, **settings)
    found, expected = (
        np.mean(model.score("abcdef", model.prefill(CONTEXT, method=method, dtype=dtype), driver=driver).logprobs[0])
        for model, dtype in ((half, "bfloat16"), (llm, "float32"))
    )
    assert found == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("method", "settings"), [
    (kvjax.KVSwap(budget=24, sinks=2, window=4, group=4, sigma=2), {}), (QUEST, {}), (QUEST, {"layout": "sequential"}),
], ids=["kvswap", "quest", "sequential"])
def test_a_quota_of_what_is_written_is_enough(llm, tmp_path, method, settings):
    path = tmp_path / "blocks.kv"
    llm.prefill(CONTEXT, method=method, store=kvjax.FlashStore(file=path, **settings), capacity=240).close()
    least = -(-path.stat().st_size // 4096) * 4096
    llm.prefill(CONTEXT, method=method, store=kvjax.FlashStore(file=path, max_bytes=least, **settings),
                capacity=240).close()


def test_special_tokens_and_chat_template_are_saved(llm, tmp_path):
    chatty = dataclasses.replace(
        llm.tokenizer, special_tokens={"eos_token": "<eos>", "bos_token": "a"}, template="{{ messages[0].content }}!"
    )
    kvjax.save(kvjax.LLM(CONFIG, llm.params, chatty), tmp_path)
    again = kvjax.load(tmp_path)
    assert again.tokenizer.special_tokens == chatty.special_tokens and again.tokenizer.bos_id == WORDS.index("a")
    assert again.eos_ids == (WORDS.index("<eos>"),)
    assert again.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi!"


def test_a_saved_model_is_the_one_that_it_was(llm, tmp_path):
    """Given a tokenizer.json with what is not kept of it, and in other lines: tunings and adapters know the model."""
    kvjax.save(llm, tmp_path / "first")
    file = tmp_path / "first" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(content))
    first = kvjax.load(tmp_path / "first")
    kvjax.save(first, tmp_path / "second")
    assert kvjax.load(tmp_path / "second").identity == first.identity != llm.identity
    assert len(first.encode(CONTEXT, start=False)) > 8


def test_a_save_that_fails_leaves_the_model_before(llm, tmp_path, monkeypatch):
    """Given a disk that is full when weights are written: a typed error, and every file as it was."""
    kvjax.save(llm, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    other = dataclasses.replace(llm.tokenizer, special_tokens={"bos_token": "b"})
    with pytest.raises(CheckpointError, match=r"cannot be written .*No space left"):
        kvjax.save(kvjax.LLM(CONFIG, llm.params, other), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_tied_model_with_an_unembedding_of_its_own_says_what_its_weights_say(llm, tmp_path):
    """Not what its settings say, as transformers does; and it is saved as what it is."""
    own = dataclasses.replace(CONFIG, tie_embeddings=False)
    untied = kvjax.LLM(own, make_params(own, seed=3), llm.tokenizer)
    kvjax.save(untied, tmp_path / "model")
    settings = tmp_path / "model" / "config.json"
    settings.write_text(settings.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    with pytest.warns(UserWarning, match=r"lm_head\.weight is not the embedding"):
        loaded = kvjax.load(tmp_path / "model")
    assert loaded.config == own
    kvjax.save(loaded, tmp_path / "again")
    for other in (loaded, kvjax.load(tmp_path / "again")):
        scores = [one.score("abc", one.prefill("hello")).logprobs[0] for one in (untied, other)]
        np.testing.assert_array_equal(*scores)


def test_a_context_does_not_end_with_what_a_tokenizer_ends_texts_with(llm):
    ours = Tokenizer.from_str(llm.tokenizer.tokenizer.to_str())
    first, end = WORDS.index("a"), WORDS.index("<eos>")
    ours.post_processor = processors.TemplateProcessing("a $A <eos>", special_tokens=[("a", first), ("<eos>", end)])
    other = kvjax.LLM(CONFIG, llm.params, dataclasses.replace(llm.tokenizer, tokenizer=ours, eos_ids=(end,)))
    assert ours.encode("bc").ids == [first, *llm.encode("bc", False), end]
    assert other.encode("bc", start=True) == [first, *llm.encode("bc", False)]
    ours.add_special_tokens(["<eos>"])  # so that it can be written
    assert other.encode("bc<eos>", start=True) == [first, *llm.encode("bc", False), end]


GOLDENS = pathlib.Path(__file__).parent / "goldens" / "tokenizers"
END = "<|im_end|>"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A small random model with a tokenizer that puts a space before every text, and a special token more."""
    path = tmp_path_factory.mktemp("llama")
    (path / "tokenizer.json").write_bytes((GOLDENS / "llama2.json").read_bytes())
    added = {"480": {"content": END, "special": True, "normalized": False}}
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "added_tokens_decoder": added}))
    config = dataclasses.replace(CONFIG, vocab_size=481, eos_token_ids=(7,))
    return kvjax.LLM(config, make_params(config), TextTokenizer.from_directory(path))


def saying(monkeypatch, *rows):
    """Lets the next answers be given tokens."""
    columns = iter(np.asarray(rows).T)
    monkeypatch.setattr(generate.sampling, "sample", lambda how, logits, key: next(columns))


def test_a_text_in_pieces_is_the_whole_text(llama, monkeypatch):
    whole = llama.encode("The pass key is the the", start=True)
    first = llama.encode("The pass", start=True)
    question, said = (llama.encode(text, start=False) for text in (" key is", " the the"))
    assert first + question + said == whole
    saying(monkeypatch, said)
    cache = llama.prefill("The pass", method=QUEST)
    answer = llama.generate(" key is", cache, max_new_tokens=len(said))
    assert answer.text == " the the" and answer.cache.length == [len(whole) - 1]


def test_a_text_that_begins_with_what_every_text_begins_with_begins_once(llama):
    assert llama.encode("<s>the key", start=True) == [1, *llama.tokenizer.codec.encode("the key")]
    assert llama.encode("<s>", start=True) == llama.encode("", start=True) == [1]


def test_a_stop_with_a_special_token_ends_an_answer_and_is_cut_from_it(llama, monkeypatch):
    said = [llama.encode(text, start=False) for text in (f" the key{END}\nmore", " the the key is the the the")]
    length = min(map(len, said))
    saying(monkeypatch, *(row[:length] for row in said))
    cache = llama.prefill(["the", "key"], method=QUEST)
    answer = llama.generate([" is", " is"], cache, max_new_tokens=length, stop=(f"{END}\n", "!"))
    assert answer.text == [" the key", llama.tokenizer.decode_continuation(said[1][:length])]
    assert answer.tokens == [llama.encode(" the key", start=False), said[1][:length]]


def test_end_tokens_are_those_of_model_and_tokenizer(llama):
    assert llama.eos_ids == (7, 2)


def test_a_character_that_question_and_answer_share_is_the_answers(llama, monkeypatch):
    first, *rest = llama.encode("é the", start=False)
    saying(monkeypatch, rest)
    answer = llama.generate([first], llama.prefill("key", method=QUEST), max_new_tokens=len(rest))
    assert answer.text == "é the"


def test_prompts_beyond_what_a_model_was_made_for_are_read_with_a_warning(llm):
    with pytest.warns(UserWarning, match="300 tokens, and the model was made for 256"):
        llm.prefill([1] * 300, method=QUEST)


@pytest.mark.parametrize(("settings", "what"), [
    ({"dense_layers": 2}, r"dense_layers=2 are all 2 layers .* quest has no effect"),
    ({"dense_layers": 1, "reuse": 2}, "reuse=2 has no effect"),
])
def test_settings_that_do_nothing_in_a_model_are_warned_of(llm, settings, what):
    with pytest.warns(UserWarning, match=what):
        llm.prefill([1] * 40, method=dataclasses.replace(QUEST, **settings), capacity=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.prefill([1] * 40, method=dataclasses.replace(QUEST, dense_layers=1), capacity=64)
        llm.prefill([1] * 40, method=dataclasses.replace(QUEST, reuse=2), capacity=64)
