"""Answers lines with the server's application, several at a time, without a socket."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Iterable, MutableMapping
from typing import Any

from fastapi import FastAPI

from keyhole.async_llm import AsyncLLM
from keyhole.batch.files import BatchRequest
from keyhole.server.app import create_app
from keyhole.server.settings import ServerConfig

#: Larger than any file: the server's limits protect it from clients, and this file is the user's
#: own.
_NO_LIMIT = 2**62


def batch_app(llm: AsyncLLM, settings: dict[str, Any]) -> FastAPI:
    """The server's application without its limits; settings: values for some of BATCH_SETTINGS."""
    config = ServerConfig(**settings, max_queue=_NO_LIMIT, max_body=_NO_LIMIT, page=False)
    return create_app(llm, config)


async def answers(
    app: FastAPI, requests: Iterable[BatchRequest], at_once: int
) -> AsyncGenerator[dict[str, Any], None]:
    """Yields an entry of the output for each request, in order of completion.

    at_once: the most requests in the engine at a time.
    """
    waiting = iter(requests)
    running: set[asyncio.Task[dict[str, Any]]] = set()
    try:
        while True:
            while len(running) < at_once and (request := next(waiting, None)) is not None:
                running.add(asyncio.ensure_future(answer(app, request)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def answer(app: FastAPI, request: BatchRequest) -> dict[str, Any]:
    """The entry for one request."""
    head: dict[str, Any] = {"id": request.line.id, "custom_id": request.custom_id}
    if request.problem is not None:
        code, message = request.problem
        return {**head, "response": None, "error": {"code": code, "message": message}}
    identity = uuid.uuid4().hex
    status, body = await _post(app, request.url, request.body, identity)
    response = {"status_code": status, "request_id": identity, "body": body}
    return {**head, "response": response, "error": None}


async def _post(app: FastAPI, path: str, body: Any, identity: str) -> tuple[int, Any]:
    """Status and JSON of the application's answer."""
    data = json.dumps(body).encode()
    headers = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(data)),
        "x-request-id": identity,
    }
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
    }
    begun, found = [{"type": "http.request", "body": data, "more_body": False}], bytearray()
    status = 0

    async def receive() -> MutableMapping[str, Any]:
        if begun:
            return begun.pop()
        # The only event after the body is a disconnect, which never happens here.
        await asyncio.Event().wait()
        raise AssertionError("the event is never set")

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        found.extend(message.get("body", b""))

    await app(scope, receive, send)
    return status, json.loads(found)
