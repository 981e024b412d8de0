"""Elastic loading as a GPU would see it: on which stream copies run, and who waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from keyhole.cache.prefetch import Prefetcher
from keyhole.cache.resident_buffer import Resident, ResidentBuffer
from tests.cache.test_prefetch import small_world


class Streams:
    """A fake of a GPU's streams and events that records waits and operations."""

    def __init__(self, patch: pytest.MonkeyPatch, loads: Prefetcher) -> None:
        self.log: list[str] = []
        self.events = 0
        self._of_thread = threading.local()
        patch.setattr(torch.cuda, "Event", lambda: Event(self))
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.name)
        patch.setattr(
            torch.Tensor, "record_stream", lambda _, name: self.log.append(f"kept {name}")
        )
        loads._stream = "side"  # type: ignore[assignment]
        load_missing = ResidentBuffer.load_missing

        def told(buffer: ResidentBuffer, *operands: Any) -> Resident:
            self.log.append(f"{self.name} copies")
            return load_missing(buffer, *operands)

        patch.setattr(ResidentBuffer, "load_missing", told)

    @property
    def name(self) -> str:
        """Of the thread's stream."""
        return getattr(self._of_thread, "name", "main")

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        self._of_thread.name, before = name, self.name
        yield
        self._of_thread.name = before


class Event:
    def __init__(self, streams: Streams) -> None:
        self.streams, self.number = streams, streams.events
        streams.events += 1

    def record(self) -> None:
        self.streams.log.append(f"{self.streams.name} records {self.number}")

    def wait(self) -> None:
        self.streams.log.append(f"{self.streams.name} waits for {self.number}")


@pytest.mark.parametrize("recorded", [False, True])
def test_copies_on_a_gpu_lie_between_two_events(
    monkeypatch: pytest.MonkeyPatch, *, recorded: bool
) -> None:
    """All on the other stream is waited for: a recording ends with nothing open."""
    world = small_world()
    world.begin([1], recorded=recorded)
    streams = Streams(monkeypatch, world.loads)
    selection = world.select([[[1, 2, 20]]], 1)
    world.loads.start(selection, [0, 1])
    world.loads.wait(0, selection)
    keeps = ["kept main"] * 3
    begun = ["main records 0", "side waits for 0", "side copies", "side records 1"]
    begun += ["side waits for 0", "side copies", "side records 2"]
    if recorded:
        assert streams.log == [*begun, "main waits for 1", *keeps]
    world.end()
    assert streams.log[-4:] == ["main waits for 2", *keeps]
    assert [entry for entry in streams.log if "side" in entry] == begun[1:]
    monkeypatch.undo()
    world.loads._stream = None
    world.loads.close()
