"""The engine's side of a server in two processes; `remote.py` is the other side.

Steps hold Python's global lock nearly all the time. Parsing requests, detokenising and writing to
clients would compete for it, so another process does that. The two exchange messages of plain
data, each for many requests at once, over a pair of sockets.
"""

from __future__ import annotations

import logging
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

from keyhole.async_llm import load_of
from keyhole.errors import KeyholeError
from keyhole.llm import LLM
from keyhole.step_thread import Extras, StepThread, Update

logger = logging.getLogger("keyhole.server")

_FAILED = "the server failed; its log says why"
#: Before each message: its length in bytes.
LENGTH = struct.Struct(">Q")


def packed(message: tuple[Any, ...]) -> bytes:
    """A serialised message, preceded by its length."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


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

    def run(self) -> None:
        """Handles messages."""
        takers: dict[str, Callable[..., None]] = {
            "start": self._steps.start,
            "leave": self._steps.leave,
            "load": self._load,
            "add": self._add,
            "cancel": self._cancelled.add,
        }
        with self._link.makefile("rb") as messages:
            while size := messages.read(LENGTH.size):
                kind, *rest = pickle.loads(messages.read(LENGTH.unpack(size)[0]))
                takers[kind](*rest)

    def drain(self) -> None:
        """Tells the other process to end: after running requests, or at once the second time."""
        self._send("drain")

    def _send(self, *message: Any) -> None:
        data = packed(message)
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
        work.start()

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
        self._cancelled.discard(number)


def _sendable(error: BaseException) -> KeyholeError:
    """The error to send to the other process; internal errors are only logged here."""
    if isinstance(error, KeyholeError):
        return error
    logger.error("the engine failed", exc_info=error)
    return KeyholeError(_FAILED)
