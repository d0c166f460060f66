"""Pictures: methods keep their style, labels stay clear of each other, intervals are those of the rows."""

import itertools

import numpy as np

from experiments import plots
from kvjax import METHODS


def test_every_method_has_a_style_of_its_own_that_does_not_depend_on_others():
    looks = plots.styles(METHODS)
    assert len({(look["color"], look["marker"]) for look in looks.values()}) == len(METHODS)
    assert plots.styles(["rle", "static"])["rle"] == looks["rle"]


def test_variants_share_a_colour_and_differ_in_marker_and_line():
    looks = plots.styles(["kvswap, 4 bits", "kvswap", "kvswap@64"])
    assert len({look["color"] for look in looks.values()}) == 1
    assert len({look["marker"] for look in looks.values()}) == len({look["linestyle"] for look in looks.values()}) == 3
    assert looks["kvswap"] == plots.styles(["kvswap"])["kvswap"] == plots.styles(["kvswap@128"])["kvswap@128"]


def test_other_labels_take_colours_that_no_label_has():
    looks = plots.styles(["dynakv", "lru", "fifo", "score", "cluster", "belady"])
    assert len({look["color"] for look in looks.values()}) == 6


def test_a_label_belongs_to_the_method_with_whose_whole_name_it_begins():
    assert plots.method_of("infinigen*+ru") == "infinigen" and plots.method_of("dynakv_static") == "dynakv"
    assert plots.method_of("fully") is None and plots.method_of("4 bits") is None


def test_labels_touch_neither_each_other_nor_points_nor_the_frame():
    """Given twelve points close together, every label that is placed has a box of its own."""
    points = [(100 + 3.0 * i, 100 + 2.0 * (i % 4)) for i in range(12)]
    clear = [(x - 2, y - 2, x + 2, y + 2) for x, y in points]
    inside = (0.0, 0.0, 300.0, 240.0)
    corners = plots.place_boxes(points, [(40.0, 10.0)] * 12, inside, clear)
    boxes = [(x, y, x + 40, y + 10) for x, y in (corner for corner in corners if corner is not None)]
    assert len(boxes) >= 6
    assert all(box[0] >= 0 and box[1] >= 0 and box[2] <= 300 and box[3] <= 240 for box in boxes)
    for one, other in itertools.combinations([*boxes, *clear], 2):
        if one in boxes or other in boxes:
            assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


def test_a_label_without_room_is_named():
    """Given a panel full of points, names that find no place are returned and not drawn."""
    _, (axes,) = plots.panels(1)
    others = [(x, y) for x in np.linspace(0, 1, 60) for y in np.linspace(0, 1, 60)]
    axes.plot(*zip(*others, strict=True), "o")
    assert plots.name_points(axes, [(0.5, 0.5, "dynakv 64")], others) == ["dynakv 64"]
    assert not axes.texts


def test_several_rows_at_one_place_become_their_mean_with_its_interval():
    """Given three samples at one x, the line goes through their mean, and the bar is Student's interval."""
    rows = [{"method": "quest", "x": x, "y": y} for x, y in ((1, 0.0), (1, 1.0), (1, 2.0), (2, 5.0))]
    _, (axes,) = plots.panels(1)
    plots.curves(axes, rows, "x", "y")
    assert axes.lines[0].get_xydata().tolist() == [[1, 1], [2, 5]]
    low, high = plots.student([0.0, 1.0, 2.0])
    np.testing.assert_allclose([low, high], [1 - 2.484, 1 + 2.484], atol=1e-3)
    (bar,) = axes.collections
    np.testing.assert_allclose(bar.get_segments()[0][:, 1], [low, high])


def test_the_interval_of_a_lone_row_is_its_own():
    rows = [{"method": "quest", "x": x, "y": 0.5, "interval": (0.4, 0.7)} for x in (1, 2, 3)]
    _, (axes,) = plots.panels(1)
    plots.curves(axes, rows, "x", "y", interval="interval")
    (band,) = axes.collections
    assert set(band.get_paths()[0].vertices[:, 1]) == {0.4, 0.7}


def test_ticks_are_at_measured_values_that_do_not_crowd():
    _, (axes,) = plots.panels(1)
    plots.steps(axes, [1024, 4096, 65536, 65000])
    assert axes.get_xscale() == "log"
    assert sorted(axes.get_xticks()) == [1024, 4096, 65536]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["64K", "4K", "1,024"]


def test_a_figure_has_one_legend_with_each_label_once(tmp_path):
    figure, axes = plots.panels(2)
    for panel in axes:
        plots.curves(panel, [{"method": "quest", "x": 1, "y": 2}], "x", "y")
    plots.save(figure, tmp_path / "two.png")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["quest"]
    assert (tmp_path / "two.png").read_bytes()[:4] == b"\x89PNG"
