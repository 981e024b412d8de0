"""Parts of a buffer do not overlap, and no buffer is written while somebody else has it."""

from __future__ import annotations

from typing import cast

import torch

from keyhole.engine.documents.pinned_ring import PinnedBuffer, PinnedRing


class Event:
    """An event of a copy, which counts how often it was waited for."""

    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_parts_arrive_as_they_were_written() -> None:
    ring = PinnedRing(torch.device("cpu"))
    for sizes in ((3, 1), (700,), (5, 256, 0, 4), (2,)):  # longer and shorter than before
        buffer = ring.take(sizes)
        for part, size in enumerate(sizes):
            buffer.memory(part)[:] = bytes([part + 1]) * size
        parts = ring.send(buffer)
        assert [part.tolist() for part in parts] == [
            [part + 1] * size for part, size in enumerate(sizes)
        ]


def test_a_buffer_waits_for_the_copy_that_was_made_from_it() -> None:
    buffer, event = PinnedBuffer(), Event()
    buffer.divide([6])
    buffer.copied = cast(torch.cuda.Event, event)
    buffer.divide([6])
    assert event.waited == 1


def test_nobody_gets_a_buffer_that_is_taken() -> None:
    ring = PinnedRing(torch.device("cpu"))
    taken = [ring.take([8]) for _ in range(9)]
    assert len({id(buffer) for buffer in taken}) == 9
    ring.put_back(taken[0])
    ring.send(taken[1])
    assert [ring.take([8]) for _ in range(2)] == taken[:2]
