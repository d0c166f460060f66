"""Estimates of a grid's time: from what was measured, and for what was not, from the nearest."""

import pytest
from tiny import CONFIG

from experiments.board import estimate
from experiments.board.estimate import Estimate, Unit
from experiments.board.exams import Batch
from experiments.board.grid import Cell
from kvjax.eval.tasks import Continuation


def unit(method="quest", budget=64, context=100, start=0, sequences=2, probed=False):
    cell = Cell((), method, "mqar", context, budget, 0)
    items = tuple(Continuation((start, i), (1,) * 10, (True,) * 10) for i in range(sequences))
    return Unit(cell, Batch(("mqar", context, 0), (start, start + sequences), items), probed)


def line(method="quest", budget=64, context=100, probed=False, **changes):
    spent = {"read": 8.0, "contexts": 2, "fill": 4.0, "sequences": 2, "step": 0.5, "steps": 10, "most_steps": 10}
    return {"method": method, "budget": budget, "context": context, "task": "mqar",
            "seconds": spent | {"probed": probed} | changes}


@pytest.fixture
def known():
    known = Estimate(CONFIG)
    known.add(line())
    return known


def test_a_batch_is_read_once_for_all_methods(known):
    known.add(line("full", None, read=0.0))
    spent = known.seconds([unit(), unit("full", None), unit(start=2)])
    assert spent == {("reading", "mqar at 100"): 16.0, ("quest", "mqar at 100"): 18.0, ("full", "mqar at 100"): 9.0}


def test_what_was_not_measured_is_like_the_nearest(known):
    known.add(line("full", None, step=1.0))
    known.add(line(budget=128, step=2.0))
    known.add(line(context=400, step=3.0, fill=16.0))
    for like, step in ((unit(), 0.5), (unit(budget=128), 2.0), (unit(budget=32, context=400), 3.0),
                       (unit("full", 9), 1.0), (unit(probed=True), 0.5)):
        assert known.nearest(like.kind)[1].step == step
    assert known.seconds([unit(context=800)])["quest", "mqar at 800"] == 2 * 8.0 * 2 + 10 * 3.0 * 2
    assert known.seconds([unit(context=50)])["quest", "mqar at 50"] == 2 * 1.0 + 10 * 0.5


def test_steps_that_are_compared_with_exact_attention_have_a_cost_of_their_own(known):
    known.add(line(probed=True, step=5.0))
    assert [known.nearest(unit(probed=probed).kind)[1].step for probed in (False, True)] == [0.5, 5.0]


def test_answers_that_end_early_shorten_what_is_left(known):
    known.add(line(steps=5))
    assert known.seconds([unit()])["quest", "mqar at 100"] == 4.0 + 5 * 0.5


def test_longer_contexts_take_more_than_their_share_to_read(known):
    spent = known.seconds([unit(context=200)])
    assert spent["reading", "mqar at 200"] == pytest.approx(
        8.0 * estimate.work(CONFIG, 200) / estimate.work(CONFIG, 100))
    assert estimate.work(CONFIG, 200) > 2 * estimate.work(CONFIG, 100)


def test_the_table_has_sums_by_method_and_task(known):
    lines = estimate.table(known.seconds([unit(), unit(start=2)])).splitlines()
    assert [text.split()[-1] for text in lines[1:3]] == ["18", "16"] and lines[-1].startswith("in all 0.0 hours")
