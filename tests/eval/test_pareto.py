"""Points are the numbers of the lines, and the front is what nothing else beats."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.results_page.controls_pictures import pareto_chart
from keyhole.drawing import matplotlib
from keyhole.errors import ConfigError
from keyhole.eval.report import charts
from keyhole.eval.report.cells import cells
from keyhole.eval.report.plot_style import method_styles
from tests.eval.eval_lines import full, line


def test_points_are_the_numbers_of_the_lines() -> None:
    lines = [
        full(),
        line(budget=256, bytes_per_step=3e6, score=0.9),
        line(bytes_per_step=2e6, score=0.5),
        line(policy="quest", bytes_per_step=2.5e6, score=0.4),
    ]
    found = charts.points(cells(lines))
    told = {
        name: [(p.cell.budget, p.bytes_per_step, p.score, p.on_front) for p in own]
        for name, own in found.items()
    }
    assert told == {
        "full": [(None, 6 * 2**20, 1.0, True)],
        "delta": [(128, 2e6, 0.5, True), (256, 3e6, 0.9, True)],
        "quest": [(128, 2.5e6, 0.4, False)],
    }


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=8))
def test_the_front_is_what_no_other_beats(numbers: list[tuple[int, int]]) -> None:
    lines = [
        line(budget=place, bytes_per_step=read, score=score / 4)
        for place, (read, score) in enumerate(numbers)
    ]
    (own,) = charts.points(cells(lines)).values()
    for point in own:
        index = point.cell.budget
        assert index is not None
        read, score = numbers[index]
        better = [(r < read and s >= score) or (r <= read and s > score) for r, s in numbers]
        assert point.on_front == (not any(better))


def test_cells_without_both_numbers_have_no_point() -> None:
    lines = [line(bytes_per_step=None), line(score=None, scores=None, budget=2), line(budget=3)]
    assert [p.cell.budget for p in charts.points(cells(lines))["delta"]] == [3]
    assert charts.points(cells([line(bytes_per_step=0)])) == {}


def test_marks_stand_where_the_numbers_are() -> None:
    found = cells([full(), line(), line(budget=64, bytes_per_step=1e6, score=0.25)])
    pyplot = matplotlib()[0]
    figure, axis = pyplot.subplots()
    texts = charts.draw_pareto(
        axis, found, method_styles((cell.policy, cell.name) for cell in found)
    )
    drawn = {
        artist.get_gid(): (artist.get_xdata()[0], artist.get_ydata()[0])
        for artist in axis.lines
        if artist.get_gid()
    }
    assert axis.get_xscale() == "log"
    pyplot.close(figure)
    assert drawn.keys() == texts.keys()
    by_text = {texts[gid]: place for gid, place in drawn.items()}
    assert by_text == {
        "full: 100.0% (51% to 100%), 6.0 MiB a step": (6 * 2**20, 1.0),
        "delta, 128 tokens: 75.0% (30% to 95%), 1.5 MiB a step": (3 * 2**19, 0.75),
        "delta, 64 tokens: 25.0% (30% to 95%), 976.6 KiB a step": (1e6, 0.25),
    }


def test_a_chart_is_a_picture(tmp_path: Path) -> None:
    found = cells([full(), line(), line(length=2048), line(task="tiny_derive", scores=None)])
    pareto_chart(found, tmp_path / "x.png", title="Score")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_without_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to draw"):
        pareto_chart(cells([line(bytes_per_step=None)]), tmp_path / "x.png", title="")
