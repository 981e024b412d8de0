"""Placing DELTA's layers is exact, and the file that remembers them says what is wrong with it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import ConfigError
from keyhole.policies.selection_layers import (
    Calibration,
    place_by_error,
    place_by_recall,
    place_by_shift,
    rank_by_shift,
)
from tests.disks import files_at_most

CALIBRATION = Calibration(
    model="some-model",
    method="optimal",
    num_layers=4,
    token_budget=256,
    full_layers=(0,),
    delta_layers=(1,),
    recall=(1.0, 1.0, 0.75, 0.5),
    measure="error",
    error=(0.0, 0.0, 0.25, 0.125),
)


def kept(recall: list[list[float]], candidates: list[int], chosen: tuple[int, ...]) -> float:
    """Summed recall of the candidates that are not chosen, the first candidate being chosen."""
    return sum(
        recall[max(layer for layer in chosen if layer < b)][b]
        for b in candidates
        if b not in chosen
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[float]], list[int], int]:
    depth = draw(st.integers(1, 8))
    # Few different values, so that there are many ties.
    share = st.sampled_from([0.0, 0.25, 0.5, 0.7, 1.0])
    recall = draw(
        st.lists(st.lists(share, min_size=depth, max_size=depth), min_size=depth, max_size=depth)
    )
    candidates = sorted(draw(st.sets(st.integers(0, depth - 1), min_size=1)))
    return recall, candidates, draw(st.integers(1, len(candidates)))


@given(problems())
def test_no_subset_keeps_more_than_the_one_placed(
    problem: tuple[list[list[float]], list[int], int],
) -> None:
    recall, candidates, count = problem
    placed = place_by_recall(recall, candidates, count)
    assert placed == sorted(set(placed))
    assert placed[0] == candidates[0]
    assert len(placed) == count
    assert set(placed) <= set(candidates)
    first, rest = candidates[0], candidates[1:]
    best = max(kept(recall, candidates, (first, *s)) for s in combinations(rest, count - 1))
    assert kept(recall, candidates, tuple(placed)) == pytest.approx(best)


@given(problems())
def test_no_subset_has_a_smaller_error_than_the_one_placed(
    problem: tuple[list[list[float]], list[int], int],
) -> None:
    error, candidates, count = problem
    placed = place_by_error(error, candidates, count)
    assert placed[0] == candidates[0]
    assert len(set(placed)) == count
    first, rest = candidates[0], candidates[1:]
    least = min(kept(error, candidates, (first, *s)) for s in combinations(rest, count - 1))
    assert kept(error, candidates, tuple(placed)) == pytest.approx(least)


@given(problems(), st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=8, max_size=8))
def test_the_first_candidate_and_the_largest_shifts_of_the_others_are_chosen(
    problem: tuple[list[list[float]], list[int], int], shift: list[float]
) -> None:
    _, candidates, count = problem
    placed = place_by_shift(shift, candidates, count)
    first, rest = candidates[0], candidates[1:]
    assert placed[0] == first
    assert placed == sorted(set(placed))
    best = max(combinations(rest, count - 1), key=lambda s: sum(shift[i] for i in s))
    assert sum(shift[i] for i in placed[1:]) == pytest.approx(sum(shift[i] for i in best))


def test_one_layer_is_the_first_candidate_and_all_are_all() -> None:
    recall = [[1.0] * 5 for _ in range(5)]
    assert place_by_recall(recall, [3, 1, 4], 1) == [1]
    assert place_by_recall(recall, [3, 1, 4], 3) == [1, 3, 4]


def test_equal_placements_take_the_earlier_layers() -> None:
    recall = [[0.5] * 6 for _ in range(6)]
    assert place_by_recall(recall, range(2, 6), 2) == [2, 3]


def test_a_ranking_by_shift_left_no_layer_sparse() -> None:
    """Shifts are largest in the last layers, and layers before the first choice read everything."""
    shift = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert rank_by_shift(shift, [2, 3, 4, 5], 2) == [4, 5]  # 2 and 3 are dense then
    assert place_by_shift(shift, [2, 3, 4, 5], 2) == [2, 5]
    assert place_by_shift(shift, [2, 3, 4, 5], 1) == [2]


def test_equal_shifts_go_to_the_earlier_layer() -> None:
    assert place_by_shift([9.0, 0.1, 0.3, 0.2, 0.3], [1, 2, 3, 4], 2) == [1, 2]
    assert place_by_shift([9.0, 0.1, 0.3, 0.2, 0.3], [1, 2, 3, 4], 3) == [1, 2, 4]


@pytest.mark.parametrize("count", [0, 4, -1])
def test_a_number_of_layers_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="num_delta_layers"):
        place_by_recall([[1.0] * 4] * 4, [1, 2, 3], count)
    with pytest.raises(ConfigError, match="num_delta_layers"):
        place_by_shift([1.0] * 4, [1, 2, 3], count)
    with pytest.raises(ConfigError, match="num_delta_layers"):
        place_by_error([[1.0] * 4] * 4, [1, 2, 3], count)


def test_a_saved_calibration_is_read_again(tmp_path: Path) -> None:
    CALIBRATION.save(tmp_path / "layers.json")
    assert Calibration.load(tmp_path / "layers.json") == CALIBRATION


def test_a_disk_without_room_leaves_the_old_calibration(tmp_path: Path) -> None:
    """It was emptied, so that the model could not be loaded with DELTA any more."""
    path = tmp_path / "layers.json"
    CALIBRATION.save(path)
    with (
        files_at_most(16),
        pytest.raises(ConfigError, match=r"cannot write the calibration '.*layers\.json': File"),
    ):
        replace(CALIBRATION, token_budget=32).save(path)
    assert Calibration.load(path) == CALIBRATION
    assert [*tmp_path.iterdir()] == [path]


def test_a_calibration_behind_a_link_is_replaced_there(tmp_path: Path) -> None:
    link, path = tmp_path / "link.json", tmp_path / "layers.json"
    link.symlink_to(path)
    CALIBRATION.save(link)
    assert link.is_symlink()
    assert Calibration.load(path) == CALIBRATION


def test_a_file_from_before_errors_were_measured_is_read(tmp_path: Path) -> None:
    old = {k: v for k, v in vars(CALIBRATION).items() if k not in ("measure", "error")}
    (tmp_path / "layers.json").write_text(json.dumps(old))
    found = Calibration.load(tmp_path / "layers.json")
    assert (found.measure, found.error) == ("mass", ())
    assert found.delta_layers == CALIBRATION.delta_layers


def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    with pytest.raises(ConfigError, match=r"layers\.json' cannot be read: No such file"):
        Calibration.load(path)
    for text in ("not json", "[]", '{"model": "some-model"}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"layers\.json"):
            Calibration.load(path)
    CALIBRATION.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"delta_layers": [-1]}))
    with pytest.raises(ConfigError, match="delta_layers"):
        Calibration.load(path)


def test_a_calibration_of_another_depth_is_refused() -> None:
    CALIBRATION.check_depth(4)
    with pytest.raises(ConfigError, match="4 layers, but this model has 6"):
        CALIBRATION.check_depth(6)
