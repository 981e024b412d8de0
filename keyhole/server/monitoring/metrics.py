"""The Prometheus metrics of a server."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from keyhole.async_llm import EngineLoad
from keyhole.engine.sequence import Result
from keyhole.server.monitoring.collectors import BatchedHistogram, LoadGauges

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

        gauge("completions_running", "completions under way").set_function(lambda: float(running()))
        gauge("pages", "pages that the KV cache may have").set(max_pages)
        self.registry.register(LoadGauges(load))
        self._requests = counter("requests", "answered requests", ("path", "status"))
        self._errors = counter("errors", "errors that were answered", ("kind",))
        self._prompt = counter("prompt_tokens", "tokens of prompts")
        self._cached = counter("cached_prompt_tokens", "of these, found in the prefix cache")
        self._hits = counter("prefix_hits", "prompts that began in the prefix cache")
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
        self._share = histogram("keys_read_share", "keys read / keys there, by completion", _SHARES)

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
