"""Ctrl-C that waits until a step is done, so that what there is can be kept."""

from __future__ import annotations

import signal
from types import FrameType

#: What a shell says of a program that Ctrl-C ended.
INTERRUPTED = 130


class Interrupt:
    """Remembers the first of these signals in `seen`; a second one raises KeyboardInterrupt."""

    seen = False

    def __init__(self, *signals: signal.Signals) -> None:
        self._signals = signals or (signal.SIGINT,)

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._see) for number in self._signals}
        return self

    def _see(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
