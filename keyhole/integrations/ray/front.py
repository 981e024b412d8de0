"""Takes HTTP requests, sends each to a replica, and retries those of a dead replica."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send

from keyhole.integrations.ray.routing import routing_key
from keyhole.server.errors import ApiError, queue_full

#: Limited, because a request that crashes its replica must not crash all of them.
_ATTEMPTS = 3
_KEPT = (
    "type",
    "asgi",
    "http_version",
    "method",
    "scheme",
    "query_string",
    "headers",
    "client",
    "server",
)


class Front:
    """The ingress deployment, around a Forwarder."""

    def __init__(self, replicas: DeploymentHandle[Any], max_body: int) -> None:
        self._forwarder = Forwarder(replicas, max_body)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._forwarder


class Forwarder:
    """An ASGI application. max_body: the most bytes of a body that replicas accept."""

    def __init__(self, replicas: DeploymentHandle[Any], max_body: int) -> None:
        # gRPC is faster: Ray's own calls store every piece as an object.
        self._replicas = replicas.options(
            stream=True,
            method_name="answer",
            _by_reference=False,
            request_serialization="pickle",
            response_serialization="pickle",
        )
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards one request to a replica."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            body = await self._body(receive)
            if body is not None:
                await self._forward(scope, body, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """The body; None if the client has disconnected. Stops reading beyond the limit; the
        replica then refuses the body.
        """
        found = bytearray()
        while len(found) <= self._max_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            found += message.get("body", b"")
            if not message.get("more_body", False):
                break
        return bytes(found)

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        # The application's paths do not include Serve's route prefix.
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        plain = {name: scope[name] for name in _KEPT if name in scope}
        plain |= {"path": path, "raw_path": path.encode(), "root_path": ""}
        key = routing_key(path, body)
        exchange = ForwardedAnswer(path, send)
        for attempt in range(1, _ATTEMPTS + 1):
            pieces = self._replicas.remote(key, plain, body)
            try:
                await exchange.copy(pieces)
                return
            except (RayActorError, grpc.RpcError):
                if exchange.has_begun or attempt == _ATTEMPTS:
                    await exchange.fail(_DIED)
                    return
            except BackPressureError:
                await exchange.fail(_FULL)
                return
            except DeploymentUnavailableError:
                await exchange.fail(_UNAVAILABLE)
                return
            finally:
                pieces.cancel()  # no effect on a finished call


class ForwardedAnswer:
    """The part of an answer that the client has received."""

    def __init__(self, path: str, send: Send) -> None:
        self._path, self._send = path, send
        self._is_stream = False
        self.has_begun = False

    async def copy(self, pieces: AsyncGenerator[list[dict[str, Any]], None]) -> None:
        """Forwards an answer as it arrives."""
        async for messages in pieces:
            for message in messages:
                if message["type"] == "http.response.start":
                    self.has_begun = True
                    kinds = [value for name, value in message["headers"] if name == b"content-type"]
                    self._is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
                    # Serve's proxy adds this header.
                    message["headers"] = [
                        one for one in message["headers"] if one[0] != b"x-request-id"
                    ]
                await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Ends the answer with an error object; a body that is not a stream is cut off."""
        if not self.has_begun:
            response = error.response()
            start = {"status": response.status_code, "headers": response.raw_headers}
            await self._send({"type": "http.response.start", **start})
            await self._send({"type": "http.response.body", "body": bytes(response.body)})
            return
        if not self._is_stream:
            raise error
        await self._send({"type": "http.response.body", "body": self._last_event(error)})

    def _last_event(self, error: ApiError) -> bytes:
        if self._path != "/v1/responses":
            return f"data: {json.dumps(error.body)}\n\n".encode()
        event = {"type": "error", **error.body["error"]}
        return f"event: error\ndata: {json.dumps(event)}\n\n".encode()


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code=code, headers={"Retry-After": "1"})


_DIED = _unavailable("the replica with this request died; send it again", "replica_died")
_UNAVAILABLE = _unavailable(
    "no replica can be started; the log of the replica has the reason", "unavailable"
)
_FULL = queue_full("every replica is full, and no more requests may wait; try again later")


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
