"""MagicPIG: collision rates against their formulas, the estimate against attention, the contract's corner cases."""

import dataclasses

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import CAPACITY, GROUP, HEADS, METHODS, SIZE, Sim, Stream, attention_over, dense_attention

import kvjax
from kvjax.cache import state as caching
from kvjax.errors import ConfigError
from kvjax.methods import MagicPIG
from kvjax.methods.magicpig import agreement, codes, projections, sampling_probability
from kvjax.ops.attention import NEGATIVE

METHOD = METHODS["magicpig"]
DRAWS = 4000


def pair(degrees, size=16):
    """Two vectors of different lengths at an angle."""
    rng = np.random.default_rng(int(degrees * 10))
    basis = np.linalg.qr(rng.normal(size=(size, 2)))[0].T
    angle = np.radians(degrees)
    return (3 * basis[0]).astype(np.float32), (0.5 * (np.cos(angle) * basis[0] + np.sin(angle) * basis[1])).astype("f4")


def collisions(degrees, bits, tables):
    """bool[DRAWS, tables]: in which of so many draws of the hash functions the pair shares a bucket of each table."""
    first, second = pair(degrees)
    directions = projections(7, 16, DRAWS * tables, bits)
    found = np.asarray(codes(jnp.stack([first, second])[None], directions))[0]
    return (found[0] == found[1]).reshape(DRAWS, tables)


def within(rate, expected, trials):
    """Whether a rate is inside 5 standard deviations of its expectation."""
    return abs(rate - expected) < 5 * np.sqrt(expected * (1 - expected) / trials) + 1e-9


@pytest.mark.parametrize(("degrees", "bits"), [(10, 1), (40, 3), (70, 4), (90, 2), (120, 2)])
def test_a_table_collides_as_often_as_simhash_says(degrees, bits):
    """(1 - theta / pi)^K."""
    rate = collisions(degrees, bits, 5).mean()
    assert within(rate, (1 - degrees / 180) ** bits, 5 * DRAWS)


@pytest.mark.parametrize(("degrees", "bits", "tables"), [(25, 5, 10), (40, 6, 20), (60, 4, 10), (80, 5, 20)])
def test_a_token_is_sampled_as_often_as_the_paper_says(degrees, bits, tables):
    """At least two of L tables: 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L - 1)."""
    p = 1 - degrees / 180
    u = 1 - (1 - p**bits) ** tables - tables * p**bits * (1 - p**bits) ** (tables - 1)
    assert 0.01 < u < 0.999
    rate = (collisions(degrees, bits, tables).sum(1) >= 2).mean()
    assert within(rate, u, DRAWS)
    np.testing.assert_allclose(sampling_probability(jnp.float32(p), bits, tables), u, rtol=1e-4)


def test_the_probability_keeps_its_digits_for_far_keys():
    """Against float64 with 2 to 12 collisions summed up; f32 of the formula as it stands gives 0 here."""
    p, bits, tables = 0.3, 10, 150
    hit, u = p**bits, 0.0
    for count in range(2, 13):
        ways = np.prod([(tables - i) / (i + 1) for i in range(count)])
        u += ways * hit**count * (1 - hit) ** (tables - count)
    assert u < 1e-6
    np.testing.assert_allclose(sampling_probability(jnp.float32(p), bits, tables), u, rtol=2e-2)
    np.testing.assert_allclose(sampling_probability(jnp.asarray([0.0, 1.0]), bits, tables), [0, 1])


def test_agreement_is_one_minus_the_angle_over_pi():
    for degrees in (1, 30, 90, 179):
        first, second = pair(degrees)
        found = agreement(first[None, None], second[None, None])[0, 0, 0]
        np.testing.assert_allclose(found, 1 - degrees / 180, atol=1e-3)


@pytest.fixture(scope="module")
def run():
    """A prompt of 70 and 20 tokens more: simulation and state."""
    sim = Sim(METHOD, Stream.draw(0), [70, 30])
    sim.run(20)
    return sim, jax.device_get(sim.cache.state)


def centred(sim, state, b, head):
    """Stored keys of a head less the mean of the prompt's, in float64."""
    pos = state.pos[b, head, : state.index.stored[b], 0]
    prompt = sim.stream.k[b, METHOD.sinks : [70, 30][b] - METHOD.window + 1, head].astype(np.float64)
    return sim.stream.k[b, pos, head] - prompt.mean(0)


def test_codes_are_signs_of_projections_of_centred_keys(run):
    sim, state = run
    directions = projections(METHOD.seed, SIZE, METHOD.tables, METHOD.bits).astype(np.float64)
    for b in range(2):
        for head in range(HEADS):
            keys = centred(sim, state, b, head)
            side = np.einsum("nd,lbd->nlb", keys, directions)
            clear = (np.abs(side) > 1e-4).all(-1)
            code = ((side > 0) * 2 ** np.arange(METHOD.bits)).sum(-1)
            found = state.index.code[b, head, :, : len(keys)].T
            assert clear.mean() > 0.99
            np.testing.assert_array_equal(found[clear], code[clear])


def choose(sim, b, q):
    """Selection for a query, and the tokens that each query head samples, by comparing codes."""
    asked = np.asarray(codes(q, projections(METHOD.seed, SIZE, METHOD.tables, METHOD.bits)))
    code, count = (np.asarray(array)[b] for array in (sim.cache.state.index.code, sim.cache.state.count))
    shared = (code[:, None] == asked[..., None]).sum(2)  # [K, G, NB]
    return harness.selection(sim, b, q), (shared >= 2) & (count > 0)[:, None]


def test_a_head_attends_what_it_sampled_and_what_is_kept_counts_for_what_is_not(run):
    sim, _ = run
    spec, rng, crowded = sim.plan.spec, np.random.default_rng(4), 0
    for _ in range(6):
        selection, drawn = choose(sim, 0, rng.normal(size=(HEADS, GROUP, SIZE)).astype(np.float32))
        for head in range(HEADS):
            union = np.flatnonzero(drawn[head].any(0))
            block = selection.block[head][selection.block[head] < spec.num_blocks]
            assert set(block) <= set(union) and len(block) == min(len(union), spec.selected_rows)
            more = np.log(max(1, len(union) / spec.selected_rows))
            crowded += more > 0
            expected = np.where(drawn[head][:, block], more, NEGATIVE)
            np.testing.assert_allclose(selection.bias[head][:, : len(block)], expected, rtol=1e-5)
    assert crowded > 0


def test_what_a_head_did_not_sample_is_reported_as_hidden_from_it():
    """And so counts for nobody's recall but that of heads that did."""
    sim = Sim(METHOD, Stream.draw(0), [70, 30])
    sim.run(10)
    _, report = sim.step()
    selected, hidden = np.asarray(report.selected), np.asarray(report.hidden)
    assert hidden.shape == (*selected.shape[:2], GROUP, selected.shape[-1])
    seen = (selected >= 0)[:, :, None] & ~hidden
    np.testing.assert_array_equal(seen.any(2), selected >= 0)
    assert (seen.sum(-1) < (selected >= 0).sum(-1)[:, :, None]).any()


def test_which_part_of_a_crowd_is_kept_is_even():
    """Given one query at many steps, every sampled token is kept about equally often."""
    method = MagicPIG(budget=24, sinks=2, window=4, bits=1, tables=8)
    sim = Sim(method, Stream.draw(1, batch=1), [70])
    spec, one = sim.plan.spec, jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), sim.cache.state)
    view, q = caching.view(spec, one), np.random.default_rng(5).normal(size=(HEADS, GROUP, SIZE)).astype(np.float32)

    @jax.jit
    def kept(stored):
        index = dataclasses.replace(one.index, stored=stored)
        return method.select(spec, index, view, q).block[0]

    steps = 400
    times = np.bincount(np.concatenate([kept(jnp.int32(64 + i)) for i in range(steps)]), minlength=spec.num_blocks)
    times = times[:-1] if len(times) > spec.num_blocks else times
    drawn = times[times > 0]
    share = spec.selected_rows / len(drawn)
    assert len(drawn) > 1.5 * spec.selected_rows
    assert abs(drawn / steps - share).max() < 5 * np.sqrt(share * (1 - share) / steps)


class Unweighed(MagicPIG):
    """Mutant: every sampled token counts once."""

    def weigh(self, spec, index, q, key, bias):
        return bias


def turned(rng, repeats):
    """One stream in many rotations: attention is the same, its hash codes are not. Values are the keys before that."""
    q, k = rng.normal(size=(1, CAPACITY, HEADS * GROUP, SIZE)), rng.normal(size=(1, CAPACITY, HEADS, SIZE))
    turns = np.linalg.qr(rng.normal(size=(repeats, SIZE, SIZE)))[0]
    q, turned_k = (np.einsum("tkd,rde->rtke", x[0], turns) for x in (q, k))
    return Stream(q.astype("f4"), turned_k.astype("f4"), np.repeat(k, repeats, 0).astype("f4"))


def test_estimates_average_to_attention_and_without_weights_they_do_not():
    """The estimate is a quotient, so its mean is not exact; unweighed samples prefer near keys and are off by more."""
    stream, prompt, repeats = turned(np.random.default_rng(6), 64), 94, 64
    exact = dense_attention(stream, 0, prompt)
    settings = {"budget": 80, "sinks": 2, "window": 4, "bits": 3, "tables": 6}
    error = []
    for method in (MagicPIG(**settings), Unweighed(**settings)):
        out, report = Sim(method, stream, [prompt] * repeats).step()
        assert (np.asarray(report.attended) < 80).all(), "a sample may be smaller than the budget"
        error.append(np.linalg.norm(out.mean(0) - exact) / np.linalg.norm(exact))
    assert error[0] < 0.4 * error[1], error


def test_all_that_a_sliding_window_shows_is_attended_if_it_fits():
    """Though more is stored than fits."""
    stream, at, sliding = Stream.draw(0), np.array([80, 78]), 30
    cache = kvjax.init_cache(dataclasses.replace(METHOD, budget=48, sinks=0, window=4), batch=2, kv_heads=HEADS,
                             group=GROUP, head_dim=SIZE, capacity=CAPACITY, sliding=sliding)
    cache = kvjax.prefill_cache(cache, jnp.asarray(stream.k[:, :80]), jnp.asarray(stream.v[:, :80]), at)
    out, _ = kvjax.attend(cache, *(jnp.asarray(array[np.arange(2), at]) for array in (stream.q, stream.k, stream.v)))
    for row in range(2):
        visible = range(at[row] - sliding + 1, at[row] + 1)
        expected = attention_over(stream, row, at[row], [visible] * HEADS)
        np.testing.assert_allclose(out[row], expected, atol=2e-5, rtol=0)


def test_impossible_settings_are_refused():
    for wrong in ({"bits": 17}, {"tables": 1}):
        with pytest.raises(ConfigError, match="tables="):
            MagicPIG(**wrong)
    for seed in (-1, 2**32):
        with pytest.raises(ConfigError, match=f"seed={seed}"):
            MagicPIG(seed=seed)
