"""Tokens of several steps that are handed out at once."""

from __future__ import annotations

import queue
from collections.abc import Callable

import pytest

from keyhole import step_thread
from keyhole.errors import KeyholeError
from keyhole.step_thread import Extras, Update, _Gathering

_Delivered = queue.SimpleQueue[list[Update]]


@pytest.fixture
def delivered() -> _Delivered:
    return queue.SimpleQueue()


@pytest.fixture
def gathering(
    delivered: _Delivered, monkeypatch: pytest.MonkeyPatch
) -> Callable[[float], _Gathering]:
    """One whose requests wait a minute for each other, at most the interval."""
    monkeypatch.setattr(step_thread, "_WAIT_PER_STREAM_S", 60.0)
    return lambda interval: _Gathering(delivered.put, interval)


def begun(*numbers: int) -> list[Update]:
    return [Update(number, [0], is_first=True) for number in numbers]


def test_first_tokens_and_ends_take_along_what_waits(
    delivered: _Delivered, gathering: Callable[[float], _Gathering]
) -> None:
    gathered = gathering(60.0)
    gathered.put(begun(1, 2))
    assert delivered.get_nowait() == begun(1, 2)
    gathered.put([Update(1, [5]), Update(2, [6])])
    gathered.put([Update(1, [7])])
    assert delivered.empty()
    gathered.put([Update(2, [8]), *begun(3)])
    assert delivered.get_nowait() == [Update(1, [5, 7]), Update(2, [6, 8]), *begun(3)]
    gathered.put([Update(1, [9])])
    assert delivered.empty()
    ended = Update(2, [], Extras(error=KeyholeError("gone")))
    gathered.put([ended])
    assert delivered.get_nowait() == [Update(1, [9]), ended]


def test_what_comes_with_tokens_stays_with_them(
    delivered: _Delivered, gathering: Callable[[float], _Gathering]
) -> None:
    gathered = gathering(60.0)
    gathered.put(begun(1, 2))
    delivered.get_nowait()
    told = [Update(1, [n], Extras(logprobs=[{n: -0.5}])) for n in (5, 6)]
    for update in told:
        gathered.put([update, Update(2, update.tokens)])
    gathered.put([Update(2, [7], Extras(num_silent=1, error=KeyholeError("gone")))])
    found = delivered.get_nowait()
    assert [one for one in found if one.number == 1] == told
    assert [one.tokens for one in found if one.number == 2] == [[5, 6], [7]]


def test_tokens_are_handed_out_although_no_step_follows(
    delivered: _Delivered, gathering: Callable[[float], _Gathering]
) -> None:
    gathered = gathering(0.01)
    gathered.put(begun(1, 2))
    delivered.get_nowait()
    gathered.put([Update(1, [5])])
    assert delivered.get(timeout=30) == [Update(1, [5])]


def test_a_request_alone_waits_for_nothing(
    delivered: _Delivered, gathering: Callable[[float], _Gathering]
) -> None:
    gathered = gathering(60.0)
    gathered.put(begun(1))
    gathered.put([Update(1, [5])])
    gathered.put([Update(1, [6])])
    assert [delivered.get_nowait() for _ in range(3)] == [
        begun(1),
        [Update(1, [5])],
        [Update(1, [6])],
    ]
