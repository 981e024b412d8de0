"""uvicorn around the application."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from keyhole.async_llm import AsyncLLM
from keyhole.errors import ConfigError
from keyhole.server.app import create_app
from keyhole.server.settings import ServerConfig
from keyhole.server.state import State

logger = logging.getLogger("keyhole.server")

#: How long the thread that answers may keep the one that runs steps waiting; Python's own 5 ms are
#: as long as a step of a small model.
_SWITCH_S = 0.0005


def serve(llm: AsyncLLM, config: ServerConfig, ready: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM, then lets running requests finish within the drain timeout.

    ready: called with the address once it listens. ConfigError if it cannot listen there.
    """
    sys.setswitchinterval(_SWITCH_S)
    app = create_app(llm, config)
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        # Requests have had the drain timeout by then; what is written goes out.
        timeout_graceful_shutdown=1,
    )
    with listening(config) as place:
        host, port = place.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        Server(settings, lambda: ready(f"http://{shown}:{port}")).run(sockets=[place])


class Server(uvicorn.Server):
    """Says when it listens; a signal drains it: it answers new requests with 503 meanwhile."""

    def __init__(self, settings: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(settings)
        self._ready = ready
        self._drains_until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A first signal drains, a second ends at once; uvicorn's own raises it again later."""
        if self._drains_until is None:
            self._state.admission.is_draining = True
            self._drains_until = time.monotonic() + self._state.config.drain_timeout
        else:
            self.force_exit = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """As uvicorn's, ten times a second; whether to stop."""
        stops = await super().on_tick(counter)
        if self._drains_until is None:
            return stops
        is_idle = not self._state.admission.running
        return stops or is_idle or time.monotonic() > self._drains_until

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; open connections get 503 for what they ask from now on."""
        self._state.admission.is_draining = True
        await super().shutdown(sockets)

    @property
    def _state(self) -> State:
        state: State = self.config.app.state.keyhole  # type: ignore[union-attr]
        return state


def listening(config: ServerConfig) -> socket.socket:
    """A socket at the address; ConfigError if it cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    place = socket.socket(family, socket.SOCK_STREAM)
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind((config.host, config.port))
    except OSError as error:
        place.close()
        where = f"{config.host}:{config.port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from error
    return place
