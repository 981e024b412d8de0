"""The metrics of a replica in Ray's exporter, which Prometheus reads on every machine."""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import CollectorRegistry
from ray.serve.metrics import Gauge

logger = logging.getLogger("keyhole.server")

#: As often as Ray sends metrics on.
_SECONDS = 5.0


async def export(registry: CollectorRegistry) -> None:
    """Copies what the server's /metrics has, again and again, as `ray_` and its name.

    Serve adds the labels deployment, replica and application.
    """
    gauges: dict[str, Gauge] = {}
    while True:
        try:
            await _copy(registry, gauges)
        except Exception:  # what is counted is not worth an answer; the next round may succeed
            logger.exception("metrics were not exported")
        await asyncio.sleep(_SECONDS)


async def _copy(registry: CollectorRegistry, gauges: dict[str, Gauge]) -> None:
    for family in await asyncio.to_thread(lambda: [*registry.collect()]):
        for sample in family.samples:
            if sample.name not in gauges:
                # A gauge for all kinds: Ray's counters would be given other names.
                keys = tuple(sample.labels)
                gauges[sample.name] = Gauge(sample.name, family.documentation, tag_keys=keys)
            gauges[sample.name].set(sample.value, tags=dict(sample.labels))
