"""Grids are means of the numbers of the lines, and holes where nothing was measured."""

from __future__ import annotations

import numpy as np
import pytest

from keyhole.eval.report.cells import cells
from keyhole.eval.report.charts import needle_grid, recall_grid
from tests.eval.eval_lines import full, line

NAN = np.nan


def test_recall_is_shown_by_method_and_layer() -> None:
    lines = [line(), full(recall_per_layer=[1.0] * 5), line(budget=1, recall_per_layer=None)]
    grid = recall_grid(cells(lines))
    assert grid is not None
    assert grid.rows == ("delta, 128 tokens", "full")
    assert grid.columns == ("0", "1", "2", "3", "4")
    expected = [[1, NAN, 0.9, 0.43, NAN], [1, 1, 1, 1, 1]]
    np.testing.assert_array_equal(grid.values, expected)
    assert recall_grid(cells([line(recall_per_layer=[None, None])])) is None


def test_needles_are_means_by_depth_and_length() -> None:
    found = cells([line(length=2048, depths=[0.0, 0.0, 1.0], scores=[1, 0.5, 1]), line()])
    grid = needle_grid(found)
    assert grid is not None
    assert grid.rows == ("0 %", "50 %", "100 %")
    assert grid.columns == ("1,024", "2,048")
    np.testing.assert_array_equal(grid.values, [[1, 0.75], [0.5, NAN], [1, 1]])
    np.testing.assert_array_equal(grid.counts, [[1, 2], [2, 0], [1, 1]])


def test_depths_that_were_asked_for_are_rows() -> None:
    """Where a needle comes to stand differs a little from sample to sample."""
    asked = [(0, [0.02, 0.03, 0.01, 0.02]), (0.5, [0.47, 0.51, 0.52, 0.49])]
    lines = [line(task_settings={"depth": at}, depths=depths) for at, depths in asked]
    lines[1]["scores"] = [1, 1, 1, 1]
    grid = needle_grid(cells(lines))
    assert grid is not None
    assert grid.rows == ("0 %", "50 %")
    np.testing.assert_array_equal(grid.values, [[0.75], [1]])


def test_many_depths_fall_into_ten_bins() -> None:
    depths = [n / 100 for n in range(101)]
    grid = needle_grid(cells([line(depths=depths, scores=[float(d >= 0.5) for d in depths])]))
    assert grid is not None
    assert grid.rows[:2] == ("0–10 %", "10–20 %")
    assert grid.values[:, 0].tolist() == [0] * 5 + [1] * 5
    assert grid.counts[:, 0].sum() == 101


@pytest.mark.parametrize("depths", [None, [], [None] * 4, ["a"] * 4, [-1, 2, NAN, None]])
def test_without_depths_there_is_no_grid(depths: object) -> None:
    assert needle_grid(cells([line(depths=depths)])) is None
