"""A trace for each request, into an exporter in memory."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import ClassVar

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from keyhole import LLM, ConfigError
from keyhole.server import logs
from keyhole.server.logs import RequestRecord
from tests.server.conftest import serving

_BODY = {"prompt": "secret words", "max_tokens": 5, "ignore_eos": True}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What a server with a collector would send it."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("keyhole.server.logs.make_provider", lambda _: provider)
    yield exporter
    provider.shutdown()


def spans(
    llm: LLM, exporter: InMemorySpanExporter, body: dict[str, object], headers: dict[str, str]
) -> list[ReadableSpan]:
    with serving(llm, otlp_endpoint="http://nowhere") as address:
        answer = httpx2.post(f"{address}/v1/completions", json=body, headers=headers)
    assert answer.status_code == (400 if body.get("n") == 0 else 200)
    return list(exporter.get_finished_spans())


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_spans_for_queue_prefill_and_decode(
    llm: LLM, exporter: InMemorySpanExporter, stream: bool
) -> None:
    *phases, whole = spans(llm, exporter, _BODY | {"stream": stream}, {"X-Request-Id": "mine"})
    assert whole.name == "POST /v1/completions"
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert all(span.parent.span_id == whole.context.span_id for span in phases)
    times = [whole.start_time]
    for span in phases:
        times += [span.start_time, span.end_time]
    assert times[1:] == sorted(times[1:])
    # The engine's clock and the server's are read at different moments.
    assert times[0] <= times[1] + 5_000_000
    assert phases[0].end_time == phases[1].start_time
    assert phases[1].end_time == phases[2].start_time
    assert whole.attributes["keyhole.request_id"] == "mine"
    assert whole.attributes["http.response.status_code"] == 200
    assert whole.attributes["gen_ai.usage.output_tokens"] == 5
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert phases[1].attributes["keyhole.prompt_tokens"] == len("secret words") + 1
    assert phases[2].attributes["keyhole.attended_fraction"] == 1.0
    assert "secret" not in "".join(span.to_json() for span in (*phases, whole))


def test_every_completion_has_spans_of_its_own(llm: LLM, exporter: InMemorySpanExporter) -> None:
    *phases, _ = spans(llm, exporter, _BODY | {"n": 2}, {})
    numbers = [span.attributes["keyhole.completion"] for span in phases]
    assert numbers == [0, 0, 0, 1, 1, 1]


def test_the_callers_span_is_the_parent(llm: LLM, exporter: InMemorySpanExporter) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    found = spans(llm, exporter, _BODY, {"traceparent": f"00-{trace}-{parent}-01"})
    assert {f"{span.context.trace_id:032x}" for span in found} == {trace}
    assert f"{found[-1].parent.span_id:016x}" == parent


def test_an_error_has_a_span_without_phases(llm: LLM, exporter: InMemorySpanExporter) -> None:
    (whole,) = spans(llm, exporter, _BODY | {"n": 0}, {})
    assert whole.attributes["http.response.status_code"] == 400
    assert whole.status.is_unset  # the caller's mistake, not the server's


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps what it is sent."""

    bodies: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Not to stderr."""


def test_spans_reach_a_collector() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        provider = logs.make_provider(f"http://127.0.0.1:{collector.server_port}/v1/traces")
        record = RequestRecord("mine", "GET", "/health")
        logs.Traces(provider).answered(record, "/health", 200, (1.0, 2.0), {})
        assert provider.force_flush()
        provider.shutdown()
        collector.shutdown()
        thread.join()
    (sent,) = (ExportTraceServiceRequest.FromString(body) for body in Collector.bodies)
    (span,) = sent.resource_spans[0].scope_spans[0].spans
    assert (span.name, span.start_time_unix_nano) == ("GET /health", 10**9)
    (service,) = (x for x in sent.resource_spans[0].resource.attributes if x.key == "service.name")
    assert service.value.string_value == "keyhole"


def test_a_server_that_ends_sends_what_is_left(
    llm: LLM, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that answers HTTP ends without the clean-up that did it before."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
    monkeypatch.setattr("keyhole.server.logs.make_provider", lambda _: provider)
    with serving(llm, otlp_endpoint="http://nowhere") as address:
        assert httpx2.get(f"{address}/health").status_code == 200
        assert not exporter.get_finished_spans()
    assert [span.name for span in exporter.get_finished_spans()] == ["GET /health"]
    provider.shutdown()


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"keyhole\[otel\]"):
        logs.make_provider("http://127.0.0.1:1/v1/traces")
