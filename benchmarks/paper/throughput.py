"""Tokens per second of whole answers, with as many concurrent requests as a given memory holds.

Every system has its own number of requests, computed from shapes: weights, keys and values of whole
requests, and a step's copies must fit. A full run of long answers takes hours, so steps are timed
at some lengths along the answer, as in the decode benchmark, and integrated over its tokens by the
trapezoidal rule. Prompts are neither computed nor counted. Our systems with the same number of
requests are interleaved; other numbers, and each peer with its own cache, are measured in separate
runs, a peer together with our systems of the same number. Policies with offloaded layers are also
measured separately (`benchmarks.paper.offloaded_throughput`).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.offload.run import together
from benchmarks.paper.kinds import OFFLOADED_SYSTEMS, ThroughputSettings
from benchmarks.paper.offloaded_throughput import OffloadedSystem
from keyhole.bench import measure
from keyhole.bench.decode import WARM_UP, run_together
from keyhole.bench.measure import Report, Result
from keyhole.bench.model import (
    RESERVE_BYTES,
    make_weights,
    needed_bytes,
    passing_layers,
    release_memory,
)
from keyhole.bench.settings import ALL_BASELINES, PAGE_SIZE, require_systems
from keyhole.kernels import operations
from keyhole.models.model import Model


def run(settings: ThroughputSettings, report: Report) -> dict[str, Any]:
    """Measures every length; returns this benchmark's part of a line of results.

    Passes each length's step times to `report`, with notes on what was left out.
    """
    require_systems(settings.decode.systems, (*ALL_BASELINES, *OFFLOADED_SYSTEMS))
    lengths = lengths_along(settings.prompt, settings.answer, settings.points)
    asked = replace(settings.decode, contexts=lengths)
    device = measure.device(asked.device)
    bandwidth = measure.read_bandwidth(device)
    weights = make_weights(asked)
    weight_bytes = sum(parameter.nbytes for parameter in weights.keyhole.network.parameters())
    room = settings.memory - weight_bytes - RESERVE_BYTES
    beside = [name for name in asked.systems if name not in OFFLOADED_SYSTEMS]
    requests = {name: most_requests(name, weights.keyhole, settings, room) for name in beside}
    offloaded = {
        name: OffloadedSystem(name, weights.keyhole, settings, room)
        for name in asked.systems
        if name in OFFLOADED_SYSTEMS
    }
    step_ms: dict[str, list[float]] = {name: [] for name in asked.systems}
    launched: dict[str, list[dict[str, Any]]] = {name: [] for name in asked.systems}
    loads: dict[str, list[dict[str, Any]]] = {name: [] for name in offloaded}
    errors: dict[str, float] = {}
    skipped: list[dict[str, Any]] = []
    for length in lengths:
        found: list[Result] = []
        notes: list[str] = []
        times: dict[str, list[float]] = {}
        for batch, names in joint_runs(requests):
            joint_run = run_together(weights, replace(asked, batch=batch, systems=names), length)
            for name, measured in joint_run.measured.items():
                times.setdefault(name, []).extend(measured.step_ms)
                launched[name].append(measured.cost["launches"])
            for name, error in joint_run.errors.items():
                errors[name] = max(error, errors.get(name, 0.0))
            skipped += [one.as_dict() for one in joint_run.skipped]
            notes += map(str, joint_run.skipped)
            release_memory()  # for the next one
        for name, system in offloaded.items():
            if not system.requests:
                continue
            own = system.measure(length)
            times[name] = own.step_ms
            launched[name].append(own.launches)
            errors[name] = max(own.error, errors.get(name, 0.0))
            loads[name].append(own.as_dict())
            release_memory()
        for name, spent in times.items():
            step_ms[name].append(statistics.median(spent))
            found.append({"context": length, "system": name, "step_ms": step_ms[name][-1]})
        report(found, notes)
    requests |= {name: system.requests for name, system in offloaded.items()}
    return {
        "settings": asdict(settings) | {"page_size": PAGE_SIZE, "warm_up": WARM_UP},
        "kernels": operations.backend(device),
        "read_bytes_per_s": bandwidth,
        "weight_bytes": weight_bytes,
        "lengths": lengths,
        "counted": "decode steps at these lengths, integrated over the answer; no prompts",
        "relative_error": errors,
        "results": [
            _result(name, requests[name], lengths, spent, settings.answer)
            | {"launches": together(launched[name])}
            | ({"loads": loads[name]} if name in loads else {})
            for name, spent in step_ms.items()
        ],
        "skipped": skipped,
    }


def lengths_along(prompt: int, answer: int, points: int) -> tuple[int, ...]:
    """Evenly spaced lengths from the prompt to prompt and answer, in whole pages."""
    along = [prompt + answer * i // (points - 1) for i in range(points)]
    return tuple(-(-length // PAGE_SIZE) * PAGE_SIZE for length in along)


def answer_seconds(lengths: Sequence[int], step_ms: Sequence[float], answer: int) -> float:
    """The time of an answer: the mean step time over the lengths, times its tokens."""
    pairs = zip(itertools.pairwise(lengths), itertools.pairwise(step_ms), strict=True)
    area = sum((last - first) * (a + b) / 2 for (first, last), (a, b) in pairs)
    return 1e-3 * answer * area / (lengths[-1] - lengths[0])


def most_requests(name: str, model: Model, settings: ThroughputSettings, room: int) -> int:
    """The most whole requests that fit after the weights."""
    tokens = settings.prompt + settings.answer
    if name in ALL_BASELINES:
        geometry = model.geometry(PAGE_SIZE)
        past = tokens * geometry.token_bytes
        each = past + passing_layers(name, geometry) * past // geometry.num_layers
    else:
        # One page is reserved, whatever the number of requests.
        one, two = (needed_bytes(model, [name], count, tokens, 1) for count in (1, 2))
        each = two - one
        room -= one - each
    return max(0, room // each)


def joint_runs(requests: Mapping[str, int]) -> list[tuple[int, tuple[str, ...]]]:
    """The systems of each run and their number of requests: a peer and ours of the same number.

    Systems without space for a request are left out.
    """
    ours = {name: count for name, count in requests.items() if name not in ALL_BASELINES}
    found = [
        (count, (name, *(own for own, same in ours.items() if same == count)))
        for name, count in requests.items()
        if name in ALL_BASELINES and count
    ]
    there = {count for count, _ in found}
    return found + [
        (count, tuple(own for own, same in ours.items() if same == count))
        for count in dict.fromkeys(ours.values())
        if count and count not in there
    ]


def _result(
    name: str, requests: int, lengths: Sequence[int], step_ms: list[float], answer: int
) -> Result:
    """A result; without a throughput unless every length was measured."""
    whole = len(step_ms) == len(lengths)
    seconds = answer_seconds(lengths, step_ms, answer) if whole else None
    return {
        "system": name,
        "requests": requests,
        "step_ms": step_ms,
        "answer_s": seconds,
        "tokens_per_s": None if seconds is None else requests * answer / seconds,
    }
