"""Measures one of the papers' headline settings, or a small version that shows that it runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.kernels import run as kernels
from benchmarks.kernels.settings import KernelSettings
from benchmarks.offload import run as offload
from benchmarks.offload.settings import OffloadSettings
from benchmarks.paper import documents, throughput
from benchmarks.paper.offloaded_throughput import SteadyHead
from benchmarks.paper.settings import (
    ALL,
    FLASH,
    HEADLINES,
    PAGES,
    TOKENS,
    Asked,
    DocumentSettings,
    Headline,
    StepSettings,
    ThroughputSettings,
    bytes_at,
    judged,
    step_at,
)
from benchmarks.paper.throughput import weights_read
from keyhole.bench import decode, measure
from keyhole.bench.flashinfer_baseline import is_installed
from keyhole.bench.measure import Report
from keyhole.bench.model import RESERVE_BYTES
from keyhole.bench.settings import PAGE_SIZE, DecodeSettings
from keyhole.config import require_known

Line = dict[str, Any]

#: Memory of a small run, in addition to the reserve of every run: for a few requests and layers,
#: and the page that a GPU sets aside.
_SMALL_BYTES = RESERVE_BYTES + (5 << 17)
_ATTENTION = {None: ALL, PAGE_SIZE: PAGES, 1: TOKENS}


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A benchmark. unit: of its speeds (higher is better). small: settings that run in a moment."""

    unit: str
    run: Callable[[Any, Headline, Report], Line]
    speeds: Callable[[Line], dict[str, float]]
    small: Callable[[Any], Any]


def measured(name: str, device: str, report: Report, *, small: bool = False) -> Line:
    """Measures a setting; returns its part of a line of results, with speeds and targets.

    small: in the shape "smoke", with a few tokens. UnknownNameError for an unknown name.
    """
    require_known("setting", name, HEADLINES)
    headline = HEADLINES[name]
    kind, settings = _KINDS[type(headline.settings)], headline.settings
    if small:
        settings = kind.small(settings)
    line = kind.run(on(settings, device), headline, report)
    speeds = kind.speeds(line)
    more = {"headline": name, "small": small, "unit": kind.unit, "speeds": speeds}
    # A small run neither reaches nor misses a target.
    return line | more | {"bars": [] if small else judged(headline, kind.unit, speeds)}


def unit(name: str) -> str:
    """The unit of a setting's speeds."""
    return _KINDS[type(HEADLINES[name].settings)].unit


def on(settings: Asked, device: str) -> Any:
    """The same settings on a device."""
    if isinstance(settings, ThroughputSettings | StepSettings):
        return replace(settings, decode=replace(settings.decode, device=device))
    return replace(settings, device=device)


def _offload(settings: OffloadSettings, headline: Headline, report: Report) -> Line:
    device = measure.device(settings.device)
    # Offloading to the host's RAM needs a GPU; on a CPU there is no such peer.
    theirs = headline.theirs if device.type == "cuda" else (FLASH,)
    bandwidth = measure.read_bandwidth(device)
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        results = offload.run_large(settings, folder, theirs, SteadyHead)
    report([{"context": settings.context, **result} for result in results], [])
    return {"settings": asdict(settings), "read_bytes_per_s": bandwidth, "results": results}


def _steps(settings: StepSettings, report: Report) -> Line:
    """The decode benchmark's line, with the bytes of the weights that a step reads.

    FlashInfer's dense steps are measured beside the others on a GPU where it is installed.
    """
    asked = settings.decode
    if is_installed() and measure.device(asked.device).type == "cuda":
        asked = replace(asked, systems=(*asked.systems, "flashinfer"))
    itemsize: int = getattr(torch, asked.dtype).itemsize
    labels = dict(zip(asked.contexts, settings.labels, strict=True))
    line = decode.run(asked, report)
    return line | {"labels": labels, "step_weight_bytes": itemsize * weights_read(asked.shape)}


def _step_speeds(line: Line) -> dict[str, float]:
    """Steps per second of every system, and those that its bytes allow."""
    speeds = {}
    for result in line["results"]:
        place = result["system"], line["labels"][result["context"]]
        moved = line["step_weight_bytes"] + result["kv_bytes"] + result["other_bytes"]
        speeds[step_at(*place)] = 1e3 / result["step_ms"]
        speeds[bytes_at(*place)] = line["read_bytes_per_s"] / moved
    return speeds


def _small_steps(settings: StepSettings) -> StepSettings:
    contexts = tuple(64 + i * PAGE_SIZE for i in range(len(settings.labels)))
    return replace(settings, decode=replace(_small_decode(settings.decode), contexts=contexts))


def _small_decode(settings: DecodeSettings) -> DecodeSettings:
    sizes = replace(settings, shape="smoke", contexts=(64,), batch=min(2, settings.batch), repeat=1)
    return replace(sizes, token_budget=48)


def _small_throughput(settings: ThroughputSettings) -> ThroughputSettings:
    decode = replace(_small_decode(settings.decode), token_budget=64)
    sizes = replace(settings, prompt=48, answer=32, points=2, memory=_SMALL_BYTES)
    return replace(sizes, decode=decode)


def _small_offload(settings: OffloadSettings) -> OffloadSettings:
    sizes = replace(settings, shape="smoke", context=256, budgets=(64,), memory=_SMALL_BYTES)
    return replace(sizes, repeat=2)


def _small_kernels(settings: KernelSettings) -> KernelSettings:
    return replace(settings, shape="smoke", contexts=(32, 64), batch=2, repeat=1)


def _small_documents(settings: DocumentSettings) -> DocumentSettings:
    return replace(settings, shape="smoke", documents=2, tokens=256, question=8, repeat=1)


def _share(line: Line) -> dict[str, float]:
    """Share of the copy bandwidth on the best path, for everything, pages and tokens."""
    path = line["settings"]["paths"][0]
    return {
        _ATTENTION[result["unit"]]: result["copy_share"]
        for result in line["results"]
        if result["op"] == "attend" and result["system"] == path
    }


_KINDS: dict[type, _Kind] = {
    DecodeSettings: _Kind(
        unit="tokens/s",
        run=lambda settings, _, report: decode.run(settings, report),
        speeds=lambda line: {
            result["system"]: 1e3 * line["settings"]["batch"] / result["step_ms"]
            for result in line["results"]
        },
        small=_small_decode,
    ),
    StepSettings: _Kind(
        unit="steps/s",
        run=lambda settings, _, report: _steps(settings, report),
        speeds=_step_speeds,
        small=_small_steps,
    ),
    ThroughputSettings: _Kind(
        unit="tokens/s",
        run=lambda settings, _, report: throughput.run(settings, report),
        speeds=lambda line: {
            result["system"]: result["tokens_per_s"]
            for result in line["results"]
            if result["tokens_per_s"] is not None
        },
        small=_small_throughput,
    ),
    OffloadSettings: _Kind(
        unit="tokens/s",
        run=_offload,
        speeds=lambda line: {
            result["system"]: 1e3 / result["step_ms"] for result in line["results"]
        },
        small=_small_offload,
    ),
    KernelSettings: _Kind(
        unit="share of the copy bandwidth",
        run=lambda settings, _, report: kernels.run(settings, report),
        speeds=_share,
        small=_small_kernels,
    ),
    DocumentSettings: _Kind(
        unit="first tokens/s",
        run=lambda settings, _, report: documents.run(settings, report),
        speeds=lambda line: {
            result["system"]: 1e3 / result["ttft_ms"] for result in line["results"]
        },
        small=_small_documents,
    ),
}
