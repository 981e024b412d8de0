"""The thread that runs steps for many requests.

Requests and their updates are plain data identified by a number, so the caller may be an event loop
of this process (`AsyncLLM`) or another process (`keyhole serve`). The thread does not detokenise;
the caller does so while the next step runs.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from weakref import WeakSet, WeakValueDictionary

from keyhole.engine.read_trace import TokenReads
from keyhole.engine.sequence import Result, Sequence, Stats, result_of
from keyhole.llm import LLM

#: Delay of tokens per stream beyond the first: each delivery wakes the reader, which writes to
#: every stream and takes time from the cores that compute.
_WAIT_PER_STREAM_S = 0.01
#: The methods of `LLM` that create a sequence.
Method = Literal["submit", "submit_chat", "submit_ask"]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A request: the method of `LLM` that creates its sequence, and the arguments.

    group: requests with the same number have the same prompt and compute it once.
    whole: whether to send a single update, at the end.
    """

    method: Method
    arguments: Mapping[str, Any]
    group: int | None = None
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Optional parts of an update; most updates have none.

    logprobs, reads, prompt_token_ids, stats: as in a `Piece`. result, error: how the request ended.
    num_silent: how many of its last tokens have no text, such as an end token.
    """

    logprobs: list[dict[int, float]] | None = None
    reads: list[TokenReads] | None = None
    prompt_token_ids: list[int] | None = None
    stats: Stats | None = None
    result: Result | None = None
    error: BaseException | None = None
    num_silent: int = 0

    @property
    def is_last(self) -> bool:
        """Whether the request has ended."""
        return self.result is not None or self.error is not None


class Update(NamedTuple):
    """New tokens of request `number`; is_first: they are its first."""

    number: int
    tokens: list[int]
    extras: Extras | None = None
    is_first: bool = False


@dataclass(eq=False)
class _Request:
    """given: how many tokens were delivered; is_left: the caller has left."""

    number: int
    call: Submission
    stack: ExitStack = field(default_factory=ExitStack)
    sequence: Sequence | None = None
    given: int = 0
    is_left: bool = False
    error: BaseException | None = None


class _Gathering:
    """Combines the updates of several steps into one delivery.

    deliver: called with updates, by the thread that puts them or by a background thread. interval:
    as in `StepThread`.
    """

    def __init__(self, deliver: Callable[[list[Update]], None], interval: float) -> None:
        self._deliver, self._interval = deliver, interval
        self._guard = threading.Lock()  # for the fields below and the order of deliveries
        self._held: list[Update] = []
        self._due = 0.0
        self._is_watched = False

    def put(self, updates: list[Update]) -> None:
        """Takes the updates of a step."""
        with self._guard:
            self._held += updates
            if time.monotonic() >= self._due or any(map(_begins_or_ends, updates)):
                self._deliver_held()
            elif not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, name="updates", daemon=True).start()

    def _watch(self) -> None:
        """Delivers updates that are due while a long step runs."""
        while self._is_watched:
            time.sleep(self._interval)
            with self._guard:
                self._is_watched = bool(self._held)
                if self._held and time.monotonic() >= self._due:
                    self._deliver_held()

    def _deliver_held(self) -> None:
        held, self._held = _joined(self._held), []
        self._due = time.monotonic() + min(self._interval, (len(held) - 1) * _WAIT_PER_STREAM_S)
        self._deliver(held)


def _joined(updates: list[Update]) -> list[Update]:
    """Merges the updates of each request; those with extras stay separate."""
    found: dict[int, Update] = {}
    others = []
    for update in updates:
        known = found.get(update.number)
        if update.extras is not None:
            others.append(update)
        elif known is None:
            found[update.number] = update
        else:
            found[update.number] = known._replace(tokens=known.tokens + update.tokens)
    return [*found.values(), *others]


def _begins_or_ends(update: Update) -> bool:
    return update.is_first or (update.extras is not None and update.extras.is_last)


class StepThread:
    """Takes requests, runs steps, and delivers updates; the thread ends when there is no work.

    deliver: called once per step with an update for each request that has something new; calls
    never overlap. interval: the most seconds that tokens wait for those of later steps, less if few
    requests run; a request's first and last tokens never wait.
    """

    def __init__(
        self, llm: LLM, deliver: Callable[[list[Update]], None], interval: float = 0.0
    ) -> None:
        self._llm = llm
        self._deliver = _Gathering(deliver, interval).put if interval else deliver
        self._guard = threading.Lock()  # for the fields below
        self._new: list[_Request] = []
        self._known: dict[int, _Request] = {}
        self._thread: threading.Thread | None = None
        self._groups: WeakValueDictionary[int, Sequence] = WeakValueDictionary()
        _threads.add(self)

    @property
    def is_idle(self) -> bool:
        """Whether no request is running or waiting."""
        return self._thread is None

    def start(self, number: int, call: Submission) -> None:
        """Takes a request. Its documents stay open until it ends."""
        request = _Request(number, call)
        with self._guard:
            self._new.append(request)
            self._known[number] = request
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="keyhole", daemon=True)
                self._thread.start()

    def leave(self, number: int) -> None:
        """Frees a request before its next step; it gets no more updates."""
        with self._guard:
            request = self._known.get(number)
            if request is not None:
                request.is_left = True

    def close(self) -> None:
        """Frees all requests and waits for the step that runs."""
        with self._guard:
            for request in self._known.values():
                request.is_left = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        running: list[_Request] = []
        while True:
            with self._guard:
                taken, self._new = self._new, []
                if not (taken or running):
                    self._thread = None
                    return
            running = self._step(running + taken)

    def _step(self, requests: list[_Request]) -> list[_Request]:
        """Runs one step for all requests; returns those that have not ended."""
        engine = self._llm.engine
        with engine.lock:
            for request in requests:
                self._submit_or_free(request)
            if any(one.sequence and not one.sequence.is_finished for one in requests):
                try:
                    engine.step()
                except Exception as error:  # noqa: BLE001 - delivered to every caller of this step
                    for request in requests:
                        self._fail(request, error)
            updates = [update for one in requests if (update := self._update(one)) is not None]
        if updates:
            self._deliver(updates)
        left = []
        for request in requests:
            if request.sequence is None:
                request.stack.close()
                with self._guard:
                    del self._known[request.number]
            else:
                left.append(request)
        return left

    def _submit_or_free(self, request: _Request) -> None:
        if request.is_left:
            self._free(request)
        elif request.sequence is None:
            try:
                request.sequence = self._submit(request)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                request.error = error

    def _submit(self, request: _Request) -> Sequence:
        call = request.call
        if call.method == "submit_ask":
            return self._llm.submit_ask(request.stack, **call.arguments)
        submit = self._llm.submit if call.method == "submit" else self._llm.submit_chat
        if call.group is None:
            return submit(**call.arguments)
        sequence = submit(**call.arguments, after=self._groups.get(call.group))
        self._groups.setdefault(call.group, sequence)
        return sequence

    def _update(self, request: _Request) -> Update | None:
        """The new tokens, if any; clears the sequence of a request that has ended."""
        if request.error is not None:
            return Update(request.number, [], Extras(error=request.error))
        sequence = request.sequence
        if sequence is None:
            return None
        done, given = sequence.is_finished, request.given
        tokens = sequence.generated_from(given)
        if not done and (request.call.whole or not tokens):
            return None
        request.given += len(tokens)
        if not (done or sequence.params.logprobs is not None or sequence.reads is not None):
            return Update(request.number, tokens, is_first=not given)
        try:
            extras = _extras(sequence, given, len(tokens))
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self._free(request)
            extras = Extras(error=error)
        if done:
            request.sequence = None
        return Update(request.number, tokens, extras, is_first=not given)

    def _fail(self, request: _Request, error: BaseException) -> None:
        # One that the failed step has completed has its result.
        if request.sequence is not None and not request.sequence.is_finished:
            self._free(request)
            request.error = error

    def _free(self, request: _Request) -> None:
        if request.sequence is not None:
            self._llm.engine.abort(request.sequence)
            request.sequence = None


#: All that exist.
_threads: WeakSet[StepThread] = WeakSet()


def _close_all() -> None:
    """Ends all threads before Python does: a thread that is ended while it computes aborts the
    process.
    """
    for one in [*_threads]:
        one.close()


atexit.register(_close_all)


def _extras(sequence: Sequence, given: int, count: int) -> Extras:
    """The extras of `count` tokens after the first `given`; raises what ended the request."""
    done, reads = sequence.is_finished, sequence.reads
    wanted = sequence.params.logprobs is not None
    generated = sequence.num_generated
    return Extras(
        logprobs=sequence.logprobs[given : given + count] if wanted else None,
        reads=None if reads is None else reads[given : given + count],
        prompt_token_ids=None if reads is None or given else sequence.prompt,
        stats=None if reads is None else sequence.stats(),
        result=result_of(sequence) if done else None,
        num_silent=generated - sequence.detokenizer.num_tokens if done else 0,
    )
