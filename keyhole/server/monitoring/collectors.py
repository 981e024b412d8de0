"""Metrics that are not counted one event at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from keyhole.async_llm import EngineLoad


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
        """Their names, for the registry, as the engine may not be running yet."""
        for name, text in _LOAD.items():
            yield GaugeMetricFamily(f"keyhole_{name}", text)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Their state now."""
        load = self._load()
        values = (load.waiting, load.pages_free, load.pages_known, load.offloaded_layers)
        for (name, text), value in zip(_LOAD.items(), values, strict=True):
            yield GaugeMetricFamily(f"keyhole_{name}", text, value=value)


_LOAD = {
    "requests_waiting": "requests that no step has begun",
    "pages_free": "pages that hold nothing",
    "pages_known": "pages of known prompts, which go when requests need them",
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
        statuses = Counter(waiting)
        statuses["ready"] = len(sizes)
        documents = GaugeMetricFamily("keyhole_documents", "documents by status", labels=["status"])
        for status in ("queued", "encoding", "ready", "failed"):
            documents.add_metric([status], statuses[status])
        yield documents
        size, text = sum(sizes.values()), "bytes of stored documents"
        yield GaugeMetricFamily("keyhole_document_bytes", text, value=size)
