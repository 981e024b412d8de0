"""Rows of stored documents reach the device whole, and no buffer is overwritten too early."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from keyhole.engine.documents.pinned_ring import PinnedBuffer, PinnedRing


class Event:
    """An event of a copy, which counts how often it was waited for."""

    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_a_buffer_has_the_rows_of_all_parts(dtype: torch.dtype) -> None:
    buffer = PinnedBuffer()
    for lengths in ((3, 1), (1,), (5, 2, 4), (2,)):  # longer and shorter than before
        parts = [torch.randn(n, 2, 6).mul(9).to(dtype) for n in lengths]
        assert torch.equal(buffer.fill(parts), torch.cat(parts))


def test_a_buffer_waits_for_the_copy_that_was_made_from_it() -> None:
    buffer, event = PinnedBuffer(), Event()
    buffer.fill([torch.ones(2, 3)])
    buffer.copied = cast(torch.cuda.Event, event)
    buffer.fill([torch.ones(2, 3)])
    assert event.waited == 1


def test_on_a_cpu_rows_are_joined() -> None:
    ring = PinnedRing(torch.device("cpu"))
    parts = [torch.randn(3, 2), torch.randn(1, 2)]
    for _ in range(6):
        assert torch.equal(ring.send(parts), torch.cat(parts))
