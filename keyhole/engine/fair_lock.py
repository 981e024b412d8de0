"""A lock that is granted in the order of requests.

`threading.Lock` guarantees no order: a thread that runs steps in a loop would acquire it again
before a waiting thread wakes up to add its request.
"""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """First come, first served; re-entrant."""

    def __init__(self) -> None:
        self._guard = threading.Lock()  # protects the fields below
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
            turn.acquire()  # released by the previous owner
        except BaseException:  # interrupted while it waited
            self._leave(turn)
            raise
        with self._guard:
            self._owner, self._depth = me, 1

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self._depth -= 1
            if self._depth == 0:
                self._hand_over()

    def _leave(self, turn: threading.Lock) -> None:
        """Stops waiting; passes the lock on if it was handed over meanwhile."""
        with self._guard:
            if turn in self._waiting:
                self._waiting.remove(turn)
            else:
                self._hand_over()

    def _hand_over(self) -> None:
        self._owner = _HANDED_OVER if self._waiting else None
        if self._waiting:
            self._waiting.popleft().release()


#: The owner while the lock is handed over to a thread that has not woken up yet.
_HANDED_OVER = -1
