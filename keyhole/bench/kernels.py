"""Time and bandwidth of every operation on every path of this processor, beside plain PyTorch.

One layer of a given shape, one decode step. Results are compared with the reference before anything
is timed; then paths and peers take turns, each on another part of the cache than the one before.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from keyhole.bench import agreement, attention_cases, choice_cases, linear_cases, measure, memory
from keyhole.bench.bars import bars
from keyhole.bench.cases import Case, System
from keyhole.bench.layer import Layer
from keyhole.bench.measure import Report, Result
from keyhole.bench.settings import PAGE_SIZE, KernelSettings, require_known
from keyhole.bench.shapes import SHAPES
from keyhole.bench.turns import Turn, take_turns
from keyhole.errors import CapacityError
from keyhole.kernels import cpu

_CASES: dict[str, Callable[[Layer], Iterator[Case]]] = {
    "attend": attention_cases.attend,
    "attend_and_score": attention_cases.attend_and_score,
    "head_scores": attention_cases.head_scores,
    "prefill": attention_cases.prefill,
    "append": choice_cases.append,
    "page_bounds": choice_cases.page_bounds,
    "bound_scores": choice_cases.bound_scores,
    "top_indices": choice_cases.top_indices,
    "linear": linear_cases.linear,
}

# Relative error that rounding explains; in flat attention over 32,768 tokens one wrong page makes
# 0.03.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 0.02}
_WARM_UP = 2
# A case ends early after about this long, but not before it has been measured a few times.
_CASE_MS, _LEAST_ROUNDS = 60e3, 3
# Beside the cache: the same without pages, and half of that again while it is made.
_COPIES = 2.5
_CPU = torch.device("cpu")


def run(settings: KernelSettings, report: Report) -> dict[str, Any]:
    """Measures every operation; the part of a line of results that is this benchmark's own.

    Gives each operation's results to `report`.
    """
    paths = settings.paths or cpu.paths()
    require_known("path", paths, cpu.paths())
    _check_room(settings)
    bandwidth = measure.read_bandwidth(_CPU)
    layer = Layer(settings)
    results: list[Result] = []
    before = cpu.current()
    try:
        for op in settings.ops:
            found = []
            for case in _CASES[op](layer):
                found += measure_case(case, paths, settings.repeat, _TOLERANCE[layer.dtype])
                del case  # before the next one is made, as each holds a copy of the cache
            for result in found:
                _add_rates(result, bandwidth)
            results += found
            report(found, [])
    finally:
        cpu.use(before)
    return {
        "settings": asdict(settings) | {"paths": paths, "page_size": PAGE_SIZE},
        "read_bytes_per_s": bandwidth,
        "results": results,
        "bars": bars(results, paths[0]),
    }


def measure_case(case: Case, paths: tuple[str, ...], repeat: int, tolerance: float) -> list[Result]:
    """A result for every path and peer; DisagreementError if one computes something else."""
    systems = {
        f"{path} {label}".rstrip(): (path, system)
        for label, system in case.ours.items()
        for path in paths
    }
    systems |= {name: (cpu.REFERENCE, system) for name, system in case.peers.items()}
    cpu.use(cpu.REFERENCE)
    expected = next(iter(case.ours.values())).outputs(0)
    errors = {}
    for name, (path, system) in systems.items():
        cpu.use(path)
        who = f"{case.op}, {case.about}: {name}"
        errors[name] = agreement.check(who, system.outputs(0), expected, tolerance)
    numbers = itertools.count()

    def turn(path: str, system: System) -> Turn:
        return Turn(
            before=lambda: cpu.use(path), call=lambda: system.run(next(numbers) % case.variants)
        )

    turns = {name: turn(path, system) for name, (path, system) in systems.items()}
    warm = take_turns(turns, _WARM_UP, _CPU)
    round_ms = sum(min(spent) for spent in warm.values())
    rounds = min(repeat, max(_LEAST_ROUNDS, int(_CASE_MS / round_ms)))
    times = take_turns(turns, rounds, _CPU)
    peer = next(iter(case.peers))
    return [
        {
            "op": case.op,
            "tokens": case.tokens,
            "selected": case.selected,
            "unit": case.unit,
            "about": case.about,
            "system": name,
            "ms": statistics.median(times[name]),
            "least_ms": min(times[name]),
            "rounds": rounds,
            "moved_bytes": case.moved_bytes,
            "flops": case.flops,
            "relative_error": errors[name],
            "peer": peer,
            "ratio_to_peer": statistics.median(
                a / b for a, b in zip(times[name], times[peer], strict=True)
            ),
        }
        for name in systems
    ]


def _add_rates(result: Result, bandwidth: float) -> None:
    """Bandwidth, or arithmetic where that is the bound."""
    seconds = 1e-3 * result["ms"]
    flops, rate = result["flops"], result["moved_bytes"] / seconds
    result["gb_per_s"] = rate / 1e9 if flops is None else None
    result["bandwidth_share"] = rate / bandwidth if flops is None else None
    result["gflop_per_s"] = None if flops is None else flops / seconds / 1e9


def _check_room(settings: KernelSettings) -> None:
    shape = SHAPES[settings.shape]
    numbers = 2 * settings.batch * settings.contexts[-1] * shape["num_key_value_heads"]
    cache = numbers * shape["head_dim"] * getattr(torch, settings.dtype).itemsize
    need, free = int((1 + _COPIES) * cache), memory.free_bytes(_CPU)
    if need > free:
        raise CapacityError(
            f"{settings.contexts[-1]:,} tokens, batch {settings.batch}, need {memory.gib(need)}, "
            f"{memory.gib(free)} are free; give fewer --contexts or a smaller --batch"
        )
