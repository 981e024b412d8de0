"""Turns rotate, and a system in another process tells its own time."""

from __future__ import annotations

import torch

from keyhole.bench.measure import Turn, take_turns


def test_everyone_is_first_once() -> None:
    seen: list[str] = []
    turns = {name: Turn(call=lambda name=name: seen.append(name)) for name in "abc"}  # type: ignore[misc]
    take_turns(turns, 3, torch.device("cpu"))
    assert "".join(seen) == "abcbcacab"


def test_a_reported_time_counts() -> None:
    turns = {"here": Turn(call=lambda: None), "there": Turn(call=lambda: None, told_ms=lambda: 7.0)}
    times = take_turns(turns, 2, torch.device("cpu"))
    assert times["there"] == [7.0, 7.0]
    assert max(times["here"]) < 7000
