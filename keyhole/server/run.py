"""Runs the application with uvicorn."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

import torch
import uvicorn

from keyhole.async_llm import AsyncLLM
from keyhole.errors import ConfigError, KeyholeError
from keyhole.llm import LLM
from keyhole.server.app import create_app
from keyhole.server.errors import cut_off
from keyhole.server.settings import ServerConfig
from keyhole.server.state import State
from keyhole.server.two_processes import EngineServer, Link, RemoteLLM

logger = logging.getLogger("keyhole.server")

#: How long the thread that answers may delay the one that runs steps; Python's default of 5 ms is
#: as long as a step of a small model.
SWITCH_S = 0.0005
#: How long requests that the end cancels have to answer; none of them computes anything more.
_LAST_WORDS_S = 1.0
#: How long a client may read nothing of what it is sent, as in nginx (send_timeout). Its requests
#: count as running until its connection ends.
_UNREAD_MS = 60_000
#: On other systems, libraries may not survive a fork.
_FORKS = sys.platform == "linux"


def serve(llm: LLM, config: ServerConfig, ready: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM, then lets running requests finish within the drain timeout.

    ready: called with the address once it listens. ConfigError if it cannot listen there.
    """
    with listening(config) as place:
        if _FORKS:
            _serve_in_two(llm, config, ready, place)
        else:
            sys.setswitchinterval(SWITCH_S)
            served = AsyncLLM(llm, stream_interval=config.stream_interval)
            _server(served, config, ready, place).run(sockets=[place])


def _server(
    llm: AsyncLLM, config: ServerConfig, ready: Callable[[str], None], place: socket.socket
) -> Server:
    settings = uvicorn.Config(
        create_app(llm, config),
        log_config=None,
        access_log=False,
        lifespan="off",  # the application has no such tasks, and an end at once would cancel them
        # Requests have had the drain timeout by then; this lets pending writes finish.
        timeout_graceful_shutdown=1,
    )
    host, port = place.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return Server(settings, lambda: ready(f"http://{shown}:{port}"))


def _serve_in_two(
    llm: LLM, config: ServerConfig, ready: Callable[[str], None], place: socket.socket
) -> None:
    """This process runs the engine; a fork of it, which has all settings, answers HTTP."""
    with suppress(ConfigError):  # a model that does not support documents
        _ = llm.documents  # the digest of their model reads weights, which may be on a GPU
    ours, theirs = socket.socketpair()
    gc.collect()
    gc.freeze()  # garbage collection would write to shared memory, and so copy it
    with warnings.catch_warnings():
        # Python warns of threads that the fork lacks; it needs none of the existing ones.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        ours.close()
        _answer(llm, config, ready, place, theirs)
    theirs.close()
    place.close()
    engine = EngineServer(llm, ours, config.stream_interval)
    requests = threading.Thread(target=engine.run, name="requests", daemon=True)
    requests.start()
    code = _exit_code(child, engine.drain)
    requests.join()  # exiting beneath a thread that computes would abort this process
    gc.unfreeze()  # otherwise libraries report leaks at exit
    if code:
        raise KeyholeError(f"the process that answers HTTP ended with status {code}")


def _exit_code(child: int, drain: Callable[[], None]) -> int:
    """Waits for a child process; SIGINT and SIGTERM meanwhile call `drain`.

    The kernel may deliver a signal to any thread, and only the main one runs handlers: nothing
    would end `waitpid` if another thread got it. So this waits for the number that a signal writes.
    """
    signals, writes = socket.socketpair()
    writes.setblocking(False)
    with signals, writes:
        before = signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(sig, lambda *_: None)  # without a handler nothing is written
        try:
            while (found := os.waitpid(child, os.WNOHANG))[0] == 0:
                if signals.recv(1)[0] in (signal.SIGINT, signal.SIGTERM):
                    drain()
        finally:
            signal.set_wakeup_fd(before)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return os.waitstatus_to_exitcode(found[1])


def _answer(
    llm: LLM,
    config: ServerConfig,
    ready: Callable[[str], None],
    place: socket.socket,
    link: socket.socket,
) -> NoReturn:
    """Runs the fork. It exits without cleaning up libraries that the other process uses."""
    code = 1
    try:
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, signal.SIG_IGN)  # the other process handles them and sends "drain"
        torch.set_num_threads(1)  # a fork does not have the threads of torch's pool
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        server = _server(RemoteLLM(llm, Link(link)), config, ready, place)
        # Never closed, which would wait for threads, such as one that converts a large file.
        runner = asyncio.Runner(loop_factory=server.config.get_loop_factory())
        runner.run(server.serve(sockets=[place]))
        code = 0
    except BaseException:
        logger.exception("the process that answers HTTP failed")
    finally:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)


class Server(uvicorn.Server):
    """Reports when it listens; a signal drains it, and new requests then get 503."""

    def __init__(self, settings: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(settings)
        self._ready = ready
        self._drains_until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends at once; uvicorn's handler would re-raise it."""
        if self._drains_until is None:
            self._state.admission.is_draining = True
            self._drains_until = time.monotonic() + self._state.config.drain_timeout
        else:
            self.force_exit = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Extends uvicorn's, which runs ten times a second; returns whether to stop."""
        stops = await super().on_tick(counter)
        if self._drains_until is None:
            return stops
        is_idle = self._state.admission.is_idle
        return stops or is_idle or time.monotonic() > self._drains_until

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Extends uvicorn's."""
        llm = self._state.llm
        if isinstance(llm, RemoteLLM):
            await llm.open(
                drain=lambda: self.handle_exit(signal.SIGTERM, None),
                # Skips the clean-up, because another server may need the port at once.
                lost=lambda: os._exit(1),
            )
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Extends uvicorn's; open connections get 503 for new requests, and for those that run."""
        self._state.admission.is_draining = True
        self._state.llm.end(cut_off())
        await asyncio.to_thread(self._state.end_encoding)
        await super().shutdown(sockets)
        if ended := self.server_state.tasks:  # which say so to their clients
            await asyncio.wait(ended, timeout=_LAST_WORDS_S)
        if self._state.traces is not None:
            await asyncio.to_thread(self._state.traces.flush)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, except that a process with a remote engine does not handle signals."""
        if isinstance(self._state.llm, RemoteLLM):
            yield
        else:
            with super().capture_signals():
                yield

    @property
    def _state(self) -> State:
        state: State = self.config.app.state.keyhole  # type: ignore[union-attr]
        return state


def listening(config: ServerConfig) -> socket.socket:
    """A socket bound to the address; ConfigError if that fails."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    place = socket.socket(family, socket.SOCK_STREAM)
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
            place.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
        place.bind((config.host, config.port))
    except OSError as error:
        place.close()
        where = f"{config.host}:{config.port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from error
    return place
