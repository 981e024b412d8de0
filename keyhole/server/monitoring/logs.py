"""The log of a server: one line per request, as text or JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from keyhole.engine.sequence import Result

logger = logging.getLogger("keyhole.server.requests")


@dataclass
class RequestRecord:
    """What is known of a request when it ends."""

    id: str
    method: str
    path: str
    prompt: Any = None
    results: list[Result] = field(default_factory=list)

    def fields(self, status: int, seconds: float) -> dict[str, Any]:
        """The fields of the log line; counts only if something was generated."""
        found: dict[str, Any] = {
            "id": self.id,
            "method": self.method,
            "path": self.path,
            "status": status,
            "duration_ms": round(seconds * 1e3, 1),
        }
        if self.results:
            # Each completion counts its prompt, as in /metrics.
            stats = [result.stats for result in self.results]
            found["prompt_tokens"] = sum(one.prompt_tokens for one in stats)
            found["completion_tokens"] = sum(one.generated_tokens for one in stats)
            found["finish_reason"] = ",".join(str(one.finish_reason) for one in self.results)
        if self.prompt is not None:
            found["prompt"] = self.prompt
        return found


#: The record of the request that this task answers; tasks that it starts share it.
current: ContextVar[RequestRecord | None] = ContextVar("current", default=None)


def finished(result: Result) -> None:
    """Records a completion of the current request."""
    record = current.get()
    if record is not None:
        record.results.append(result)


def asked(prompt: Any) -> None:
    """Records the prompt of the current request, for servers that log prompts."""
    record = current.get()
    if record is not None:
        record.prompt = prompt


def answered(record: RequestRecord, status: int, seconds: float) -> None:
    """Writes the line of a request."""
    fields = record.fields(status, seconds)
    # Quoted as JSON, so that no path or id can begin a new line.
    line = " ".join(f"{name}={json.dumps(value)}" for name, value in fields.items())
    logger.info("%s", line, extra={"request": fields})


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger and message; for a request its fields instead of the message."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        request = getattr(record, "request", None)
        line |= {"message": record.getMessage()} if request is None else request
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


@contextmanager
def configured(kind: str, handler: logging.Handler | None = None) -> Iterator[None]:
    """Sends the logs of this process to stderr, or to `handler`, as text or json, in the block."""
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    root, level = logging.getLogger(), logger.level
    handler = handler or logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if kind == "json" else text)
    root.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        root.removeHandler(handler)
