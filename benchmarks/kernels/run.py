"""Time and bandwidth of every operation on every path of a device, compared with plain PyTorch.

One layer of a given shape, one decode step. Results are compared with the reference before timing;
then calls of paths and peers are interleaved, each on another part of the cache than the last.
On a GPU the calls of a round are one CUDA graph, as in an engine's step: launching small kernels
takes the host longer than running them takes the device.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from tqdm.auto import tqdm

from benchmarks.command import target
from benchmarks.kernels import (
    attention_cases,
    choice_cases,
    linear_cases,
)
from benchmarks.kernels.layer import KernelCase, Layer, System
from benchmarks.kernels.settings import KernelSettings
from keyhole.bench import decode, measure, model
from keyhole.bench.measure import Report, Result, Turn, capture, take_turns
from keyhole.bench.settings import PAGE_SIZE, SHAPES
from keyhole.config import bytes_text, require_known
from keyhole.errors import CapacityError
from keyhole.kernels import cpu, operations, triton

_CASES: dict[str, Callable[[Layer], Iterator[KernelCase]]] = {
    "attend": attention_cases.attend,
    "attend_and_score": attention_cases.attend_and_score,
    "attend_low_rank": attention_cases.attend_low_rank,
    "head_scores": attention_cases.head_scores,
    "prefill": attention_cases.prefill,
    "append": choice_cases.append,
    "page_bounds": choice_cases.page_bounds,
    "bound_scores": choice_cases.bound_scores,
    "summary_scores": choice_cases.summary_scores,
    "spread_scores": choice_cases.spread_scores,
    "top_k": choice_cases.top_k,
    "trim": choice_cases.trim,
    "linear": linear_cases.linear,
    "packed_linear": linear_cases.packed_linear,
}

# Relative error that rounding explains; in uniform attention over 32,768 tokens, one wrong page
# causes 0.03.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 0.02}
_WARM_UP = 2
# A case ends early after about this time, but not before it has a few measurements.
_CASE_MS, _LEAST_ROUNDS = 60e3, 3
# Calls per round: on a GPU enough to make the launch time of their graph negligible.
_CALLS = {"cpu": 1, "cuda": 10}
# Memory in addition to the cache: the same without pages, and half of that again during the copy.
_COPIES = 2.5
_CPU = torch.device("cpu")


def run(settings: KernelSettings, report: Report) -> dict[str, Any]:
    """Measures every operation; returns this benchmark's part of a line of results.

    Passes each operation's results to `report`.
    """
    device = measure.device(settings.device)
    names = settings.paths or paths(device)
    for name in names:
        require_known("path", name, paths(device))
    _check_room(settings, device)
    bandwidth, copying = measure.read_bandwidth(device), _copy_bandwidth(device)
    with device:
        layer = Layer(settings)
    results: list[Result] = []
    before = current_path(device)
    try:
        for op in tqdm(settings.ops, desc="operations", leave=False, disable=None):
            found = []
            for case in _made_on(device, _CASES[op](layer)):
                tolerance = _TOLERANCE[layer.dtype]
                found += measure_case(case, names, settings.repeat, tolerance, device)
                del case  # before the next one is created, as each holds a copy of the cache
            for result in found:
                _add_rates(result, bandwidth, copying)
            results += found
            report(found, _notes(found, device))
    finally:
        use_path(before, device)
    return {
        "settings": asdict(settings) | {"paths": names, "page_size": PAGE_SIZE},
        "read_bytes_per_s": bandwidth,
        "copy_bytes_per_s": copying,
        "results": results,
        "bars": ratio_targets(results, names[0]) if device.type == "cpu" else [],
    }


def _made_on(device: torch.device, cases: Iterator[KernelCase]) -> Iterator[KernelCase]:
    """Creates the cases with this default device, set only here, as it slows down every call."""
    while True:
        with device:
            case = next(cases, None)
        if case is None:
            return
        yield case
        del case


def measure_case(
    case: KernelCase,
    names: tuple[str, ...],
    repeat: int,
    tolerance: float,
    device: torch.device = _CPU,
) -> list[Result]:
    """A result per path and peer; DisagreementError if one differs from the reference."""
    systems = {
        f"{path} {label}".rstrip(): (path, system)
        for label, system in case.ours.items()
        for path in names
    }
    systems |= {name: (cpu.REFERENCE, system) for name, system in case.peers.items()}
    use_path(cpu.REFERENCE, device)
    expected = next(iter(case.ours.values())).outputs(0)
    errors = {}
    for name, (path, system) in systems.items():
        use_path(path, device)
        who = f"{case.op}, {case.about}: {name}"
        errors[name] = decode.check(who, system.outputs(0), expected, tolerance)
    del expected
    numbers, calls = itertools.count(), _CALLS[device.type]

    def turn(path: str, system: System) -> tuple[Turn, str | None]:
        def call() -> None:
            for _ in range(calls):
                system.run(next(numbers) % case.variants)

        use_path(path, device)
        ready, why_not = _ready(call, device)
        return Turn(before=lambda: use_path(path, device), call=ready), why_not

    made = {name: turn(path, system) for name, (path, system) in systems.items()}
    turns = {name: one for name, (one, _) in made.items()}
    warm = take_turns(turns, _WARM_UP, device)
    round_ms = sum(min(spent) for spent in warm.values())
    rounds = min(repeat, max(_LEAST_ROUNDS, int(_CASE_MS / round_ms)))
    taken = take_turns(turns, rounds, device)
    times = {name: [ms / calls for ms in spent] for name, spent in taken.items()}
    moved = {name: system.moved_bytes or case.moved_bytes for name, (_, system) in systems.items()}
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
            "calls": calls,
            "why_not_replayed": made[name][1],
            "moved_bytes": moved[name],
            "flops": case.flops,
            "relative_error": errors[name],
            "peer": peer,
            "ratio_to_peer": measure.median_ratio(times[name], times[peer]),
            "sum_share": None
            if case.reader is None
            else moved[name]
            / moved[case.reader]
            * measure.median_ratio(times[case.reader], times[name]),
        }
        for name in systems
    ]


def _ready(
    call: Callable[[], None], device: torch.device
) -> tuple[Callable[[], object], str | None]:
    """The calls of a round as a CUDA graph, or as plain calls with the reason."""
    if device.type != "cuda":
        return call, f"there are no CUDA graphs on a device of kind {device.type}"
    try:
        replay, _ = capture(call, device)
    except RuntimeError as error:  # plain PyTorch may read sizes from the device
        return call, str(error) or "no reason given"
    return replay, None


def _notes(found: Sequence[Result], device: torch.device) -> list[str]:
    """Which systems could not be replayed on a GPU: their times include the host's launches."""
    return [
        f"{one['op']}, {one['about']}, {one['system']}: launched one by one, as it cannot be a "
        f"CUDA graph: {one['why_not_replayed'].splitlines()[0]}"
        for one in found
        if device.type == "cuda" and one["why_not_replayed"] is not None
    ]


def _add_rates(result: Result, bandwidth: float, copying: float) -> None:
    """Adds bandwidth or, for compute-bound cases, FLOPS."""
    seconds = 1e-3 * result["ms"]
    flops, rate = result["flops"], result["moved_bytes"] / seconds
    result["gb_per_s"] = rate / 1e9 if flops is None else None
    result["bandwidth_share"] = rate / bandwidth if flops is None else None
    result["copy_share"] = rate / copying if flops is None else None
    result["gflop_per_s"] = None if flops is None else flops / seconds / 1e9


def _check_room(settings: KernelSettings, device: torch.device) -> None:
    shape = SHAPES[settings.shape]
    numbers = 2 * settings.batch * settings.contexts[-1] * shape["num_key_value_heads"]
    cache = numbers * shape["head_dim"] * getattr(torch, settings.dtype).itemsize
    need, free = int((1 + _COPIES) * cache), model.free_bytes(device)
    if need > free:
        raise CapacityError(
            f"{settings.contexts[-1]:,} tokens, batch {settings.batch}, need {bytes_text(need)}, "
            f"{bytes_text(free)} are free; give fewer --contexts or a smaller --batch"
        )


def _copy_bandwidth(device: torch.device) -> float:
    """Bytes per second read and written by a copy of a large tensor; the best of a few."""
    numbers = measure.large_tensor(device)
    copy = torch.empty_like(numbers)
    best = min(
        measure.time_ms(lambda: copy.copy_(numbers), device) for _ in range(measure.BANDWIDTH_RUNS)
    )
    return 2 * numbers.nbytes / (1e-3 * best)


#: The path of a GPU besides the reference.
_TRITON = "triton"


def paths(device: torch.device) -> tuple[str, ...]:
    """The paths of the device."""
    if device.type == "cpu":
        return cpu.paths()
    return (*([_TRITON] if triton.usable() else []), cpu.REFERENCE)


def current_path(device: torch.device) -> str:
    """The current path, to be restored by `use_path`."""
    return cpu.current() if device.type == "cpu" else paths(device)[0]


def use_path(path: str, device: torch.device) -> None:
    """Selects a path."""
    if device.type == "cpu":
        cpu.use(path)
    else:
        operations.use_triton(path == _TRITON)


def ratio_targets(results: Sequence[Result], path: str) -> list[dict[str, Any]]:
    """Every target whose operations were measured on `path`: ratios of medians within one run."""
    found: list[dict[str, Any]] = []
    everything = [r for r in results if r["op"] == "attend" and r["selected"] is None]
    longest = max((r["tokens"] for r in everything), default=0)
    times = {r["system"]: r for r in everything if r["tokens"] == longest}
    if path in times:
        ours = times[path]
        who = f"attend, {ours['about']}"
        found.append(target(f"{who}: share of read bandwidth", ours["bandwidth_share"], 0.6))
        found.append(target(f"{who}: times torch sdpa", times["torch sdpa"]["ms"] / ours["ms"], 8))
    found += [
        target(f"attend, {r['about']}: share of read bandwidth", r["bandwidth_share"], 0.5)
        for r in results
        if r["op"] == "attend" and r["unit"] == 1 and r["system"] == path
    ]
    scored = {r["system"]: r["ms"] for r in results if r["op"] == "attend_and_score"}
    if path in scored:
        ratio = scored[path] / scored[f"{path} attend"]
        found.append(target("attend_and_score: time by that of attend", ratio, 1.25, "<="))
    return found
