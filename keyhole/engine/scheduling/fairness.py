"""Fair order: of threads that wait for the engine, and of callers with waiting requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from keyhole.engine.sequence import Sequence

#: Callers whose turns are remembered; beyond it, only those whose turn is still to come.
_MOST_CALLERS = 1024


class FairQueue(deque[Sequence]):
    """Waiting sequences, whose callers take turns.

    Start-time fair queueing: a caller's next request gets the turn after its last one, or the
    current turn if that one is past. The requests of one caller stay in order.

    shares_prompts: whether a prompt may be shared, so that one waits for another that computes it.
    stalled: a sequence that waits for pages of running ones; nothing overtakes it.
    """

    def __init__(self, *, shares_prompts: bool) -> None:
        super().__init__()
        self.stalled: Sequence | None = None
        self._shares_prompts = shares_prompts
        self._turn = 0  # the latest that was admitted
        self._next_turns: dict[str, int] = {}  # by caller

    def enter(self, sequence: Sequence) -> None:
        """Puts a new sequence at its turn; a pre-empted one returns by `appendleft`."""
        turn = max(self._turn, self._next_turns.get(sequence.caller, 0))
        if len(self._next_turns) >= _MOST_CALLERS:
            later = {caller: t for caller, t in self._next_turns.items() if t > self._turn}
            self._next_turns = later
        self._next_turns[sequence.caller] = turn + 1
        sequence.turn, place = turn, len(self)
        while place and self[place - 1].turn > turn:
            place -= 1
        self.insert(place, sequence)

    def admit(self, sequence: Sequence) -> None:
        """Removes a sequence that starts to run, and advances the turn to its own."""
        self.remove(sequence)
        self._turn = max(self._turn, sequence.turn)

    @property
    def begun(self) -> Sequence | None:
        """The sequence whose documents are being filled, or are filled already."""
        return next((one for one in self if one.filling is not None), None)

    @property
    def is_filling(self) -> bool:
        """Whether the documents of a sequence are being filled."""
        begun = self.begun
        return begun is not None and begun.wants_documents

    def next_to_run(self) -> Sequence | None:
        """The first sequence that may run now, or None.

        Skips sequences whose documents are not filled yet, or whose prompt another one computes.
        """
        for one in self:
            if one is self.stalled:
                return None
            if not one.wants_documents and not self._is_blocked(one):
                return one
        return None

    def next_to_fill(self, *, is_room: bool) -> Sequence | None:
        """The sequence whose documents are filled now, or None; is_room: for another to begin."""
        begun = self.begun
        if begun is None and is_room:
            # Requests before it in the queue get pages first.
            begun = next((one for one in self if not self._is_blocked(one)), None)
        return begun if begun is not None and begun.wants_documents else None

    def _is_blocked(self, sequence: Sequence) -> bool:
        return self._shares_prompts and sequence.is_blocked


class FairLock:
    """First come, first served; re-entrant.

    `threading.Lock` guarantees no order: a thread that runs steps in a loop would acquire it again
    before a waiting thread wakes up to add its request.
    """

    def __init__(self) -> None:
        self._deferred: deque[Callable[[], object]] = deque()
        self._guard = threading.Lock()  # protects the fields below
        self._waiting: deque[threading.Lock] = deque()
        self._owner: int | None = None
        self._depth = 0

    def defer(self, action: Callable[[], object]) -> None:
        """Runs an action under the lock: now if nobody holds it, else when its owner leaves it.

        It never waits, so that a finalizer may call it: garbage is collected in any thread, and
        in the middle of a step.
        """
        self._deferred.append(action)
        self._run_if_free()

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
        try:
            while self._depth == 1 and self._deferred:
                self._deferred.popleft()()
        finally:
            with self._guard:
                self._depth -= 1
                if self._depth == 0:
                    self._hand_over()
            self._run_if_free()

    def _run_if_free(self) -> None:
        """Runs what is deferred; leaves it to the owner if there is one."""
        if not self._deferred or not self._guard.acquire(blocking=False):
            return
        try:
            if self._owner is not None:
                return
            self._owner, self._depth = threading.get_ident(), 1
        finally:
            self._guard.release()
        self.__exit__()

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
