"""Gains over the recent control, as a picture and on the report page."""

from __future__ import annotations

from typing import Any

import pytest

from keyhole.drawing import matplotlib
from keyhole.eval.report import charts
from keyhole.eval.report.cells import Cell, cells
from keyhole.eval.report.page import render
from keyhole.eval.report.plot_style import method_styles
from tests.eval.eval_lines import full, line
from tests.eval.test_comparisons import control, method
from tests.eval.test_report_page import page, texts

MANY = [1.0] * 40


def lines(recent: int = 10, own: int = 30, **fields: Any) -> list[dict[str, Any]]:
    """Of 40 samples the recent control answers `recent` right, DELTA `own`, the oracle 38."""

    def right(number: int) -> list[float]:
        return [float(n < number) for n in range(40)]

    return [
        full(**fields) | {"scores": MANY},
        method(right(own), outside_budget="the prompt", **fields),
        control("recent", right(recent), bytes_per_step=1e6, **fields),
        control("random", right(2), **fields),
        control("oracle", right(38), bytes_per_step=1e6, **fields),
    ]


def style(found: list[Cell]) -> Any:
    return method_styles((cell.policy, cell.name) for cell in found)


def test_controls_are_part_of_a_cell_and_no_cells() -> None:
    found = cells(lines())
    assert [cell.policy for cell in found] == ["full", "delta"]
    delta = found[1]
    assert (delta.recent, delta.random, delta.oracle) == (0.25, 0.05, 0.95)
    assert delta.gain == 0.5
    assert delta.distance is not None
    assert abs(delta.distance - 0.2) < 1e-9
    assert delta.tells
    assert not cells(lines(recent=38))[1].tells
    assert found[0].gain is None


def test_a_row_is_a_gain_with_its_interval() -> None:
    found = charts.with_gain(cells(lines()))
    figure, axis = matplotlib()[0].subplots()
    told = charts.draw_gains(axis, found, style(found))
    (text,) = told.values()
    gain = found[0].comparison and found[0].comparison.gain
    assert gain
    assert text == (
        f"delta, 128 tokens: +50.0 points ({100 * gain.low:.1f} to {100 * gain.high:.1f}, "
        "p 0.000), oracle +70.0"
    )
    (mark,) = [one for one in axis.lines if one.get_gid() == "gain-0"]
    assert (mark.get_xdata()[0], mark.get_ydata()[0], mark.get_alpha()) == (50, 0, 1)
    matplotlib()[0].close(figure)


def test_an_inconclusive_row_is_pale_and_labelled() -> None:
    found = charts.with_gain(cells(lines(recent=39, own=40)))
    figure, axis = matplotlib()[0].subplots()
    assert [
        text.endswith(", cannot tell")
        for text in charts.draw_gains(axis, found, style(found)).values()
    ] == [True]
    (mark,) = [one for one in axis.lines if one.get_gid() == "gain-0"]
    assert mark.get_alpha() < 0.5
    matplotlib()[0].close(figure)


def test_controls_are_marks_next_to_the_points_of_score_against_bytes() -> None:
    found = cells(lines())
    assert charts.control_points(found) == [("recent", 1e6, 0.25), ("oracle", 1e6, 0.95)]
    assert [point.on_front for own in charts.points(found).values() for point in own] == [True] * 2
    useless = charts.points(cells(lines(recent=40)))
    assert [point.on_front for point in useless["delta"]] == [False]


@pytest.mark.slow
def test_the_page_shows_gains_next_to_scores() -> None:
    found = page(lines())
    scores, gains, table = map(texts, found.tables)
    assert scores[2] == ["■ delta", "128", "75.0"]
    gain = "+50.0 32 to 63, p <0.001"
    assert gains[1:] == [["■ delta", "128", gain]]
    heads, _, delta = table
    row = dict(zip(heads, delta, strict=True))
    assert row["Score %"].startswith("75.0 ")
    assert (row["Recent %"], row["Random %"], row["Oracle %"]) == ("25.0", "5.0", "95.0")
    assert (row["Gain points"], row["To oracle points"]) == (gain, "20.0")
    assert row["Note"] == "outside the budget: the prompt"
    labels = [str(svg["aria-label"]) for svg in found.svgs]
    assert sum(label.startswith("Points over the recent control") for label in labels) == 1
    assert found.faults == []


def test_what_cannot_tell_is_never_best_and_in_no_mean() -> None:
    both = [*lines(length=1024), *lines(length=2048, recent=39, own=40)]
    found = page(both)
    scores, gains = texts(found.tables[0]), texts(found.tables[1])
    assert scores[2] == ["■ delta", "128", "75.0", "100.0 (cannot tell)", "–"]
    assert gains[1][3:] == ["+2.5 -7 to 13, p 1.000 (cannot tell)", "–"]
    assert texts(found.tables[3])[2][-2] == "cannot tell; outside the budget: the prompt"


@pytest.mark.slow
def test_terms_are_never_in_one_table() -> None:
    mixed = [
        *lines(terms="equal"),
        *[one | {"terms": "tuned"} for one in lines(own=20)[:2]],
        full(),
        line(),
    ]
    found = page(mixed)
    text = render(mixed)
    assert [
        text.count(f'<h3 class="terms">{name}</h3>')
        for name in ("Equal terms", "Tuned", "As given")
    ] == [4, 4, 3]
    overviews = [
        texts(table) for table in found.tables if texts(table)[0][:2] == ["Method", "Budget"]
    ]
    assert [one[-1][2] for one in overviews] == [
        "75.0",
        "+50.0 32 to 63, p <0.001",
        "50.0",
        "+25.0 10 to 38, p 0.002",
        "75.0",
    ]
