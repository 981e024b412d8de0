"""Answers a file of requests into another file.

The server's application answers lines, several at a time, without a socket.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from keyhole.async_llm import AsyncLLM
from keyhole.batch.files import BatchOutput, BatchRequest, Shard, is_answer, read_lines, requests_of
from keyhole.errors import ConfigError
from keyhole.llm import LLM
from keyhole.server.app import create_app, whole_body
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
            app = BatchApp(make_llm(), settings or {})
            asyncio.run(_answer_all(app, requests, file, (kept, len(wanted))))
            file.sync()
        failed = sum(not file.statuses[name] for name in wanted)
    return BatchOutcome(lines=len(wanted), answered=len(wanted) - kept, kept=kept, failed=failed)


async def _answer_all(
    app: BatchApp, requests: Iterable[BatchRequest], file: BatchOutput, progress: tuple[int, int]
) -> None:
    (kept, total), failed = progress, 0
    with tqdm(total=total, initial=kept, desc="lines", unit="line", disable=None) as bar:
        async with aclosing(app.answers(requests)) as entries:
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


class BatchApp:
    """The server's application without its limits; settings: values for some of BATCH_SETTINGS."""

    def __init__(self, llm: LLM, settings: dict[str, Any]) -> None:
        config = ServerConfig(**settings, max_queue=_NO_LIMIT, max_body=_NO_LIMIT, page=False)
        self._app = create_app(AsyncLLM(llm), config)
        # Twice the batch, so that a request is already waiting when another one ends.
        self._at_once = 2 * llm.engine.config.max_batch

    async def answers(
        self, requests: Iterable[BatchRequest]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yields an entry of the output for each request, in order of completion."""
        waiting = iter(requests)
        running: set[asyncio.Task[dict[str, Any]]] = set()
        try:
            while True:
                while len(running) < self._at_once and (request := next(waiting, None)) is not None:
                    running.add(asyncio.ensure_future(self._answer(request)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _answer(self, request: BatchRequest) -> dict[str, Any]:
        """The entry for one request."""
        head: dict[str, Any] = {"id": request.line.id, "custom_id": request.custom_id}
        if request.problem is not None:
            code, message = request.problem
            return {**head, "response": None, "error": {"code": code, "message": message}}
        identity = uuid.uuid4().hex
        status, body = await self._post(request.url, request.body, identity)
        response = {"status_code": status, "request_id": identity, "body": body}
        return {**head, "response": response, "error": None}

    async def _post(self, path: str, body: Any, identity: str) -> tuple[int, Any]:
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
        found, status = bytearray(), 0

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            found.extend(message.get("body", b""))

        await self._app(scope, whole_body(data), send)
        return status, json.loads(found)
