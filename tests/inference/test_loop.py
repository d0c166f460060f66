"""The token loop as one program: its answers, costs and failures are those of the driver that runs token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import METHODS, either
from tiny import make_params
from tokenizers import Tokenizer

import kvjax
from kvjax.cache import callbacks
from kvjax.errors import ConfigError, NoSpace, NotFinite, ReadFailed, StoreClosed
from kvjax.inference import chunked_prefill, decode, loop, prefill, sampling
from kvjax.inference.plan import Slots, make_plan, store_geometry
from kvjax.models.config import ModelConfig
from kvjax.models.tokenizer import TextTokenizer
from kvjax.store.host import HostBranch
from tests.models.test_text_codec import REFERENCE

SIZE = Tokenizer.from_file(str(REFERENCE / "tokenizer.json")).get_vocab_size()
CONFIG = ModelConfig(
    family="llama", vocab_size=SIZE, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=512, tie_embeddings=True,
)
METHOD = kvjax.Quest(budget=24, sinks=2, window=4, page=4)
CONTEXTS = ["Read the block, then write it. " * 3, "Read the block.", "Then write it, and then read it again."]
QUESTIONS = ["Then", "Where is the block that was written?", "it"]
WARM = kvjax.Sampling(temperature=1.5)


@pytest.fixture(scope="module")
def llm():
    """A small random model of one layer, whose answers are bytes of all kinds."""
    return kvjax.LLM(CONFIG, make_params(CONFIG, seed=3, sharper=4), TextTokenizer.from_directory(REFERENCE))


@pytest.fixture(scope="module")
def cache(llm):
    return llm.prefill(CONTEXTS[0], method=METHOD, capacity=512)


def opened(llm, batch, store=None, method=METHOD, **slots):
    """A cache of as many contexts, and their questions."""
    context, question = (texts[:batch] if batch > 1 else texts[0] for texts in (CONTEXTS, QUESTIONS))
    slots = {"slots": kvjax.Slots(**slots)} if slots else {}
    return llm.prefill(context, method=method, store=store, capacity=512, **slots), question


def check_equal(found, expected):
    """Two results are equal in tokens, costs, and every bit of the cache."""
    for name in ("text", "tokens", "ended"):
        assert getattr(found, name) == getattr(expected, name)
    for name in ("steps", "tokens", "attended_tokens", "blocks_needed", "blocks_read"):
        assert getattr(found.usage, name) == getattr(expected.usage, name), name
    assert found.cache.pending == expected.cache.pending
    for one, other in zip(_arrays(found), _arrays(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    if found.cache.branch is not None:
        for name in ("bytes_put", "blocks_read"):
            assert getattr(found.usage.store, name) == getattr(expected.usage.store, name), name
        assert found.cache.branch.generation == expected.cache.branch.generation


def _arrays(result):
    state = result.cache.state
    return jax.tree.leaves(jax.device_get((state.layers, state.length, state.ref.generation, result.cache.logits)))


@pytest.mark.parametrize(("kind", "batch", "how"), either(
    ("memory", 1, kvjax.Sampling(temperature=0.7)), ("flash", 3, WARM), ("io", 1, kvjax.Sampling()),
    ("memory", 3, kvjax.Sampling(temperature=1.5, top_k=50, top_p=0.9)),
    slow=(("memory", 1, kvjax.Sampling()), ("flash", 1, kvjax.Sampling(temperature=0.7)), ("io", 3, WARM)),
))
def test_answers_and_costs_are_those_of_single_tokens(llm, tmp_path, kind, batch, how):
    """Given a batch, sequences end at different draws, and the last one by the number of tokens."""
    store = {"memory": None, "flash": kvjax.FlashStore(directory=tmp_path), "io": kvjax.HostStore()}[kind]
    cache, question = opened(llm, batch, store, **({"backend": "io"} if kind == "io" else {}))
    settings = {"sampling": how, "seed": 7, "max_new_tokens": 24, "driver": "fused"}
    free = llm.generate(question, cache, eos=(), **settings)
    ends = [row[5 * b + 4] for b, row in enumerate(free.tokens[1:])]
    expected = llm.generate(question, cache, eos=ends, **settings)
    assert len(set(map(len, expected.tokens))) == batch and expected.ended != "eos"
    check_equal(llm.generate(question, cache, eos=ends, **settings | {"driver": "loop"}), expected)
    check_equal(llm.generate(question, cache, eos=(), **settings | {"driver": "loop"}), free)


@pytest.mark.parametrize("how", [kvjax.Sampling(), WARM], ids=["greedy", "warm"])
def test_logits_in_sixteen_bits_are_drawn_from_as_they_are_kept(llm, how):
    """In one program, XLA may go on with what was to be rounded, of which fewer are equal."""
    half = kvjax.LLM(CONFIG, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), llm.params), llm.tokenizer)
    cache, question = opened(half, 3)
    settings = {"sampling": how, "max_new_tokens": 32, "eos": ()}
    check_equal(half.generate(question, cache, driver="loop", **settings), half.generate(question, cache, **settings))


@pytest.mark.parametrize(("name", "slots"), [
    ("quest", {"keep": False}), ("quest", {"host": 9}), ("quest", {"prefetch": "step"}), ("dynakv", {}),
])
def test_slots_of_every_kind_go_round(llm, tmp_path, name, slots):
    """Shared slots, which no step has made yet, slots in host memory, reads ahead, and blocks that are rewritten."""
    two = dataclasses.replace(CONFIG, num_layers=2, windows=()) if "keep" in slots else CONFIG
    model = kvjax.LLM(two, make_params(two, seed=3, sharper=4), llm.tokenizer)
    cache, question = opened(model, 1, kvjax.HostStore(), METHODS[name], **slots)
    expected = model.generate(question, cache, max_new_tokens=20, driver="fused")
    check_equal(model.generate(question, cache, max_new_tokens=20, driver="loop"), expected)


@pytest.fixture
def runs(monkeypatch):
    """The most draws of each call of the program."""
    limits, compiled = [], loop.compiled

    def counting(plan, most, params, state, logits, asked):
        limits.append(int(asked.limit))
        return compiled(plan, most, params, state, logits, asked)

    monkeypatch.setattr(loop, "compiled", counting)
    return limits


def test_an_answer_is_one_call_and_a_stream_one_for_32_tokens(llm, cache, runs):
    settings = {"max_new_tokens": 70, "driver": "loop", "eos": ()}
    expected = llm.generate("Then", cache, max_new_tokens=70, eos=())
    assert llm.generate("Then", cache, **settings).tokens == expected.tokens and runs == [70]
    pieces = list(llm.stream("Then", cache, **settings))
    assert "".join(map(str, pieces)) == expected.text and runs[1:] == [32, 32, 6]
    check_equal(pieces[-1].result, expected)


def test_answers_of_about_one_length_share_a_program(llm, cache):
    llm.generate("Then", cache, max_new_tokens=20, driver="loop")
    before = loop.compiled._cache_size()
    for tokens, question in ((1, "it"), (32, "Then read"), (0, "Then"), (7, [])):
        given = llm.generate(question, cache, max_new_tokens=tokens, driver="loop", eos=())
        check_equal(given, llm.generate(question, cache, max_new_tokens=tokens, eos=()))
    warm, warmer = (kvjax.Sampling(temperature=heat) for heat in (0.5, 1.5))
    llm.generate("Then", cache, max_new_tokens=2, driver="loop", sampling=warm)
    assert loop.compiled._cache_size() <= before + 1
    llm.generate("Then", cache, max_new_tokens=2, driver="loop", sampling=warmer)
    assert loop.compiled._cache_size() <= before + 1


def test_a_question_longer_than_a_call_takes_is_fed_in_several(llm, cache, runs, monkeypatch):
    """Given a method that has to see single tokens."""
    monkeypatch.setattr(chunked_prefill, "reads", lambda plan: False)
    question = [5 + i * 7 % 1000 for i in range(2 * loop.GIVEN + 3)]
    expected = llm.generate(question, cache, max_new_tokens=4, eos=())
    check_equal(llm.generate(question, cache, max_new_tokens=4, driver="loop", eos=()), expected)
    assert runs == [0, 0, 4]


@pytest.mark.parametrize("batch", [1, 3])
def test_an_answer_ends_at_a_stop_text_and_the_cache_with_it(llm, batch):
    """Marks are single characters, several, parts of tokens, and texts that nearly come up. Nothing that comes after
    the mark is in the cache."""
    cache, question = opened(llm, batch)
    settings = {"sampling": WARM, "seed": 3, "max_new_tokens": 32, "eos": ()}
    free = llm.generate(question, cache, **settings)
    text = free.text if batch == 1 else free.text[0]
    for stop in (text[10], text[7:12], (text[3:6] + "#", text[20:23]), ("#never#", *free.text[0][:1], text[1:3])):
        expected = llm.generate(question, cache, stop=stop, **settings)
        check_equal(llm.generate(question, cache, stop=stop, driver="loop", **settings), expected)
    pieces = list(llm.stream(question, cache, stop=text[7:12], driver="loop", **settings))
    check_equal(pieces[-1].result, llm.generate(question, cache, stop=text[7:12], **settings))


def test_a_special_token_as_a_stop_ends_an_answer(llm, cache):
    special, number = next(iter(llm.tokenizer.special_ids.items()))
    spoken = _with_logit(llm, number)
    stop = (special, special + "\n")
    expected = spoken.generate("Then", _of(cache, spoken), stop=stop, eos=(), max_new_tokens=12)
    assert expected.ended == "stop"
    check_equal(spoken.generate("Then", _of(cache, spoken), stop=stop, eos=(), max_new_tokens=12, driver="loop"),
                expected)


def _with_logit(llm, token):
    """The model, which draws a certain token after a while."""
    embedding = llm.params["embedding"]["embedding"]
    embedding = embedding.at[token].set(3 * embedding[llm.generate("Then", llm.prefill(CONTEXTS[0], capacity=512),
                                                                   max_new_tokens=6).tokens[0][4]])
    return kvjax.LLM(llm.config, {**llm.params, "embedding": {"embedding": embedding}}, llm.tokenizer)


def _of(cache, llm):
    return dataclasses.replace(cache, fingerprint=llm.fingerprint)


def test_logits_that_are_not_finite_are_an_error_after_the_tokens_before_them(llm, cache):
    """Given a token that has no finite embedding where it is fed, and that is drawn after some others."""
    drawn = llm.generate("Then", cache, max_new_tokens=12, eos=()).tokens[0]
    at = next(i for i, token in enumerate(drawn) if i > 1 and token not in drawn[:i])
    embedding, config = llm.params["embedding"]["embedding"], dataclasses.replace(CONFIG, tie_embeddings=False)
    params = {**llm.params, "lm_head": {"weight": embedding},
              "embedding": {"embedding": embedding.at[drawn[at]].set(jnp.nan)}}
    spoilt = kvjax.LLM(config, params, llm.tokenizer)
    own = dataclasses.replace(_of(cache, spoilt), plan=dataclasses.replace(cache.plan, config=config))
    fed = len(llm.encode("Then", False)) + at + 1
    words = f"after {cache.length[0] + fed} tokens of sequence 0"
    for driver in ("fused", "loop"):
        with pytest.raises(NotFinite, match=words):
            spoilt.generate("Then", own, max_new_tokens=20, eos=(), driver=driver)


def failing(monkeypatch, name, error, skip):
    """Lets a method of branches in host memory fail after it was called a number of times."""
    original, calls = getattr(HostBranch, name), []

    def method(self, *args):
        calls.append(1)
        if len(calls) > skip:
            raise error("no such luck")
        return original(self, *args)

    monkeypatch.setattr(HostBranch, name, method)
    return calls


@pytest.mark.parametrize("backend", callbacks.BACKENDS)
@pytest.mark.parametrize(("name", "expected"), [
    ("_load", ReadFailed), ("_publish", NoSpace), ("_load", KeyboardInterrupt), ("_publish", KeyboardInterrupt),
])
def test_a_token_that_fails_ends_the_loop_and_changes_nothing(llm, monkeypatch, backend, name, expected):
    """The error is the one that the driver of single tokens raises; of a read, the cache is left as it was before."""
    cache, _ = opened(llm, 1, kvjax.HostStore(), backend=backend)
    found = []
    for driver in ("fused", "loop"):
        with monkeypatch.context() as patched, pytest.raises(expected) as caught:
            calls = failing(patched, name, expected, skip=8)
            llm.generate("Then", cache, max_new_tokens=20, driver=driver, eos=())
        found.append((len(calls), getattr(caught.value, "state", None)))
        if name == "_load" and expected is ReadFailed:
            assert caught.value.state is not None
            caught.value.state = None
    (calls, state), (calls_in_loop, state_in_loop) = found
    assert calls == calls_in_loop or expected is KeyboardInterrupt
    for one, other in zip(*(jax.tree.leaves(jax.device_get((state.layers, state.length, state.ref.generation)))
                            if state is not None else [] for state in (state, state_in_loop)), strict=True):
        np.testing.assert_array_equal(one, other)
    answers = [llm.generate("Then", cache, max_new_tokens=20, driver=driver, eos=()) for driver in ("fused", "loop")]
    check_equal(*answers)


def test_a_store_that_is_closed_meanwhile_is_said_to_be_closed(llm, monkeypatch):
    cache, _ = opened(llm, 1, kvjax.HostStore())
    publish, calls = HostBranch._publish, []

    def closing(self, prepared):
        publish(self, prepared)
        calls.append(1)
        if len(calls) == 4:
            self.discard()

    monkeypatch.setattr(HostBranch, "_publish", closing)
    with pytest.raises(StoreClosed):
        llm.generate("Then", cache, max_new_tokens=20, driver="loop", eos=())
    assert len(calls) == 4


def temporaries(plan, params, state, logits):
    """Bytes of temporaries of the whole loop."""
    asked = loop.asked([[1]], np.ones(1, bool), jnp.zeros(SIZE, jnp.uint8), sampling.operands(kvjax.Sampling()),
                       jax.random.key(0), 0, 20)
    traced = loop.compiled.trace(plan, 32, params, state, logits, asked)
    assert not traced.jaxpr.effects, "with which each call would be dispatched in Python"
    return traced.lower().compile().memory_analysis().temp_size_in_bytes


def prefilled(plan, params, branch=None, slots=None):
    return prefill.prefill(plan, params, jnp.ones((1, 20), jnp.int32), jnp.asarray([20]), branch, slots)


@pytest.mark.parametrize("stored", [False, True])
def test_the_pool_is_updated_in_place(llm, stored):
    """Temporaries stay far below the pool, of which a copy would be a part."""
    plan, slots = make_plan(CONFIG, METHOD, 1, 60_000), Slots(count=12_000 if stored else None)
    branch = kvjax.HostStore().create(store_geometry(plan), "test") if stored else None
    state, logits = prefilled(plan, llm.params, branch, slots)
    pool = sum(leaf.nbytes for leaf in jax.tree.leaves(state.layers[0].pool))
    assert temporaries(plan, llm.params, state, logits) < pool / 4


def test_weights_stay_in_their_type(llm):
    """XLA may compute before the first step whatever is the same in all, and so keep a wider copy of the embedding."""
    plan, params = make_plan(CONFIG, METHOD, 1, 512), jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), llm.params)
    wide = 4 * params["embedding"]["embedding"].size
    assert temporaries(plan, params, *prefilled(plan, params)) < wide / 2


@pytest.mark.parametrize(("call", "words"), [
    (lambda llm, cache: llm.generate("Then", cache, driver="loop", observer=print), "observer=.*'fused'"),
    (lambda llm, cache: llm.stream("Then", cache, driver="loop", observer=print), "observer=.*'fused'"),
    (lambda llm, cache: llm.score("Then", cache, driver="loop"), "whole answers.*fused"),
    (lambda llm, cache: decode.step(cache.plan, llm.params, cache.state, np.ones(1), driver="loop"), "whole answers"),
    (lambda llm, cache: llm.generate("Then", llm.prefill(
        "Then", method=METHOD, slots=kvjax.Slots(offload=kvjax.HostStore())), driver="loop"), "offloaded.*staged"),
])
def test_what_a_loop_cannot_do_is_refused_with_another_driver(llm, cache, call, words):
    with pytest.raises(ConfigError, match=words):
        call(llm, cache)
