"""A trace per request for OpenTelemetry: the request, with spans for queue, prefill and decode.

Spans are created when a request has ended, from times that the engine recorded, so tracing costs
nothing during generation. They have counts, never texts. Needs the extra `keyhole[otel]`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from keyhole.engine.sequence import Result
from keyhole.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from keyhole.server.monitoring.logs import RequestRecord

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
