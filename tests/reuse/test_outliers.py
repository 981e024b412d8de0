"""PauTa's criterion: three deviations below the mean, which eleven numbers allow and ten do not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole.reuse.block_scores import outliers


@given(
    st.lists(
        st.floats(-50, 50, width=32) | st.sampled_from([0.0, 1.0, math.inf]),
        min_size=1,
        max_size=40,
    )
)
def test_it_is_the_criterion_written_out(alphas: list[float]) -> None:
    finite = [alpha for alpha in alphas if math.isfinite(alpha)]
    mean = math.fsum(finite) / len(finite) if finite else 0.0
    spread = math.sqrt(math.fsum((a - mean) ** 2 for a in finite) / max(1, len(finite)))
    found = outliers(torch.tensor([alphas]))[0].tolist()
    for alpha, out in zip(alphas, found, strict=True):
        distance = (mean - 3 * spread) - alpha
        if abs(distance) > 1e-6 * (1 + abs(mean)):  # rounding decides closer ones
            assert out == (distance > 0)


@pytest.mark.parametrize("far", [1.0, 1e-3, 1e6, 7.3])
def test_eleven_blocks_may_have_an_outlier_and_ten_may_not(far: float) -> None:
    """One of ten numbers can deviate by at most three deviations, except for rounding."""
    base = 0.1234567
    eleven = torch.tensor([base] * 5 + [base - far] + [base] * 5)
    assert outliers(eleven).nonzero().flatten().tolist() == [5]
    for number in range(1, 11):
        ten = torch.full((number,), base)
        ten[number // 2] -= far
        assert not outliers(ten).any()


def test_important_blocks_only_are_outliers() -> None:
    alpha = torch.ones(20)
    alpha[3], alpha[7] = 100.0, -100.0
    assert outliers(alpha).nonzero().flatten().tolist() == [7]


def test_blocks_without_an_alpha_do_not_count() -> None:
    alpha = torch.full((14,), 0.5)
    alpha[4] = -2.0
    alpha[-1] = math.inf
    assert outliers(alpha).nonzero().flatten().tolist() == [4]
    alpha[-4:] = math.inf  # ten are left
    assert not outliers(alpha).any()
    assert not outliers(torch.full((3, 12), math.inf)).any()


def test_layers_are_judged_apart() -> None:
    alpha = torch.full((2, 12), 0.5)
    alpha[1, 6] = -1.0
    assert outliers(alpha).nonzero().tolist() == [[1, 6]]


def test_another_number_of_deviations() -> None:
    alpha = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])  # 2 deviations below the mean
    assert outliers(alpha, sigmas=1.9).tolist() == [True, False, False, False, False]
    assert not outliers(alpha, sigmas=2.1).any()
