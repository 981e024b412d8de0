"""How long documents are filled in a step, and by forwards of how many tokens."""

from __future__ import annotations

import numpy as np
import pytest

from keyhole.engine.documents.filling import Pace


class _Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("keyhole.engine.documents.filling.time.perf_counter", lambda: self.now)


def test_units_end_before_twice_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = _Clock(monkeypatch), Pace()
    random = np.random.default_rng(0)
    for _ in range(31):
        pace.decoded(0.010)
    for number in range(201):
        assert pace.begin(spent=0.010, alone=False, only_decodes=True)
        begin, goes_on = clock.now, True
        pace.resume("load")
        while goes_on:
            clock.now += random.uniform(0.0004, 0.0006)
            goes_on = pace.goes_on("load")
        assert 0.003 < clock.now - begin < 0.005 or number == 0


def test_a_unit_whose_duration_is_unknown_has_a_step_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ran at the end of a step that had been filled to its target: 3.6 times the median."""
    clock, pace = _Clock(monkeypatch), Pace()
    pace.decoded(0.010)
    pace.begin(spent=0.010, alone=False, only_decodes=True)
    pace.resume("")
    clock.now += 0.001
    assert not pace.goes_on("load")
    assert pace.begin(spent=0.010, alone=False, only_decodes=True)
    pace.resume("load")
    clock.now += 0.001
    assert pace.goes_on("load")
    assert not pace.goes_on("summarise")


def test_a_step_that_took_long_has_no_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    _Clock(monkeypatch)
    pace = Pace()
    pace.decoded(0.010)
    assert not pace.begin(spent=0.018, alone=False, only_decodes=True)
    assert pace.begin(spent=0.018, alone=False, only_decodes=False)  # prompts took it
    assert pace.begin(spent=0.018, alone=True, only_decodes=True)


def test_forwards_take_as_many_tokens_as_a_step_has_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _Clock(monkeypatch)
    pace = Pace()
    pace.decoded(0.010)
    pace.begin(spent=0.010, alone=False, only_decodes=True)
    for _ in range(100):  # 2 ms, and 50 us for each token
        size = pace.size(10_000, 1024)
        assert size % 4 == 0
        pace.forward(size, 0.002 + 0.00005 * size)
    assert 30 < size < 90
    pace.begin(spent=0.0, alone=True, only_decodes=True)
    assert pace.size(10_000, 1024) == 1024


@pytest.mark.parametrize("left", range(1, 60))
def test_no_part_is_small_unless_all_is(left: int) -> None:
    pace, parts = Pace(), []
    pace.tokens = 16
    while left:
        parts.append(pace.part(left, 1024))
        left -= parts[-1]
    assert all(part == 16 for part in parts[:-1])
    assert parts[-1] >= 4 or len(parts) == 1
