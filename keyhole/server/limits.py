"""How much a server takes at once, and from whom."""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keyhole.server import logs
from keyhole.server.errors import ApiError
from keyhole.server.metrics import Metrics
from keyhole.server.settings import ServerConfig

logger = logging.getLogger("keyhole.server")

#: Paths that need no key: health checks, and the page, which asks for one.
OPEN_PATHS = {"/health", "/ready", "/"}
_PAGE = "/page/"
_REQUEST_ID = "x-request-id"
_MAX_ID = 128


class Admission:
    """How many completions are under way; those beyond the limit are refused at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.running = 0
        self.is_draining = False

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """While `count` completions run; ApiError 429 if too many do, 503 while draining."""
        if self.is_draining:
            raise ApiError(503, "the server is stopping", kind="server_error", code="draining")
        if self.running + count > self._limit:
            raise ApiError(
                429,
                f"{self.running} completions are under way and at most {self._limit} may be; "
                "try again later",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.running += count
        try:
            yield
        finally:
            self.running -= count


class Gate:
    """Around the application: keys, sizes of bodies, an identity and a count for every request."""

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: Metrics) -> None:
        self._app, self._config, self._metrics = app, config, metrics
        self._keys = [key.encode() for key in config.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks a request before anything of its body is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, status, taken, is_refused = Headers(scope=scope), 0, 0, False
        identity, begin = _identity(headers), time.perf_counter()
        record = logs.RequestRecord(identity, scope["method"], scope["path"])
        logs.current.set(record)

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[_REQUEST_ID] = identity
            await send(message)

        async def unless_refused(message: Message) -> None:
            if not is_refused:
                await answer(message)

        async def counted() -> Message:
            nonlocal taken, is_refused
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._config.max_body and not status:
                is_refused = True
                await self._refusal(self._too_large())(scope, receive, answer)
            return {"type": "http.disconnect"} if is_refused else message

        try:
            refused = self._refused(scope, headers)
            if refused is not None:
                await self._refusal(refused)(scope, receive, answer)
            else:
                await self._app(scope, counted, unless_refused)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.answered(route, status)
            logs.answered(record, status, time.perf_counter() - begin)

    def _refusal(self, error: ApiError) -> Response:
        self._metrics.failed(error.kind)
        return error.response()

    def _refused(self, scope: Scope, headers: Headers) -> ApiError | None:
        path = scope["path"]
        is_open = path in OPEN_PATHS or path.startswith(_PAGE)
        if self._keys and not is_open and not self._knows(headers):
            return ApiError(
                401,
                "no valid API key; send it as 'Authorization: Bearer KEY'",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        size = headers.get("content-length", "0")
        return self._too_large() if size.isdigit() and int(size) > self._config.max_body else None

    def _knows(self, headers: Headers) -> bool:
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode() if kind.lower() == "bearer" else b""
        # All are compared, so that the time tells nothing.
        return sum(hmac.compare_digest(given, known) for known in self._keys) > 0

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._config.max_body} bytes")


def _identity(headers: Headers) -> str:
    """What the caller calls the request, if that may stand in a header; else a name of ours."""
    given = headers.get(_REQUEST_ID, "")
    usable = 0 < len(given) <= _MAX_ID and given.isascii() and given.isprintable()
    return given if usable else uuid.uuid4().hex
