"""uvicorn around the application."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from keyhole.async_llm import AsyncLLM
from keyhole.errors import ConfigError
from keyhole.server.app import create_app
from keyhole.server.settings import ServerConfig

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
        timeout_graceful_shutdown=max(1, round(config.drain_timeout)),
    )
    with listening(config) as place:
        host, port = place.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        Server(settings, lambda: ready(f"http://{shown}:{port}")).run(sockets=[place])


class Server(uvicorn.Server):
    """Says when it listens, and takes no new requests once it is to stop."""

    def __init__(self, settings: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(settings)
        self._ready = ready

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A first signal drains, a second ends at once; uvicorn's own raises it again later."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; open connections get 503 for what they ask from now on."""
        app = self.config.app
        app.state.keyhole.admission.is_draining = True  # type: ignore[union-attr]
        await super().shutdown(sockets)


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
