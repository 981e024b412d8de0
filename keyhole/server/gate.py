"""Middleware of the application: access, the size of bodies, and the log of requests."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keyhole.config import bytes_text
from keyhole.server import logs
from keyhole.server.errors import GONE, ApiError, api_error, cut_off
from keyhole.server.settings import is_local
from keyhole.server.state import State

logger = logging.getLogger("keyhole.server")

#: Paths that need no key: health checks, the page and the API's documentation, which ask for one.
OPEN_PATHS = {"/health", "/ready", "/", "/docs", "/openapi.json"}
#: Files of the page and of the documentation.
_FILES = ("/page/", "/static-offline-docs/")
_REQUEST_ID = "x-request-id"
_MAX_ID = 128


class Gate:
    """Checks keys, hosts and body sizes; gives every request an id and a log line."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app, self._state, self._config = app, state, state.config
        self._keys = [key.encode() for key in state.config.api_key]
        # With a key, or if `insecure`, requests may use other host names, such as a proxy's.
        self._only_local = not (self._keys or state.config.insecure)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks a request before its body is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, begin, came = Headers(scope=scope), time.perf_counter(), time.time()
        record = logs.RequestRecord(_identity(headers), scope["method"], scope["path"])
        logs.current.set(record)
        exchange = _Exchange(receive, send, record.id, self._config.max_body)
        try:
            with self._state.admission.answer():
                await self._answer(scope, headers, exchange)
        finally:
            seconds, status = time.perf_counter() - begin, exchange.status
            route = getattr(scope.get("route"), "path", "other")
            self._state.metrics.answered(route, status)
            logs.answered(record, status, seconds)
            if self._state.traces is not None:
                self._state.traces.answered(record, route, status, (came, came + seconds), headers)

    async def _answer(self, scope: Scope, headers: Headers, exchange: _Exchange) -> None:
        refused = self._refused(scope, headers)
        try:
            if refused is not None:
                raise refused
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            if not self._state.admission.is_draining:
                raise
            if not exchange.status:
                await cut_off().response()(scope, exchange.receive, exchange.send)
        except ClientDisconnect:  # while it sent its request
            if exchange.status:
                return
            await Response(status_code=GONE)(scope, exchange.receive, exchange.send)
        except Exception as error:
            if refused is None:
                logger.exception("a request failed")
            if exchange.status:  # the client has a partial answer, which ends early
                raise
            failure = api_error(error)
            self._state.metrics.failed(failure.kind)
            await failure.response()(scope, exchange.receive, exchange.send)

    def _refused(self, scope: Scope, headers: Headers) -> ApiError | None:
        if self._only_local and not _is_from_here(headers):
            return ApiError(
                403,
                "a server without an API key answers requests from localhost only, not from other "
                "hosts or web pages; start it with --api-key or --insecure",
                kind="permission_error",
            )
        path = scope["path"]
        is_open = path in OPEN_PATHS or path.startswith(_FILES)
        if self._keys and not is_open and not self._knows(headers):
            return ApiError(
                401,
                "no valid API key; send it as 'Authorization: Bearer KEY'",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        size = headers.get("content-length", "0")
        most = self._config.max_body
        return ApiError(413, _too_large(most)) if size.isdigit() and int(size) > most else None

    def _knows(self, headers: Headers) -> bool:
        given = bearer(headers)
        # All are compared, so that the time reveals nothing.
        return sum(hmac.compare_digest(given, known) for known in self._keys) > 0


class _Exchange:
    """Counts the bytes of a request's body, and adds the request's id to its answer.

    status: of the answer; 0 before it begins.
    """

    def __init__(self, receive: Receive, send: Send, identity: str, most: int) -> None:
        self._receive, self._send, self._identity, self._most = receive, send, identity, most
        self._taken = 0
        self.status = 0

    async def receive(self) -> Message:
        """The next part of the body; HTTPException, which FastAPI passes on, if it is too large."""
        message = await self._receive()
        self._taken += len(message.get("body", b""))
        if self._taken > self._most and not self.status:
            raise HTTPException(413, _too_large(self._most))
        return message

    async def send(self, message: Message) -> None:
        """Sends a part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[_REQUEST_ID] = self._identity
        await self._send(message)


def _too_large(most: int) -> str:
    return f"the body must be at most {bytes_text(most)}"


def bearer(headers: Headers) -> bytes:
    """The key that a request sends; empty without one."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    # A header is bytes, which arrive as latin-1.
    return key.strip().encode("latin-1") if kind.lower() == "bearer" else b""


def _is_from_here(headers: Headers) -> bool:
    """Whether a request is addressed to this machine, and not sent by another site's page.

    A page of another site may send requests to 127.0.0.1, and may point its own name there.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    try:
        name = urlsplit(f"//{host}").hostname
        place = host if origin is None else urlsplit(origin).netloc
    except ValueError:  # malformed
        return False
    return is_local(name or "") and place == host


def _identity(headers: Headers) -> str:
    """The request's id: the caller's, if it is a valid header value; else a new one."""
    given = headers.get(_REQUEST_ID, "")
    usable = 0 < len(given) <= _MAX_ID and given.isascii() and given.isprintable()
    return given if usable else uuid.uuid4().hex
