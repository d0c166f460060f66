"""What lies between measurements, and that nothing is measured twice."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.calibration.tuner.solver import Setting
from kvjax.calibration.tuner.tables import Measurement, Tables, around, knots_of, weights

sizes = st.lists(st.integers(1, 10**6), min_size=2, max_size=9, unique=True)


@given(sizes, st.integers(2, 9))
def test_knots_are_values_with_both_ends(values, most):
    knots = knots_of(values, most)
    assert len(knots) == len(set(knots)) == min(most, len(values)) and set(knots) <= set(values)
    assert (knots[0], knots[-1]) == (min(values), max(values)) and knots == sorted(knots)


@given(sizes, st.integers(1, 10**6))
def test_shares_add_up_and_meet_at_the_value(values, at):
    knots = sorted(values)
    found = weights(knots, at)
    assert sum(share for _, share in found) == pytest.approx(1) and all(0 <= share <= 1 for _, share in found)
    assert sum(knot * share for knot, share in found) == pytest.approx(min(max(at, knots[0]), knots[-1]))


def test_what_changes_evenly_is_met_between_knots():
    """Given times with a part for each sequence and one for each of its tokens, all pairs are met exactly."""
    batches, contexts = (1, 8), (4096, 16384, 32768)

    def seconds(batch, context):
        return 3 + 0.5 * batch + 1e-3 * batch * context

    for pair in itertools.product((1, 2, 5, 8), (4096, 5000, 20000, 32768)):
        met = sum(share * seconds(*knot) for knot, share in around(batches, contexts, pair))
        assert met == pytest.approx(seconds(*pair))


def test_nothing_is_measured_twice_not_even_after_saving():
    tables, asked, setting = Tables(), [], Setting(4, 2, 800)

    def measured(value):
        asked.append(value)
        return value

    for _ in range(2):
        assert tables.read((1, 96), setting, lambda: measured(Measurement(2.0, 0.1))) == (2.0, 0.1)
        assert tables.compute((1, 96), setting, lambda: measured(5.0)) == 5.0
        assert tables.rate(96, 800, lambda: measured(0.7)) == 0.7
        tables = Tables.from_rows(json.loads(json.dumps(tables.rows())))
    assert len(asked) == 3
