"""ArkVale: volumes really bound every key's product, are as small as they can be, and follow the pages."""

import jax
import numpy as np
import pytest
from harness import GROUP, HEADS, METHODS, SIZE, Sim, Stream, selection
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvjax.errors import ConfigError
from kvjax.methods import ArkVale, Quest
from kvjax.methods.arkvale import VOLUMES, Volumes, bounding_volumes, promise

PAGES, ROWS = 3, 4
both_volumes = pytest.mark.parametrize("volume", VOLUMES)
numbers = st.floats(-50, 50, width=32, allow_subnormal=False)
cases = given(
    keys=hnp.arrays(np.float32, (HEADS, PAGES, ROWS, SIZE), elements=numbers),
    q=hnp.arrays(np.float32, (HEADS, GROUP, SIZE), elements=numbers),
    filled=hnp.arrays(bool, (PAGES, ROWS)),
)
volumes_of = jax.jit(bounding_volumes, static_argnums=2)
promised = jax.jit(promise)


@both_volumes
@settings(max_examples=60)
@cases
def test_no_key_of_a_page_has_a_larger_product_than_its_volume_promises(volume, keys, q, filled):
    bound = np.asarray(promised(volumes_of(keys, filled, volume), q))
    score = np.einsum("kgd,kncd->kgnc", q.astype(np.float64), keys)
    score = np.where(filled, score, -np.inf).max(-1)
    size = np.linalg.norm(q, axis=-1).max() * np.abs(keys).max() * SIZE
    assert (bound >= score - 1e-5 * size - 1e-5).all()


@both_volumes
@settings(max_examples=40)
@cases
def test_a_point_of_the_volume_reaches_the_promise(volume, keys, q, filled):
    """The farthest point of the ball or box in the query's direction: the bound is no looser than its volume."""
    digest = jax.device_get(volumes_of(keys, filled, volume))
    centre, extent = digest.centre.swapaxes(1, 2), digest.extent.swapaxes(1, 2)
    if volume == "sphere":
        length = np.maximum(np.linalg.norm(q, axis=-1, keepdims=True), 1e-20)
        step = (q / length)[:, :, None] * extent[:, None]
    else:
        step = np.sign(q)[:, :, None] * extent[:, None]
    reached = np.einsum("kgd,kgnd->kgn", q.astype(np.float64), centre[:, None] + step)
    np.testing.assert_allclose(promised(Volumes(digest.centre, digest.extent), q), reached, rtol=1e-4, atol=1e-1)


@both_volumes
def test_volumes_follow_the_pages_while_decoding(volume):
    """Given a long and a short prompt and 25 decoded tokens, volumes are those of the keys at each page's positions."""
    sim = Sim(METHODS["arkvale" if volume == "cuboid" else "arkvale_sphere"], Stream.draw(0), [60, 2])
    sim.run(25)
    state = jax.device_get(sim.cache.state)
    for b in range(2):
        for head in range(HEADS):
            for page in np.flatnonzero(state.count[b, head]):
                keys = sim.stream.k[b, state.pos[b, head, page, : state.count[b, head, page]], head].astype(np.float64)
                if volume == "sphere":
                    centre = keys.mean(0)
                    extent = np.linalg.norm(keys - centre, axis=-1).max(keepdims=True)
                else:
                    centre, extent = (keys.min(0) + keys.max(0)) / 2, (keys.max(0) - keys.min(0)) / 2
                np.testing.assert_allclose(state.index.digest.centre[b, head, :, page], centre, atol=1e-5)
                np.testing.assert_allclose(state.index.digest.extent[b, head, :, page], extent, atol=1e-5)


def test_a_cuboid_ranks_full_pages_as_quest_does():
    ours, theirs = METHODS["arkvale"], Quest(budget=28, sinks=2, window=4, page=4)
    stream = Stream.draw(1)
    sims = [Sim(method, stream, [61, 43]) for method in (ours, theirs)]
    q = np.random.default_rng(3).normal(size=(HEADS, GROUP, SIZE)).astype(np.float32)
    for b in range(2):
        mine, quests = (selection(sim, b, q).block for sim in sims)
        count = np.asarray(sims[0].cache.state.count[b])
        for head in range(HEADS):
            full = [page for page in quests[head] if count[head, page] == 4]
            closed = [page for page in mine[head] if count[head, page] == 4]
            assert len(closed) >= 3
            assert closed == full[: len(closed)] or full == closed[: len(full)]


def test_the_page_that_is_being_filled_is_always_attended():
    sim = Sim(METHODS["arkvale"], Stream.draw(2), [60, 30])
    for _ in range(12):
        count = np.asarray(sim.cache.state.count)
        pos, _, report = np.asarray(sim.cache.state.pos), *sim.step()
        for b in range(2):
            for head in range(HEADS):
                opened = np.flatnonzero((count[b, head] > 0) & (count[b, head] < 4))
                waiting = {int(p) for page in opened for p in pos[b, head, page, : count[b, head, page]]}
                assert waiting <= set(np.asarray(report.selected)[b, head].tolist())


def test_other_volumes_are_refused():
    with pytest.raises(ConfigError, match="volume='ball'"):
        ArkVale(volume="ball")
