import pytest

from recipes.tiny_model.optimizers import planned


def test_warm_up_then_constant_then_a_line_to_zero():
    schedule = planned(1_000_000)
    assert schedule.factor(0) < 0.01
    assert schedule.factor(200_000) == schedule.factor(400_000) == 1.0
    assert schedule.factor(700_000) == pytest.approx(0.5)
    assert schedule.factor(1_000_000) == schedule.factor(2_000_000) == 0.0


def test_cooling_down_starts_at_the_present_rate():
    schedule = planned(1_000_000)
    cooled = schedule.cooled_down(700_000, 100_000)
    assert cooled.factor(700_000) == pytest.approx(schedule.factor(700_000))
    assert cooled.factor(750_000) == pytest.approx(0.25)
    assert cooled.factor(800_000) == 0.0


def test_another_total_moves_the_end_without_a_jump():
    schedule = planned(1_000_000)
    assert schedule.stretched(300_000, 2_000_000) == planned(2_000_000)
    stretched = schedule.stretched(700_000, 2_000_000)
    assert stretched.factor(700_000) == pytest.approx(0.5)
    assert stretched.factor(2_000_000) == 0.0
