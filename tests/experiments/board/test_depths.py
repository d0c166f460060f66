"""Right answers by depth go to the tenth in which they lie."""

import numpy as np

from experiments.board import depths


def test_every_answer_counts_in_its_tenth():
    """Given answers at both ends and at a border, the last tenth has depth 1, a border belongs to what follows it."""
    row = {"by_depth": [(0.0, 1.0), (0.05, 0.0), (0.1, 1.0), (0.95, 0.0), (1.0, 1.0)], "method": "full", "context": 64}
    found = depths.by_tenth(row)
    assert found[0] == 0.5 and found[1] == 1.0 and found[9] == 0.5 and np.isnan(found[2:9]).all()


def test_the_picture_has_a_line_for_each_row():
    rows = [{"by_depth": [(0.5, 1.0)], "method": name, "context": 64, "budget": budget}
            for name, budget in (("full", None), ("kvswap", 32), ("quest@16", 16))]
    figure = depths.figure(rows, "found")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["full 64", "kvswap@32 64", "quest@16 64"]
    assert axes.images[0].get_array().shape == (3, depths.TENTHS)
