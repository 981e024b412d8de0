"""Tokens per second of whole answers, with as many concurrent requests as a given memory holds.

Every system has its own number of requests, computed from shapes: weights, keys and values of whole
requests, and a step's copies must fit. A full run of long answers takes hours, so steps are timed
at some lengths along the answer, as in the decode benchmark, and integrated over its tokens by the
trapezoidal rule. Prompts are neither computed nor counted. Our systems with the same number of
requests are interleaved; other numbers, and each peer with its own cache, are measured in separate
runs, a peer together with our systems of the same number. Policies with offloaded layers are also
measured separately (`benchmarks.paper.offloaded_throughput`).

The fewest bytes that steps must move follow from a model's shape. At equal bandwidth they bound the
speed-up of reading less, if all keys and values are resident. Copies, and the selection's reads
other than the head's keys, are not included.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.offload.run import together
from benchmarks.paper.offloaded_throughput import OffloadedSystem
from benchmarks.paper.settings import OFFLOADED_SYSTEMS, ThroughputSettings
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
from keyhole.bench.settings import ALL_BASELINES, PAGE_SIZE, SHAPES, DecodeSettings, require_systems
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


@dataclass(frozen=True, kw_only=True)
class TrafficBound:
    """requests: the most whole requests that fit. gain: speed-up over reading everything."""

    requests: int
    gain: float


def traffic_bound(settings: ThroughputSettings) -> TrafficBound:
    """The bound for SpeContext at its budget over the whole answer; only for Llama shapes.

    A step's bytes are linear in the length, so their mean is that of the middle of the answer.
    """
    decode = settings.decode
    shape, size = SHAPES[decode.shape], getattr(torch, decode.dtype).itemsize
    assert "model_type" not in shape, "another family has other weights"
    assert decode.token_budget is not None
    head_bytes = size * shape["num_key_value_heads"] * shape["head_dim"]
    token_bytes = kv_bytes(decode)
    room = settings.memory - RESERVE_BYTES - size * num_weights(decode.shape)
    requests = max(0, room // ((settings.prompt + settings.answer) * token_bytes))
    weights = size * weights_read(decode.shape)
    length = settings.prompt + settings.answer // 2
    dense = weights + requests * length * token_bytes
    chosen = min(length, decode.token_budget) * token_bytes + length * head_bytes
    return TrafficBound(requests=requests, gain=dense / (weights + requests * chosen))


def kv_bytes(decode: DecodeSettings) -> int:
    """Bytes of the keys and values of one token in all layers."""
    shape, size = SHAPES[decode.shape], getattr(torch, decode.dtype).itemsize
    heads = shape["num_key_value_heads"] * shape["head_dim"]
    return int(2 * size * shape["num_hidden_layers"] * heads)


def step_gain(decode: DecodeSettings, context: int) -> float:
    """How much faster than a dense step of one sequence one is that reads the weights alone."""
    weights = getattr(torch, decode.dtype).itemsize * weights_read(decode.shape)
    return float(1 + context * kv_bytes(decode) / weights)


def weights_read(shape_name: str) -> int:
    """The number of weights of a Llama of this shape that a step reads."""
    shape = SHAPES[shape_name]
    # A step reads one row of the embedding per token; a tied one is also read in full at the end.
    embedding = 0 if shape["tie_word_embeddings"] else shape["vocab_size"] * shape["hidden_size"]
    return num_weights(shape_name) - int(embedding)


def num_weights(shape_name: str) -> int:
    """The number of weights of a Llama of this shape."""
    shape = SHAPES[shape_name]
    width = shape["hidden_size"]
    heads = 2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    layer = width * (heads * shape["head_dim"] + 3 * shape["intermediate_size"] + 2)
    tables = 1 if shape["tie_word_embeddings"] else 2
    total = tables * shape["vocab_size"] * width + shape["num_hidden_layers"] * layer + width
    return int(total)
