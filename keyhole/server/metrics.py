"""The Prometheus metrics of a server: those that are counted, and those computed when read."""

from __future__ import annotations

import collections
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from keyhole.async_llm import EngineLoad
from keyhole.engine.sequence import Result


class BatchedHistogram(Collector):
    """A histogram that takes many values in one call, for values of every token.

    bounds: upper bounds of its buckets, ascending.
    """

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe_all(self, values: Iterable[float]) -> None:
        """Counts each value."""
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Its state now."""
        buckets, total = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class LoadGauges(Collector):
    """Gauges of the engine's load. load: called once for all of them."""

    def __init__(self, load: Callable[[], EngineLoad]) -> None:
        self._load = load

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Their names for the registry, which must not call `load` before the engine runs."""
        for name, text in _LOAD.items():
            yield GaugeMetricFamily(f"keyhole_{name}", text)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Their state now."""
        load = self._load()
        values = (load.waiting, load.pages_free, load.pages_cached, load.offloaded_layers)
        for (name, text), value in zip(_LOAD.items(), values, strict=True):
            yield GaugeMetricFamily(f"keyhole_{name}", text, value=value)


_LOAD = {
    "requests_waiting": "requests in the queue",
    "pages_free": "free pages of the KV cache",
    "pages_cached": "pages of cached prefixes, evicted when requests need them",
    "offloaded_layers": "layers whose KV cache is offloaded",
}

#: Bytes of each stored document, and the status of each that is waiting or has failed.
DocumentState = tuple[Mapping[str, int], Iterable[str]]


class DocumentGauges(Collector):
    """Documents by status, and the bytes that the stored ones take.

    state: what to count now; None: this server has no documents.
    """

    def __init__(self, state: Callable[[], DocumentState | None]) -> None:
        self._state = state

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Their state now."""
        state = self._state()
        if state is None:
            return
        sizes, waiting = state
        statuses = collections.Counter(waiting)
        statuses["ready"] = len(sizes)
        documents = GaugeMetricFamily("keyhole_documents", "documents by status", labels=["status"])
        for status in ("queued", "encoding", "ready", "failed"):
            documents.add_metric([status], statuses[status])
        yield documents
        size, text = sum(sizes.values()), "bytes of stored documents"
        yield GaugeMetricFamily("keyhole_document_bytes", text, value=size)


_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)


class Metrics:
    """Counters of finished requests, and gauges of the engine's load.

    max_pages: of the KV cache. load: returns the engine's current load. running: returns how many
    completions are running.
    """

    def __init__(
        self, max_pages: int, load: Callable[[], EngineLoad], running: Callable[[], int]
    ) -> None:
        self.registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"keyhole_{name}", text, registry=self.registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"keyhole_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(f"keyhole_{name}", text, buckets=bounds, registry=self.registry)

        text = "completions that are not finished, including those that wait"
        gauge("completions_running", text).set_function(lambda: float(running()))
        gauge("pages", "the most pages that the KV cache can have").set(max_pages)
        self.registry.register(LoadGauges(load))
        self._requests = counter("requests", "answered requests", ("path", "status"))
        self._errors = counter("errors", "error responses", ("kind",))
        self._prompt = counter("prompt_tokens", "tokens of prompts")
        self._cached = counter("cached_prompt_tokens", "of these, found in the prefix cache")
        self._hits = counter("prefix_hits", "prompts that begin with a cached prefix")
        self._generated = counter("generated_tokens", "tokens that were generated")
        read = counter(
            "read_bytes",
            "bytes that decode steps read from the KV cache (memory), loaded from offloaded layers "
            "(offload), and read from stored documents (store)",
            ("tier",),
        )
        self._memory, self._offload, self._store = map(read.labels, ("memory", "offload", "store"))
        self._queue = histogram("queue_seconds", "from a request to its first step", _SECONDS)
        self._first = histogram(
            "first_token_seconds", "from a request to its first token", _SECONDS
        )
        self._gaps = BatchedHistogram(
            "keyhole_inter_token_seconds", "between two tokens of a completion", _GAPS
        )
        self.registry.register(self._gaps)
        self._share = histogram(
            "keys_read_share", "keys read / keys cached, per completion", _SHARES
        )

    def answered(self, path: str, status: int) -> None:
        """Counts an answer; path: the route's pattern, without names."""
        self._requests.labels(path, str(status)).inc()

    def failed(self, kind: str) -> None:
        """Counts an error; kind: the type in its object."""
        self._errors.labels(kind).inc()

    def finished(self, result: Result) -> None:
        """Counts a completion."""
        stats = result.stats
        self._prompt.inc(stats.prompt_tokens)
        self._cached.inc(stats.cached_prompt_tokens)
        self._hits.inc(stats.cached_prompt_tokens > 0)
        self._generated.inc(stats.generated_tokens)
        self._memory.inc(stats.kv_bytes_read + stats.other_bytes_read)
        self._offload.inc(stats.moved_bytes or 0)
        self._store.inc(stats.store_bytes_read or 0)
        if stats.queue_ms is not None:
            self._queue.observe(stats.queue_ms / 1e3)
        if stats.ttft_ms is not None:
            self._first.observe(stats.ttft_ms / 1e3)
        self._gaps.observe_all(b - a for a, b in itertools.pairwise(result.token_times))
        if stats.attended_fraction is not None:
            self._share.observe(stats.attended_fraction)
