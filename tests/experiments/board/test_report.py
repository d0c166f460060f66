"""The leaderboard's page: tables that sort, plots and bars of every method, and nothing from elsewhere."""

import html.parser
import re

import pytest

from experiments.board import report
from experiments.board.evaluate import with_differences
from kvjax import METHODS
from kvjax.eval.intervals import of_mean, wilson

VOID = ("meta", "br", "hr", "img", "input", "link")


class Reader(html.parser.HTMLParser):
    """Collects tables, bars and texts of a page, whatever it would load, and tags that were not closed in order."""

    def __init__(self, page: str):
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.titles: list[list[str]] = []
        self.outside: list[str] = []
        self.crossed: list[str] = []
        self.bars: list[str] = []
        self.pictures: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
            self.titles.append([])
        if tag == "tr" and "tbody" in self._open:
            self.tables[-1].append([])
        if "data-v" in found:
            self.tables[-1][-1].append(found["data-v"])
        if tag == "svg":
            self.pictures.append(found["aria-label"])
        self.outside += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")
                         and not value.startswith("#")]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag):
        if not self._open or self._open.pop() != tag:
            self.crossed.append(tag)

    def handle_data(self, data):
        if self._open[-1:] == ["button"]:
            self.titles[-1].append(data)
        if self._open[-2:] == ["li", "span"]:
            self.bars.append(data)


def cells(method: str, budget: int | None, share: float, **more) -> list[dict]:
    """Returns the rows of a method: needles with an interval, and a loss."""
    head = {"method": method, "context": 2048, "budget": budget, "seed": 0, "question": "after", "store": "host"}
    cost = {"bytes_read_per_token": 1024.0 * (budget or 900), "resident_bytes": 4096.0 * (budget or 900)}
    answers = {"accuracy": share, "interval": wilson(share, 32), "samples": 32, "recall": share}
    return [{**head, **cost, **answers, "task": "needle", **more},
            {**head, **cost, "task": "perplexity", "nll": 3.0 - share, "delta_nll": 0.4 - share,
             "delta_nll_interval": (0.3 - share, 0.5 - share), **more}]


@pytest.fixture(scope="module")
def rows():
    """Cells of all methods at two budgets; those of ClusterKV at the smaller one are refused."""
    every = cells("full", None, 0.97)
    for i, method in enumerate(name for name in METHODS if name not in ("full", "clusterkv")):
        every += cells(method, 64, i / 40) + cells(method, 128, i / 30)
    refused = {"method": "clusterkv", "context": 2048, "budget": 64, "seed": 0, "question": "after", "store": "host",
               "refused": "budget=64 is <too> small"}
    return every + cells("clusterkv", 128, 0.5) + [{**refused, "task": task} for task in ("needle", "perplexity")]


@pytest.fixture(scope="module")
def page(rows):
    return report.page("board", {"config": {"model": ""}, "processor": "2 x CPU", "commit": "abc"}, rows)


def test_nothing_beats_the_pareto_front():
    points = [(1, 0.2), (2, 0.5), (2, 0.4), (3, 0.5), (4, 0.9), (0.5, 0.2)]
    assert report.pareto(points) == [(0.5, 0.2), (2, 0.5), (4, 0.9)]


def test_the_page_is_whole_and_loads_nothing(page):
    reader = Reader(page)
    assert reader.crossed == [] and reader._open == []
    assert reader.outside == []
    assert not re.search(r"https?://|@import|url\((?!#)", page)


def test_every_method_and_budget_has_a_row(page, rows):
    means, everything = Reader(page).tables
    assert {row[0] for row in means} == set(METHODS)
    assert len(means) == len({(row["method"], row["budget"]) for row in rows}) == 2 * len(METHODS) - 1
    assert len(everything) == len(rows)


def test_a_row_has_a_sort_key_for_each_title(page):
    """The script sorts by the cell below a title, so that all rows need as many cells as there are titles."""
    reader = Reader(page)
    for titles, table in zip(reader.titles, reader.tables, strict=True):
        assert titles[0] == "method" and {len(row) for row in table} == {len(titles)}
    means = {(row[0], row[1]): row for row in reader.tables[0]}
    at = reader.titles[0].index
    assert means["quest", "64"][at("KiB read/token")] == str(64 * 1024.0)
    assert means["full", ""][at("accuracy")] == "0.97"
    assert means["clusterkv", "64"][at("accuracy")] == ""
    assert "data-v" not in report._STYLE and "cells[i].dataset.v" in report._SORT and "thead button" in report._SORT


def test_bars_have_every_method_beside_those_without_a_budget(page):
    """Given two budgets and two tasks, a method has four bars; a refused cell has none."""
    bars = Reader(page).bars
    assert [bars.count(name) for name in ("quest", "full", "clusterkv")] == [4, 4, 2]


def test_pictures_are_there_for_wide_and_narrow_pages(page):
    titles = ("Accuracy against reading", "Accuracy against memory", "Recall against the budget")
    assert Reader(page).pictures == [name for title in titles for name in (title, f"{title}, narrow")]
    assert "#000000" not in page and "DejaVu" in page  # text is text, in the colour of the page


def test_means_of_like_cells_have_the_interval_of_all_their_samples():
    rows = [row for seed in (0, 1) for row in cells("quest", 64, 0.25 + 0.5 * seed)]
    (row,) = report.summarise(rows)
    assert row["accuracy"] == 0.5 and row["interval"] == wilson(0.5, 64)


def test_names_are_text_and_not_markup():
    rows = cells("a<b", 4, 0.5, refused="<i>no</i>")
    page = report.page("x & y", {"versions": {}}, rows)
    assert "a<b" not in page and "<i>no" not in page and "x &amp; y" in page
    assert Reader(page).tables[0][0][0] == "a<b"


def test_a_board_without_answers_has_tables_alone():
    """Given only losses, the page has no plot of accuracy."""
    page = report.page("board", {}, [{key: value for key, value in cells("quest", 64, 0.5)[1].items()
                                      if key != "bytes_read_per_token"}])
    assert Reader(page).pictures == [] and Reader(page).tables[0][0][0] == "quest"


def test_differences_of_several_tasks_count_cells_alike():
    full, other = {"a": [1.0, 1.0], "b": [1.0, 0.0]}, {"a": [1.0, 0.0], "b": [0.0, 0.0]}
    rows = with_differences([
        {"method": method, "budget": budget, "task": task, "context": 64, "seed": 0, "accuracy": sum(scores) / 2,
         "samples": 2, "scores": scores}
        for method, budget, given in (("full", None, full), ("quest", 64, other)) for task, scores in given.items()])
    first, second = report.summarise(rows)
    assert first["delta_accuracy_interval"] is None
    assert second["delta_accuracy"] == -0.5
    bounds = [row["delta_accuracy_interval"] for row in rows[2:]]
    assert second["delta_accuracy_interval"] == of_mean([-0.5, -0.5], bounds)


def test_a_mean_and_its_interval_count_cells_alike():
    """Given a task of few samples that all are right, and one of many of which few are."""
    rows = [{"method": "quest", "budget": 64, "task": task, "context": 64, "seed": 0, "samples": count,
             "accuracy": share} for task, count, share in (("a", 8, 1.0), ("b", 64, 0.125))]
    (row,) = report.summarise(rows)
    assert row["accuracy"] == 0.5625 and row["interval"] == wilson(0.5625, 4 / (1 / 8 + 1 / 64))
    assert row["interval"][0] < row["accuracy"] < row["interval"][1]


def test_means_are_compared_where_the_same_methods_took_the_same_tasks():
    """Given a task that one method did not take, another position of the question, and another length."""
    rows = [{"method": method, "budget": None, "task": task, "context": context, "seed": 0, "question": question}
            for method, task, context, question in (
                ("full", "a", 64, "after"), ("quest", "a", 64, "after"), ("full", "b", 64, "after"),
                ("full", "a", 64, "within"), ("quest", "a", 64, "within"), ("full", "a", 128, "after"),
                ("full", "c", 64, "after"), ("quest", "c", 64, "after"))]
    groups = [[(row["method"], row["task"]) for row in group] for group in report.comparable(rows)]
    assert groups == [[("full", "a"), ("quest", "a"), ("full", "c"), ("quest", "c")], [("full", "b")],
                      [("full", "a"), ("quest", "a")], [("full", "a")]]
