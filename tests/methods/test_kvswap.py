"""Methods that predict attention from compressed keys, against brute force; adapters on their way into a cache."""

import dataclasses
import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from harness import (
    APART,
    CAPACITY,
    GROUP,
    HEADS,
    SIZE,
    Sim,
    Stream,
    check_every_token_has_one_place,
    plan_of,
    selection,
)
from tiny import make_params

import kvjax
from kvjax.cache.read import choose
from kvjax.cache.types import Context
from kvjax.errors import ConfigError, FormatMismatch, PromptError, ReadFailed
from kvjax.methods import InfiniGen, KVSwap, Loki
from kvjax.methods.shared import lowrank
from kvjax.methods.shared.adapters import Adapters
from kvjax.models.config import ModelConfig
from kvjax.ops import kernels, lowbit
from kvjax.ops.topk import AGGREGATIONS, aggregate

SMALL = {"budget": 24, "sinks": 2, "window": 4}
PROMPT, STEPS = 51, 13
RNG = np.random.default_rng(3)
BASIS = RNG.normal(size=(HEADS, SIZE, 3)).astype(np.float32)
Q = RNG.normal(size=(HEADS, GROUP, SIZE)).astype(np.float32)
FITTED = {joint: Adapters([BASIS], joint, "some model") for joint in (True, False)}


def softmax(scores):
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def brute_force_groups(method, keys, basis, joint):
    """Groups `[K, n]` by the paper's formulas, best first, an unfinished one before all; keys `[T, K, D]`."""
    low = np.einsum("tkd,kdr->tkr", keys, basis)
    low = np.broadcast_to(low.sum(1, keepdims=True), low.shape) if joint else low
    scores = np.einsum("kgr,tkr->kgt", np.einsum("kgd,kdr->kgr", Q, basis), low) / np.sqrt(SIZE)
    scores = softmax(scores) if method.aggregation.startswith("softmax") else scores
    token = scores.sum((0, 1))[None].repeat(HEADS, 0) if method.shared else scores.sum(1)
    missing = -len(keys) % method.group
    best = np.pad(token, ((0, 0), (0, missing)), constant_values=-np.inf).reshape(HEADS, -1, method.group).max(-1)
    best[:, -1] = np.inf if missing else best[:, -1]
    return np.argsort(-best, axis=-1, kind="stable")


def after_decoding(method):
    """A simulation of two sequences, and the first one's stored keys `[T, K, D]`, in token order."""
    sim = decoded(dataclasses.replace(method, shared=True, aggregation="mean"))
    return sim, sim.stream.k[0, method.sinks : PROMPT + STEPS - method.window + 1]


@functools.cache
def decoded(method):
    """What is kept does not depend on how scores become a selection."""
    sim = Sim(method, Stream.rows(1, 2), [PROMPT, PROMPT])
    sim.run(STEPS)
    return sim


@pytest.mark.parametrize(("joint", "shared", "group", "rule"), [
    (True, True, 4, "softmax_mean"), (True, True, 4, "mean"), (True, False, 4, "mean"), (False, True, 4, "mean"),
    (False, False, 1, "softmax_mean"),
])
def test_groups_are_selected_as_brute_force_ranks_them(joint, shared, group, rule):
    """Given adapters, a prompt and decoded tokens, the last of them in an unfinished group unless G = 1."""
    method = KVSwap(**SMALL, group=group, shared=shared, aggregation=rule, adapters=FITTED[joint])
    sim, keys = after_decoding(method)
    block = selection(sim, 0, Q, method).block
    assert group == 1 or len(keys) % group
    np.testing.assert_array_equal(block, brute_force_groups(method, keys, BASIS, joint)[:, : block.shape[1]])


@pytest.mark.parametrize("joint", [True, False], ids=["joint", "per_head"])
def test_without_adapters_the_prompts_own_keys_are_decomposed(joint):
    method = KVSwap(**SMALL, sigma=4, per_head=not joint)
    sim = Sim(method, Stream.rows(1, 2), [PROMPT, PROMPT])
    prompt = sim.stream.k[0, SMALL["sinks"] : PROMPT - SMALL["window"] + 1]
    parts = [prompt.reshape(len(prompt), -1)] if joint else list(prompt.swapaxes(0, 1))
    adapter = np.asarray(sim.cache.state.index.adapter)[0]
    found = adapter.reshape(len(parts), -1, adapter.shape[-1])
    for part, basis in zip(parts, found, strict=True):
        expected = np.linalg.svd(part, full_matrices=False)[2][: part.shape[1] // 4].T
        np.testing.assert_allclose(np.abs(expected.T @ basis), np.eye(basis.shape[1]), atol=1e-3)


@pytest.mark.parametrize("joint", [True, False], ids=["joint", "per_head"])
@pytest.mark.parametrize("prompt", [1, SMALL["sinks"] + SMALL["window"] + 2])
def test_after_a_short_prompt_no_head_is_left_out(joint, prompt):
    """Directions that its tokens do not give are orthogonal to theirs, and say as much of one head as of another."""
    method = KVSwap(**SMALL, sigma=2, per_head=not joint)
    sim = Sim(method, Stream.draw(1), [prompt, prompt])
    adapter = np.asarray(sim.cache.state.index.adapter)
    parts = adapter.reshape(2, 1 if joint else HEADS, -1, adapter.shape[-1])
    np.testing.assert_allclose(parts.swapaxes(-1, -2) @ parts, np.broadcast_to(
        np.eye(adapter.shape[-1]), (*parts.shape[:2], *[adapter.shape[-1]] * 2)), atol=1e-5)
    share = np.square(adapter).sum((2, 3)) / np.square(adapter).sum((1, 2, 3))[:, None]
    assert share.min() > 0.2


def test_adapters_for_all_heads_are_not_those_of_each_head():
    with pytest.raises(ConfigError, match="per_head=True, but the adapters are for all heads together"):
        KVSwap(**SMALL, per_head=True, adapters=FITTED[True])
    assert not KVSwap(**SMALL, per_head=True, adapters=FITTED[False]).joint


def test_adapters_that_keep_everything_predict_the_true_scores():
    method = KVSwap(**SMALL, sigma=1)
    sim, keys = after_decoding(method)
    index = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], sim.cache.state.index)
    expected = np.einsum("kgd,tkd->kgt", Q, keys) / np.sqrt(SIZE)
    found = jax.jit(lowrank.predict_by_token)(index, lowrank.project(index, Q))[0, : len(keys)]
    np.testing.assert_allclose(found, expected.reshape(-1, len(keys)).T, atol=1e-3)


@pytest.mark.parametrize(("bits", "joint"), [(8, True), (4, True), (4, False), (2, True)])
def test_keys_in_few_bits_are_near_those_in_floats_and_score_as_what_they_are(bits, joint):
    """Given decoded tokens too; what is rare, or lies beyond the prompt's, is clipped."""
    method = KVSwap(**SMALL, sigma=2, per_head=not joint)
    whole, few = (decoded(dataclasses.replace(method, bits=bits)).cache.state.index for bits in (32, bits))
    assert few.key.nbytes * 32 == whole.key.nbytes * bits
    index = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], few)
    moved = lowbit.unpack(token_by_token(index), bits).astype(jnp.float32) * index.scale[:, None]
    key, count = moved + index.centre[:, None], int(index.stored)
    floats = np.asarray(token_by_token(jax.tree.map(lambda leaf: leaf[0], whole)))[:, :count]
    step, largest, share = {8: (1, 127, 0.8), 4: (1, 7, 0.8), 2: (2, 3, 0.7)}[bits]
    near = np.abs(key[:, :count] - floats) <= 0.501 * step * np.asarray(index.scale)[:, None]
    largest *= np.asarray(index.scale)[:, None]
    assert near.mean() > share and (near | (np.abs(floats - np.asarray(index.centre)[:, None]) > largest)).all()
    low = lowrank.project(index, Q)
    found = jax.jit(lowrank.predict_by_dimension)(index, low)[..., :count]
    numbers, queries = key[:, :count], low.reshape(key.shape[0], -1, low.shape[-1])
    off = np.abs(queries * index.scale[:, None]).max(-1, keepdims=True) / 254  # queries are whole numbers of steps, too
    codes, expected = np.abs(moved[:, :count] / index.scale[:, None]), np.einsum("fnr,fqr->fqn", numbers, queries)
    assert (np.abs(found - expected) <= off * codes.sum(-1)[:, None] + 1e-5).all()
    assert np.corrcoef(np.ravel(found), np.ravel(expected))[0, 1] > 0.999


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_keys_in_few_bits_with_a_bias_are_scored_as_well_as_without(bits, joint):
    """The bias is 600 times as large as what tells keys apart, and takes none of the codes."""
    method, rng = KVSwap(**SMALL, sigma=1, per_head=not joint, bits=bits), np.random.default_rng(3)
    bias = rng.normal(size=(HEADS, 1, SIZE))
    bias *= 605 / np.linalg.norm(bias, axis=-1, keepdims=True)
    keys, spec = rng.normal(size=(HEADS, 80, SIZE)), plan_of(method).spec
    exact = np.einsum("kgd,ktd->kgt", Q, keys) / np.sqrt(SIZE)
    worst = []
    for moved in (keys, keys + bias):
        index = _built(method, spec, moved.astype(np.float32))
        found = lowrank.predict_by_dimension(index, lowrank.project(index, Q))[..., : keys.shape[1]]
        off = np.asarray(found).reshape(exact.shape) - exact
        worst.append((off - off.mean(-1, keepdims=True)).std() / exact.std())
    assert worst[1] < 1.5 * worst[0] < {8: 0.03, 4: 0.5}[bits]


def _built(method, spec, keys):
    """The index of one prompt that is all middle part."""
    pos = np.arange(keys.shape[1], dtype=np.int32)
    context = Context(keys, pos, pos >= 0, 0 * pos, jnp.zeros((HEADS, GROUP, 0, SIZE)), jnp.zeros(0, jnp.int32))
    return jax.jit(lambda: method.build(spec, method.init(spec, ()), context)[0])()


@pytest.mark.parametrize(("bits", "joint"), [(32, True), (32, False), (4, True), (4, False)])
def test_raw_scores_summed_over_heads_are_those_of_the_mean_query(bits, joint):
    method = KVSwap(**SMALL, sigma=2, per_head=not joint, bits=bits)
    index = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], decoded(method).cache.state.index)
    low = lowrank.project(index, Q)
    if index.by_token:
        expected = np.mean(lowrank.predict_by_token(index, low), axis=-1)[0]
    else:
        expected = np.mean(lowrank.predict_by_dimension(index, low), axis=(0, 1))
    raw = dataclasses.replace(method, aggregation="mean")
    found, count = raw._importance(index, jnp.asarray(Q))[0], int(index.stored)
    close = 1e-5 if bits == 32 else 0.02  # queries are rounded, each in its own way
    np.testing.assert_allclose(found[:count], expected[:count], atol=close * np.abs(expected[:count]).max())


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_importance_is_the_mean_of_softmaxes(bits, joint, shared):
    method = KVSwap(**SMALL, sigma=2, per_head=not joint, bits=bits, shared=shared)
    index = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], decoded(method).cache.state.index)
    scores = lowrank.predict_by_dimension(index, lowrank.project(index, Q))
    expected = aggregate(scores.reshape(1 if shared else len(Q), -1, index.tokens), "softmax_mean")
    found = method._importance(index, jnp.asarray(Q))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)
    seen = jnp.arange(index.tokens) >= 30  # what a sliding window hides has no part in it
    scores = jnp.where(seen, scores, -jnp.inf)
    expected = aggregate(scores.reshape(1 if shared else len(Q), -1, index.tokens), "softmax_mean")
    found = method._importance(index, jnp.asarray(Q), seen)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize(("heads", "group", "size", "rank", "tokens"), [
    (2, 2, 16, 6, 100), (3, 3, 24, 12, 436), (5, 1, 16, 4, 516), (8, 4, 64, 8, 2048), (8, 4, 64, 64, 4092),
])
def test_what_selects_for_a_whole_batch_scores_each_sequence_as_if_alone(joint, bits, heads, group, size, rank, tokens):
    method = KVSwap(**SMALL, per_head=not joint, aggregation="mean", bits=bits)
    assert not KVSwap(**SMALL).selects_together
    assert method.selects_together or not (bits == 32 or kernels.COMPILED)
    rng, each = np.random.default_rng(tokens), max(1, 8 // bits)
    shape = (1 if joint else heads, rank // each, tokens)
    shape = shape if bits < 32 or not joint else (1, tokens, rank)
    adapter, key, q = (jnp.asarray(rng.normal(size=(3, *one)), jnp.float32)
                       for one in ((heads, size, rank), shape, (heads, group, size)))
    scale = None
    if bits < 32:
        key = jnp.asarray(rng.integers(0, 256, key.shape, np.uint8))
        scale = jnp.asarray(rng.uniform(size=(3, shape[0], rank)), jnp.float32)
    index = lowrank.CompressedKeys(adapter, key, jnp.full(3, tokens - 3, jnp.int32), scale, together=joint)
    together, alone = jax.jit(jax.vmap(method._importance))(index, q), jax.jit(method._importance)
    for b in range(3):
        np.testing.assert_array_equal(together[b], alone(*jax.tree.map(operator.itemgetter(b), (index, q))))


@pytest.mark.parametrize("aggregation", ["softmax_mean", "mean"])
@pytest.mark.parametrize(("bits", "joint", "shared"), [(4, True, True), (4, False, True), (4, False, False),
                                                     (32, True, True)])
def test_a_batch_chooses_as_each_sequence_alone(bits, joint, shared, aggregation):
    method = KVSwap(**SMALL, sigma=2, per_head=not joint, bits=bits, shared=shared)
    state = decoded(method).cache.state
    plan = plan_of(dataclasses.replace(method, aggregation=aggregation))
    query = jnp.asarray(RNG.normal(size=(2, HEADS * GROUP, SIZE)), jnp.float32)
    both = choose(plan, state, query)
    for i in range(2):
        alone = choose(plan, jax.tree.map(lambda leaf, i=i: leaf[i:i + 1], state), query[i:i + 1])
        np.testing.assert_array_equal(both.need[i], alone.need[0])
    assert (np.asarray(both.need[0]) != np.asarray(both.need[1])).any()


def test_sixteen_sequences_on_flash_attend_as_each_alone(tmp_path):
    """Given prompts of unequal lengths and a reuse buffer, which has some of the groups that a step needs."""
    method, stream, lengths = KVSwap(**SMALL, sigma=2, bits=4, per_head=True), Stream.draw(5, 16), range(69, 85)
    reuse = {"store": kvjax.FlashStore(directory=tmp_path), "slots": 12, "policy": "fifo"}
    sim = Sim(method, stream, lengths, **reuse)
    together, needed, read = [], 0, 0
    for _ in range(12):
        out, report = sim.step()
        together.append(out)
        needed, read = needed + report.stats.requested.sum(), read + report.stats.missed.sum()
    assert 0 < read < 0.8 * needed
    for b, length in enumerate(lengths):
        alone = Sim(method, stream.row(b), [length], **reuse).run(12)
        np.testing.assert_allclose(np.stack(together)[:, b], alone[:, 0], atol=APART, rtol=0)


def token_by_token(index):
    """Keys of one sequence `[F, N, X]`, however they lie."""
    return index.key if index.by_token else index.key.swapaxes(1, 2)


def test_scales_are_not_taken_from_a_few_tokens(params):
    llm = kvjax.LLM(tiny.CONFIG, params)
    with pytest.raises(PromptError, match=f"needs {64 + 2 + 3} tokens of it where there are 60"):
        llm.prefill([1] * 60, method=KVSwap(**SMALL, sigma=2, bits=4))


def test_components_of_all_heads_are_not_lokis():
    with pytest.raises(ConfigError, match="per_head"):
        Loki(per_head=False)


def test_bits_that_there_are_not_are_refused():
    with pytest.raises(ConfigError, match="bits=3"):
        KVSwap(bits=3)
    with pytest.raises(ConfigError, match="whole bytes"):
        decoded(KVSwap(**SMALL, sigma=HEADS * SIZE, bits=4))


@pytest.mark.parametrize("rule", AGGREGATIONS)
def test_scores_are_aggregated_alike_whichever_way_they_lie(rule):
    scores = jnp.asarray(3 * RNG.normal(size=(1, 6, 40)), jnp.float32)
    found = lowrank.aggregate_where_they_lie(scores.swapaxes(1, 2), rule)
    np.testing.assert_allclose(found, aggregate(scores, rule), rtol=1e-5, atol=1e-6)


def test_an_unfinished_group_is_attended_by_the_rolling_buffer_alone():
    """Given a group of 8 of which decoding fills one row after the other."""
    for rolling in (True, False):
        method = KVSwap(**{**SMALL, "budget": 32}, group=8, sigma=2, rolling_buffer=rolling)
        sim, seen = Sim(method, Stream.draw(2), [46, 30]), []
        for _ in range(16):
            newest = sim.at - SMALL["window"]  # left the window last
            _, report = sim.step()
            unfinished = (newest - SMALL["sinks"] + 1) % 8 != 0
            attended = (np.asarray(report.selected) == newest[:, None, None]).any(-1)
            seen += attended[unfinished].ravel().tolist()
            check_every_token_has_one_place(sim)
        assert all(seen) if rolling else not any(seen)


def test_infinigen_keeps_the_dimensions_with_the_largest_magnitudes():
    method = InfiniGen(**SMALL, sigma=2)
    spec = method.spec(kv_heads=HEADS, group=GROUP, head_dim=SIZE, capacity=CAPACITY)
    key = RNG.normal(size=(HEADS, 20, SIZE)).astype(np.float32) * RNG.uniform(0, 3, (HEADS, 1, SIZE))
    query = RNG.normal(size=(HEADS, GROUP, 5, SIZE)).astype(np.float32)
    context = kvjax.cache.types.Context(
        key=jnp.asarray(key, jnp.float32), pos=jnp.arange(20, dtype=jnp.int32), valid=jnp.arange(20) < 17,
        token=jnp.full(20, -1, jnp.int32), query=jnp.asarray(query),
        query_pos=jnp.asarray([-1, -1, 14, 15, 16], jnp.int32),
    )
    index, _ = jax.device_get(jax.jit(method.build, static_argnums=0)(spec, method.init(spec, ()), context))
    magnitude = np.abs(key[:, :17]).mean(1) + np.abs(query[:, :, 2:]).mean((1, 2))
    for head in range(HEADS):
        kept = set(np.argsort(-magnitude[head])[: SIZE // 2])
        assert set(np.flatnonzero(np.asarray(index.adapter[head]).any(-1))) == kept
        low = np.asarray(index.key[head, :, :17].T)
        np.testing.assert_array_equal(np.sort(low), np.sort(key[head, :17][:, sorted(kept)].astype(np.float32)))


def test_loki_and_infinigen_select_tokens_for_each_head():
    """Given what the paper compares with, heads have projections and selections of their own."""
    for method in (Loki(), InfiniGen()):
        assert not method.head_shared and method.group == 1 and method.lookahead
    assert InfiniGen(shared=True).head_shared and KVSwap().head_shared and KVSwap(shared=False).head_shared
    assert KVSwap().fetches_alike and not KVSwap(shared=False).fetches_alike and not Loki().fetches_alike


# adapters in a model ------------------------------------------------------------------------------

CONFIG = ModelConfig(
    family="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=128,
)
TEXT = RNG.integers(0, 64, 40).tolist()


@pytest.fixture(scope="module")
def llm():
    return kvjax.LLM(CONFIG, make_params(CONFIG, sharper=1))


def adapters_of(llm, layers=2, size=8):
    return Adapters([RNG.normal(size=(2, size, 4)) for _ in range(layers)], True, llm.identity)


def answer(llm, cache):
    return llm.generate([1, 2, 3], cache, max_new_tokens=4).tokens


def test_every_layer_gets_its_own_adapters_and_a_file_serves_as_well(llm, tmp_path):
    fitted = adapters_of(llm)
    fitted.save(tmp_path / "adapters")
    cache = llm.prefill(TEXT, method=KVSwap(**SMALL, adapters=fitted), capacity=64)
    for one, basis in zip(cache.state.layers, fitted.layers, strict=True):
        np.testing.assert_array_equal(one.state.index.adapter[0], basis)
    again = llm.prefill(TEXT, method=KVSwap(**SMALL, adapters=str(tmp_path / "adapters")), capacity=64)
    np.testing.assert_array_equal(answer(llm, cache), answer(llm, again))


def test_a_saved_cache_knows_its_adapters_by_their_file(llm, tmp_path):
    adapters_of(llm).save(tmp_path / "adapters")
    method = KVSwap(**SMALL, adapters=str(tmp_path / "adapters"))
    cache = llm.prefill(TEXT, method=method, capacity=64)
    cache.save(tmp_path / "cache")
    found = llm.restore(tmp_path / "cache")
    assert found.plan.layers[0].method == method
    assert answer(llm, found) == answer(llm, cache)


def test_adapters_that_are_a_value_are_given_to_restore_again(llm, tmp_path):
    method = KVSwap(**SMALL, adapters=adapters_of(llm))
    cache = llm.prefill(TEXT, method=method, capacity=64)
    cache.save(tmp_path)
    with pytest.raises(ConfigError, match=r"kvswap\(adapters=Adapters\(.*give restore that method"):
        llm.restore(tmp_path)
    assert answer(llm, llm.restore(tmp_path, method=method)) == answer(llm, cache)


def test_adapters_are_read_again_when_they_were_replaced(llm, tmp_path):
    fitted = adapters_of(llm)
    fitted.save(tmp_path / "adapters")
    method = KVSwap(**SMALL, adapters=tmp_path / "adapters")  # a path, too
    assert method.fitted is method.fitted and method.fitted == fitted
    other = Adapters([2 * layer for layer in fitted.layers], fitted.joint, fitted.fingerprint)
    other.save(tmp_path / "adapters")
    assert method.fitted == other


@pytest.fixture
def beside_model(tmp_path):
    """A model whose folder has adapters for all heads together of sigma 4."""
    made = kvjax.LLM(CONFIG, make_params(CONFIG, sharper=1), folder=tmp_path / "model")
    fitted = adapters_of(made)
    fitted.save(tmp_path / "model" / "adapters" / "joint_4.safetensors")
    return made, fitted


def test_adapters_beside_the_model_are_found_unless_a_prompts_own_are_asked_for(beside_model):
    llm, fitted = beside_model
    found = llm.prefill(TEXT, method=KVSwap(**SMALL, sigma=4), capacity=64)
    given = llm.prefill(TEXT, method=KVSwap(**SMALL, adapters=fitted), capacity=64)
    own = llm.prefill(TEXT, method=KVSwap(**SMALL, sigma=4, adapters="prompt"), capacity=64)
    for i, basis in enumerate(fitted.layers):
        np.testing.assert_array_equal(found.state.layers[i].state.index.adapter[0], basis)
        assert np.abs(np.asarray(own.state.layers[i].state.index.adapter[0]) - basis).max() > 0.1
    assert answer(llm, found) == answer(llm, given)


def test_where_there_are_no_adapters_prompts_are_decomposed_and_it_is_said(beside_model, caplog):
    """Once for each reason: another ratio, another form, another model in the same folder."""
    llm, _ = beside_model
    other = kvjax.LLM(CONFIG, make_params(CONFIG, 5), folder=llm.folder)
    for model, settings, words in (
        (llm, {"sigma": 2}, "there is no .*joint_2"), (llm, {"sigma": 4, "per_head": True}, "there is no .*per_head_4"),
        (other, {"sigma": 4}, ".*joint_4.* was fitted to this model with other weights"),
    ):
        for _ in range(2):
            assert model.with_fitted(KVSwap(**SMALL, **settings)).fitted is None
        (record,) = caplog.records
        assert re.search(rf"about .* s for each of 2 layers, as {words}", record.getMessage())
        caplog.clear()
    assert llm.with_fitted(KVSwap(**SMALL, sigma=2, adapters="prompt")).fitted is None and not caplog.records
    (llm.folder / "adapters" / "joint_2.safetensors").write_text("damaged")
    with pytest.raises(ReadFailed, match="joint_2"):
        llm.prefill(TEXT, method=KVSwap(**SMALL, sigma=2), capacity=64)


def test_a_saved_cache_does_not_name_adapters_that_were_found(beside_model, tmp_path):
    """So that it can be opened where the model is elsewhere, or has none."""
    llm, _ = beside_model
    cache = llm.prefill(TEXT, method=KVSwap(**SMALL, sigma=4), capacity=64)
    cache.save(tmp_path / "cache")
    bare = kvjax.LLM(CONFIG, make_params(CONFIG, sharper=1))
    for model, method in ((llm, None), (bare, None), (bare, KVSwap(**SMALL, sigma=4))):
        found = model.restore(tmp_path / "cache", method=method)
        assert answer(model, found) == answer(llm, cache)
        longer = model.extend(found, [4, 5, 6, 7], chunk=2)
        assert answer(model, longer) == answer(llm, llm.extend(cache, [4, 5, 6, 7], chunk=2))


@pytest.mark.parametrize(("wrong", "error"), [
    (lambda llm: dataclasses.replace(KVSwap(**SMALL), adapters=FITTED[True]), FormatMismatch),
    (lambda llm: KVSwap(**SMALL, adapters=adapters_of(llm, layers=1)), ConfigError),
    (lambda llm: KVSwap(**SMALL, adapters=adapters_of(llm, size=4)), ConfigError),
    (lambda llm: KVSwap(**SMALL, sigma=32), ConfigError),
    (lambda llm: InfiniGen(**SMALL, sigma=9), ConfigError),
], ids=["another_model", "too_few_layers", "another_head_size", "no_dimension_left", "infinigen"])
def test_what_does_not_fit_the_model_is_refused(llm, wrong, error):
    with pytest.raises(error):
        llm.prefill(TEXT, method=wrong(llm), capacity=64)


def test_bad_settings_are_refused(tmp_path):
    for settings in ({"group": 0}, {"sigma": 0}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            KVSwap(**settings)
    with pytest.raises(ReadFailed):
        KVSwap(adapters=str(tmp_path))
    fitted = Adapters([np.ones((2, 8, 4))], True, "model")  # 4 of 16 numbers
    with pytest.raises(ConfigError, match="sigma=8, but the adapters' is 4"):
        KVSwap(adapters=fitted, sigma=8)
    assert KVSwap(adapters=fitted, sigma=4).joint
    KVSwap(adapters=Adapters([np.ones((2, 8, 1))], True, "model"), sigma=11)  # 16 / 11 numbers are one


def test_adapters_leave_the_given_arrays_as_they_are():
    layer = np.ones((2, 8, 4), np.float32)
    fitted = Adapters([layer], True, "model")
    layer[:] = 2
    assert (fitted.layers[0] == 1).all()
