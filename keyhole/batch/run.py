"""Answers a file of requests into another file, by the server's application, without a socket."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from tqdm.auto import tqdm

from keyhole.async_llm import AsyncLLM
from keyhole.batch.files import BatchOutput, BatchRequest, Shard, is_answer, read_lines, requests_of
from keyhole.errors import ConfigError
from keyhole.llm import LLM
from keyhole.server.app import create_app
from keyhole.server.settings import ServerConfig

#: Larger than any file: the server's limits protect it from clients, and this file is the user's
#: own.
_NO_LIMIT = 2**62


@dataclass(frozen=True, kw_only=True)
class BatchOutcome:
    """Numbers of lines. lines: of the shard. answered: by this run. kept: answered by earlier runs.
    failed: errors among both.
    """

    lines: int
    answered: int
    kept: int
    failed: int


def run_batch(
    source: str | Path,
    output: str | Path,
    make_llm: Callable[[], LLM],
    *,
    shard: Shard | None = None,
    settings: dict[str, Any] | None = None,
) -> BatchOutcome:
    """Answers every line of `source` that has no answer in `output` yet.

    make_llm: called if there is such a line. settings: values for some of `BATCH_SETTINGS`. If
    stderr is a terminal, it shows a progress bar.

    ConfigError for files that cannot be read or written, and for an output with answers to other
    lines than those of `source`; StorageFullError for a full disk.
    """
    part = Shard() if shard is None else shard
    if Path(source).exists() and not Path(source).is_file():
        raise ConfigError(f"{str(source)!r} must be a regular file, because it is read twice")
    if Path(output).exists() and Path(source).exists() and Path(output).samefile(source):
        raise ConfigError(
            f"input and output are the same file, {str(output)!r}; name another output"
        )
    ids = {line.id: part.has(line) for line in read_lines(source)}
    with BatchOutput(output) as file:
        _check_same_input(file, ids, source)
        wanted = [name for name, mine in ids.items() if mine]
        kept = sum(name in file.statuses for name in wanted)
        if kept < len(wanted):
            requests = (
                request
                for request in requests_of(read_lines(source))
                if part.has(request.line) and request.line.id not in file.statuses
            )
            llm = make_llm()
            app = batch_app(AsyncLLM(llm), settings or {})
            # Twice the batch, so that a request is already waiting when another one ends.
            at_once = 2 * llm.engine.config.max_batch
            asyncio.run(_answer_all(app, requests, at_once, file, (kept, len(wanted))))
            file.sync()
        failed = sum(not file.statuses[name] for name in wanted)
    return BatchOutcome(lines=len(wanted), answered=len(wanted) - kept, kept=kept, failed=failed)


async def _answer_all(
    app: FastAPI,
    requests: Iterable[BatchRequest],
    at_once: int,
    file: BatchOutput,
    progress: tuple[int, int],
) -> None:
    (kept, total), failed = progress, 0
    with tqdm(total=total, initial=kept, desc="lines", unit="line", disable=None) as bar:
        async with aclosing(answers(app, requests, at_once)) as entries:
            async for entry in entries:
                file.add(entry)
                failed += not is_answer(entry)
                bar.set_postfix(failed=failed, refresh=False)
                bar.update()


def _check_same_input(file: BatchOutput, ids: dict[str, bool], source: str | Path) -> None:
    others = [name for name in file.statuses if name not in ids]
    if others:
        raise ConfigError(
            f"{str(file.path)!r} has {len(others)} answers to requests that are not in "
            f"{str(source)!r}; name another output"
        )


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
