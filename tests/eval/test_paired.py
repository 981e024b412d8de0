"""Shares, gains and exact tests against formulas written down once more."""

from __future__ import annotations

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import ConfigError
from keyhole.eval.comparisons import gain, newcombe, p_value, wilson

counts = st.integers(0, 40)


@given(st.integers(1, 300), st.data())
def test_wilson_ends_are_where_the_score_test_turns(items: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, items))
    for p in wilson(right, items):
        if 1e-9 < p < 1 - 1e-9:
            z = abs(right / items - p) / math.sqrt(p * (1 - p) / items)
            assert z == pytest.approx(1.96, rel=1e-6)


@given(counts, counts)
def test_mcnemar_counts_all_splits_that_are_no_more_likely(better: int, worse: int) -> None:
    n = better + worse
    ways = [math.comb(n, k) for k in range(n + 1)]
    wanted = sum(way for way in ways if way <= ways[better]) / 2**n
    assert p_value(better, worse) == pytest.approx(wanted, rel=1e-9)
    assert p_value(better, worse) == pytest.approx(p_value(worse, better))


@given(counts, counts, counts, counts)
def test_paired_intervals_are_newcombes(a: int, b: int, c: int, d: int) -> None:
    if a + b + c + d:
        assert newcombe(a, b, c, d) == pytest.approx(_square_and_add(a, b, c, d), abs=1e-9)


def test_a_published_paired_interval() -> None:
    """The example of Newcombe's paper: 36, 12, 2 and 0 of 50."""
    assert newcombe(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=1e-4)


def _square_and_add(a: int, b: int, c: int, d: int) -> tuple[float, float]:
    """The formula of the paper, in its letters."""
    n = a + b + c + d
    p1, p2 = (a + b) / n, (a + c) / n

    def ends(p: float) -> tuple[float, float]:
        z = 1.96
        root = z * math.sqrt(z * z + 4 * n * p * (1 - p))
        below, over = 2 * n * p + z * z, 2 * (n + z * z)
        return (below - root) / over, (below + root) / over

    (l1, u1), (l2, u2) = ends(p1), ends(p2)
    product = (a + b) * (c + d) * (a + c) * (b + d)
    q = a * d - b * c
    if q > n / 2:
        q -= n / 2
    elif q >= 0:
        q = 0
    phi = q / math.sqrt(product) if product else 0.0
    delta = (p1 - l1) ** 2 - 2 * phi * (p1 - l1) * (u2 - p2) + (u2 - p2) ** 2
    epsilon = (u1 - p1) ** 2 - 2 * phi * (u1 - p1) * (p2 - l2) + (p2 - l2) ** 2
    return p1 - p2 - math.sqrt(delta), p1 - p2 + math.sqrt(epsilon)


@given(counts, counts, counts, counts)
def test_paired_intervals_hold_the_difference(a: int, b: int, c: int, d: int) -> None:
    if a + b + c + d == 0:
        return
    low, high = newcombe(a, b, c, d)
    assert -1 <= low <= (b - c) / (a + b + c + d) <= high <= 1
    mirrored = newcombe(a, c, b, d)
    assert (low, high) == pytest.approx((-mirrored[1], -mirrored[0]))


def test_a_gain_counts_samples_on_which_two_differ() -> None:
    found = gain([1, 1, 1, 0, 1, 0], [1, 0, 0, 1, 0, 0])
    assert (found.better, found.worse, found.samples) == (3, 1, 6)
    assert found.points == pytest.approx(2 / 6)
    assert found.p == pytest.approx(2 * (4 + 1) / 16)
    assert (found.low, found.high) == newcombe(1, 3, 1, 1)
    same = gain([1, 0], [1, 0])
    assert (same.points, same.p) == (0, 1)
    assert same.low < 0 < same.high


def test_scores_between_right_and_wrong_have_an_interval_of_their_mean() -> None:
    own, other = [0.5, 0.75, 1.0, 0.25] * 10, [0.25, 0.5, 1.0, 0.5] * 10
    found = gain(own, other)
    assert (found.better, found.worse) == (20, 10)
    assert found.points == pytest.approx(0.0625)
    assert found.p == pytest.approx(p_value(20, 10))
    # The standard error of the mean of 40 differences.
    error = 1.96 * math.sqrt((2 * 0.1875**2 + 0.0625**2 + 0.3125**2) / 4 / 40)
    assert found.low == pytest.approx(0.0625 - error, abs=0.015)
    assert found.high == pytest.approx(0.0625 + error, abs=0.015)
    assert gain(own, other) == found
    assert (gain([0.5], [0.25]).low, gain([0.5], [0.25]).high) == (-1, 1)


def test_without_scipy_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ConfigError, match=r"pip install 'keyhole\[eval\]'"):
        p_value(1, 2)
