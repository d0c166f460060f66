"""Random blocks: drawn evenly, anew at every step, and without a look at anything."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from harness import GROUP, HEADS, METHODS, SIZE, Sim, Stream, selection

from kvjax.cache import state as caching
from kvjax.inference import decode

METHOD = METHODS["random"]


def selections(method, stream, steps=20):
    sim = Sim(method, stream, [60, 40])
    return np.stack([np.asarray(sim.step()[1].selected) for _ in range(steps)])


def test_draws_do_not_depend_on_queries_and_keys_but_on_the_seed():
    np.testing.assert_array_equal(selections(METHOD, Stream.draw(0)), selections(METHOD, Stream.draw(1)))
    sim, q = Sim(METHOD, Stream.draw(0), [60, 40]), np.zeros((HEADS, GROUP, SIZE))
    first, second = (selection(sim, 0, q, dataclasses.replace(METHOD, seed=seed)).block for seed in (0, 1))
    assert METHOD.seed == 0 and not np.array_equal(first, second)


def test_every_step_and_head_draws_anew():
    drawn = selections(METHOD, Stream.draw(0))
    assert len({tuple(sorted(step[0, head])) for step in drawn for head in range(HEADS)}) == len(drawn) * HEADS


def test_layers_draw_differently(params, tokens):
    plan, state, _, _ = tiny.start(params, tokens, METHOD)
    done = decode.step(plan, params, state, tokens[np.arange(2), np.asarray(tiny.PROMPT)])
    assert not np.array_equal(done.reports[0].selected, done.reports[1].selected)


def test_every_block_is_drawn_equally_often():
    """Of 30 blocks 10 are drawn, 2,000 times: each 667 times, give or take 21 (one standard deviation)."""
    method = dataclasses.replace(METHOD, page=1, max_blocks=10)
    sim = Sim(method, Stream.draw(0), [35, 35])
    one = jax.tree.map(lambda leaf: leaf[0], sim.cache.state)
    view = caching.view(sim.plan.spec, one)
    q = jnp.zeros((HEADS, 2, 8))

    def draw(stored):
        index = dataclasses.replace(one.index, stored=stored)
        return method.select(sim.plan.spec, index, view, q).block

    drawn = np.asarray(jax.jit(jax.vmap(draw))(jnp.arange(2000, dtype=jnp.int32)))
    for head in range(HEADS):
        counts = np.bincount(drawn[:, head].ravel(), minlength=30)[:30]
        assert counts.sum() == 20_000
        assert (np.abs(counts - 667) < 5 * 21).all()
