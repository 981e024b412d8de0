"""A lock that threads get in the order in which they asked for it.

`threading.Lock` promises no order: a thread that runs one step after another would take it again
before a thread that waits to add a request wakes up.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """First come, first served; the thread that holds it may take it again."""

    def __init__(self) -> None:
        self._guard = threading.Lock()  # of what follows, held for a moment only
        self._waiting: deque[threading.Lock] = deque()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._guard:
            if self._owner in (None, me):
                self._owner, self._depth = me, self._depth + 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()  # until the thread before this one hands it over
        except BaseException:  # an interrupt while it waited
            self._leave(turn)
            raise
        with self._guard:
            self._owner, self._depth = me, 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._guard:
            self._depth -= 1
            if self._depth == 0:
                self._hand_over()

    def _leave(self, turn: threading.Lock) -> None:
        """Waits no longer; what was handed over meanwhile goes to the next one."""
        with self._guard:
            if turn in self._waiting:
                self._waiting.remove(turn)
            else:
                self._hand_over()

    def _hand_over(self) -> None:
        self._owner = _HANDED_OVER if self._waiting else None
        if self._waiting:
            self._waiting.popleft().release()


#: Nobody's identity: the lock is taken, and its thread has not woken up yet.
_HANDED_OVER = -1
