"""A server in two processes: one with the engine, `EngineServer`, and one that serves HTTP, with an
`AsyncLLM` whose steps run in the other, `RemoteLLM`.

Steps hold Python's global lock nearly all the time. Parsing requests, detokenising and writing to
clients would compete for it, so another process does that. The two exchange messages of plain
data, each for many requests at once, over a pair of sockets.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from keyhole.async_llm import AsyncLLM, EngineLoad, load_of
from keyhole.documents.store import DocumentInfo, DocumentStore
from keyhole.engine.documents.library import Documents, Progress
from keyhole.errors import KeyholeError
from keyhole.llm import LLM, arguments_of
from keyhole.step_thread import Extras, StepThread, Submission, Update


class Link:
    """Messages to and from the engine's process; any thread may send them."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._answers: dict[int, queue.SimpleQueue[tuple[str, Any]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, takers: Mapping[str, Callable[..., None]]) -> None:
        """Handles messages in this event loop from now on.

        takers: handlers of "updates" of a step; of "drain", when the server should end; of "lost",
        when the other process has ended.
        """
        self._loop = asyncio.get_running_loop()
        reader, self._writer = await asyncio.open_connection(sock=self._end)
        self._tasks.add(asyncio.ensure_future(self._read(reader, takers)))

    async def _read(
        self, reader: asyncio.StreamReader, takers: Mapping[str, Callable[..., None]]
    ) -> None:
        while True:
            try:
                size = await reader.readexactly(_LENGTH.size)
                data = await reader.readexactly(_LENGTH.unpack(size)[0])
            except (asyncio.IncompleteReadError, OSError):
                takers["lost"]()
                return
            kind, *rest = pickle.loads(data)
            if kind in takers:
                takers[kind](*rest)
            else:
                number, value = rest
                self._answers[number].put((kind, value))

    def send(self, *message: Any) -> None:
        """Sends a message."""
        assert self._loop is not None
        assert self._writer is not None
        data = _packed(message)
        try:
            is_here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_here = False
        if is_here:
            self._writer.write(data)
        else:
            self._loop.call_soon_threadsafe(self._writer.write, data)

    def ask(self, number: int, *message: Any, progress: Progress | None = None) -> Any:
        """Sends a message and waits for the reply, in a thread; raises the error that comes back.

        progress: called with reports in the meantime; an error that it raises ends the work.
        """
        kind, *rest = message
        answers = self._answers[number] = queue.SimpleQueue()
        stopped: BaseException | None = None
        try:
            self.send(kind, number, *rest)
            while True:
                answered, value = answers.get()
                if answered == "reply":
                    return value
                if answered == "error":
                    raise stopped or value
                try:
                    if progress is not None and stopped is None:
                        progress(*value)
                except BaseException as error:  # noqa: BLE001 - raised when the work has ended
                    stopped = error
                    self.send("cancel", number)
        finally:
            del self._answers[number]


class _RemoteSteps:
    """A `StepThread` in the other process."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._running: set[int] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return not self._running

    def start(self, number: int, call: Submission) -> None:
        """Takes a request."""
        self._running.add(number)
        self._link.send("start", number, call)

    def leave(self, number: int) -> None:
        """Frees it."""
        self._running.discard(number)
        self._link.send("leave", number)


class RemoteLLM(AsyncLLM):
    """An `AsyncLLM` whose requests run in the process at the other end of a link.

    llm: a copy of that process's `LLM`, for its settings and tokenizer. It runs nothing, and its
    state of requests and pages is that of the fork.
    """

    def __init__(self, llm: LLM, link: Link) -> None:
        super().__init__(llm)
        self._link = link
        self._steps = _RemoteSteps(link)
        self._documents: Documents | None = None

    async def open(self, drain: Callable[[], None], lost: Callable[[], None]) -> None:
        """Starts, in the event loop of the requests.

        drain: called when the server should end. lost: called when the other process has ended.
        """
        await self._link.open({"updates": self._deliver, "drain": drain, "lost": lost})

    @property
    def documents(self) -> Documents:
        """The documents of the `LLM`, read here and encoded in the other process."""
        if self._documents is None:
            self._documents = _RemoteDocuments(self.llm.documents, self._add)
        return self._documents

    def load(self) -> EngineLoad:
        """As `AsyncLLM.load`; call it in a thread."""
        load: EngineLoad = self._link.ask(next(self._numbers), "load")
        return load

    def _add(self, arguments: Mapping[str, Any], progress: Progress | None) -> DocumentInfo:
        number = next(self._numbers)
        info: DocumentInfo = self._link.ask(number, "add", arguments, progress=progress)
        return info


_Add = Callable[[Mapping[str, Any], Progress | None], DocumentInfo]


class _RemoteDocuments(Documents):
    """Documents that another process encodes."""

    def __init__(self, known: Documents, add: _Add) -> None:
        self._engine, self.place = known._engine, known.place
        # A separate store: this process must not read files that the other one opened.
        self.store = DocumentStore(
            known.place, known.store.fingerprint, limit_bytes=known.store.limit_bytes
        )
        self._add = add

    @arguments_of(Documents.add)
    def add(self, *, progress: Progress | None = None, **arguments: Any) -> DocumentInfo:
        """As `Documents.add`."""
        return self._add(arguments, progress)


logger = logging.getLogger("keyhole.server")

_FAILED = "internal error; the server's log has details"
#: Before each message: its length in bytes.
_LENGTH = struct.Struct(">Q")


def _packed(message: tuple[Any, ...]) -> bytes:
    """A serialised message, preceded by its length."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class _CancelledError(KeyholeError):
    """Stops the encoding of a document whose client has disconnected."""


class EngineServer:
    """Runs the other process's requests until that process closes its end of the sockets.

    interval: as in `StepThread`.
    """

    def __init__(self, llm: LLM, link: socket.socket, interval: float) -> None:
        self._llm, self._link = llm, link
        self._sending = threading.Lock()
        self._steps = StepThread(llm, self._deliver, interval)
        self._cancelled: set[int] = set()
        self._encoding: dict[int, threading.Thread] = {}

    def run(self) -> None:
        """Handles messages; in the end, nothing runs or is being encoded."""
        takers: dict[str, Callable[..., None]] = {
            "start": self._steps.start,
            "leave": self._steps.leave,
            "load": self._load,
            "add": self._add,
            "cancel": self._cancelled.add,
        }
        try:
            for kind, *rest in self._messages():
                takers[kind](*rest)
        finally:
            self._steps.close()
            self._end_encoding()

    def _messages(self) -> Iterator[tuple[Any, ...]]:
        """Those of the other process until it ends, even in the middle of one."""
        with self._link.makefile("rb") as sent, suppress(ConnectionResetError):
            while len(size := sent.read(_LENGTH.size)) == _LENGTH.size:
                (expected,) = _LENGTH.unpack(size)
                if len(data := sent.read(expected)) < expected:
                    return
                yield pickle.loads(data)

    def drain(self) -> None:
        """Tells the other process to end: after running requests, or at once the second time."""
        self._send("drain")

    def _send(self, *message: Any) -> None:
        data = _packed(message)
        try:
            with self._sending:
                self._link.sendall(data)
        except OSError:  # the other process has ended, and so will this one
            logger.debug("no process reads a message")

    def _deliver(self, updates: list[Update]) -> None:
        sendable: dict[int, KeyholeError] = {}
        sent = []
        for update in updates:
            error = None if update.extras is None else update.extras.error
            if error is not None:
                if id(error) not in sendable:  # one failed step may concern many requests
                    sendable[id(error)] = _sendable(error)
                update = update._replace(extras=Extras(error=sendable[id(error)]))
            sent.append(update)
        self._send("updates", sent)

    def _load(self, number: int) -> None:
        self._send("reply", number, load_of(self._llm.engine))

    def _add(self, number: int, arguments: Mapping[str, Any]) -> None:
        work = threading.Thread(target=self._encode, args=(number, arguments), daemon=True)
        self._encoding[number] = work
        work.start()

    def _end_encoding(self) -> None:
        left = [*self._encoding.items()]
        self._cancelled.update(number for number, _ in left)
        for _, work in left:
            work.join()

    def _encode(self, number: int, arguments: Mapping[str, Any]) -> None:
        def report(done: int, tokens: int) -> None:
            if number in self._cancelled:
                raise _CancelledError
            self._send("progress", number, (done, tokens))

        try:
            info = self._llm.documents.add(**arguments, progress=report)
        except Exception as error:  # noqa: BLE001 - the other process raises it
            self._send("error", number, _sendable(error))
        else:
            self._send("reply", number, info)
        del self._encoding[number]
        self._cancelled.discard(number)


def _sendable(error: BaseException) -> KeyholeError:
    """The error to send to the other process; internal errors are only logged here."""
    if isinstance(error, KeyholeError):
        return error
    logger.error("the engine failed", exc_info=error)
    return KeyholeError(_FAILED)
