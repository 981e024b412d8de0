"""Exports a replica's metrics through Ray, whose exporter Prometheus scrapes on each machine."""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import CollectorRegistry
from ray.serve.metrics import Gauge

logger = logging.getLogger("keyhole.server")

#: The interval at which Ray reports metrics.
_SECONDS = 5.0


async def export(registry: CollectorRegistry) -> None:
    """Copies the server's metrics to Ray periodically, under their names with the prefix `ray_`.

    Serve adds the labels deployment, replica and application.
    """
    gauges: dict[str, Gauge] = {}
    while True:
        try:
            await _copy(registry, gauges)
        except Exception:  # metrics must not stop the replica; the next round may succeed
            logger.exception("metrics were not exported")
        await asyncio.sleep(_SECONDS)


async def _copy(registry: CollectorRegistry, gauges: dict[str, Gauge]) -> None:
    for family in await asyncio.to_thread(lambda: [*registry.collect()]):
        for sample in family.samples:
            if sample.name not in gauges:
                # A gauge for all kinds: Ray would rename counters.
                keys = tuple(sample.labels)
                gauges[sample.name] = Gauge(sample.name, family.documentation, tag_keys=keys)
            gauges[sample.name].set(sample.value, tags=dict(sample.labels))
