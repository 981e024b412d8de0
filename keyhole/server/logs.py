"""The log of a server, a line per request as text or JSON, and its traces for OpenTelemetry.

A trace is the request, with spans for queue, prefill and decode. Spans are created when a request
has ended, from times that the engine recorded, so tracing costs nothing during generation. They
have counts, never texts. Traces need the extra `keyhole[otel]`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from keyhole.engine.sequence import Result
from keyhole.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

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


_NS = 10**9
_FLUSH_MS = 5000


def make_provider(endpoint: str) -> TracerProvider:
    """Sends traces to a collector, by OTLP over HTTP.

    endpoint: such as "http://127.0.0.1:4318/v1/traces". ConfigError if the extra is missing.
    """
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter") is None:
        raise ConfigError("otlp_endpoint needs more packages: pip install 'keyhole[otel]'")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", "keyhole")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider


class Traces:
    """Creates the spans of requests that have ended. provider: where they are sent."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("keyhole.server")
        self._propagator = TraceContextTextMapPropagator()

    def answered(
        self,
        record: RequestRecord,
        route: str,
        status: int,
        times: tuple[float, float],
        headers: Mapping[str, str],
    ) -> None:
        """Creates the spans of a request.

        times: its start and end, seconds since 1970. headers: of the request; a `traceparent`
        makes the caller's span the parent.
        """
        from opentelemetry import trace

        span = self._tracer.start_span(
            f"{record.method} {route}",
            context=self._propagator.extract(headers),
            kind=trace.SpanKind.SERVER,
            start_time=_nanoseconds(times[0]),
            attributes={
                "http.request.method": record.method,
                "http.route": route,
                "http.response.status_code": status,
                "keyhole.request_id": record.id,
                **_counts(record.results),
            },
        )
        if status >= 500:
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span)
        for index, result in enumerate(record.results):
            for name, start, end in phases(result):
                phase = self._tracer.start_span(
                    name,
                    context=inside,
                    start_time=_nanoseconds(start),
                    attributes={"keyhole.completion": index, **_of_phase(name, result)},
                )
                phase.end(_nanoseconds(end))
        span.end(_nanoseconds(times[1]))

    def flush(self) -> None:
        """Sends the remaining spans; waits at most a few seconds."""
        self._provider.force_flush(_FLUSH_MS)


def phases(result: Result) -> list[tuple[str, float, float]]:
    """The phases of a completion: name, begin and end, seconds since 1970."""
    begun = result.arrival + (result.stats.queue_ms or 0.0) / 1e3
    found = [("queue", result.arrival, begun)]
    if result.token_times:
        first, last = (result.arrival + result.token_times[i] for i in (0, -1))
        found += [("prefill", begun, first), ("decode", first, last)]
    return found


def _counts(results: list[Result]) -> dict[str, Any]:
    if not results:
        return {}
    return {
        "gen_ai.usage.input_tokens": sum(one.stats.prompt_tokens for one in results),
        "gen_ai.usage.output_tokens": sum(one.stats.generated_tokens for one in results),
        "gen_ai.response.finish_reasons": [one.finish_reason for one in results],
    }


def _of_phase(name: str, result: Result) -> dict[str, Any]:
    stats = result.stats
    if name == "prefill":
        return {
            "keyhole.prompt_tokens": stats.prompt_tokens,
            "keyhole.cached_prompt_tokens": stats.cached_prompt_tokens,
        }
    if name == "decode":
        read = stats.kv_bytes_read + stats.other_bytes_read
        share = stats.attended_fraction
        found = {"keyhole.generated_tokens": stats.generated_tokens, "keyhole.read_bytes": read}
        return found if share is None else found | {"keyhole.attended_fraction": share}
    return {}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * _NS)
