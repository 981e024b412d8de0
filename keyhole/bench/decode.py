"""Step time of decoding with a long cache, compared with transformers.

The model is a Llama of a given shape with random weights. All caches are filled with the same
random numbers, so nothing is prefilled. Before anything is timed, the logits of full attention and
of every baseline must agree over the same cache. Then all systems are interleaved, one step each.
Systems in a separate process (`Outside`) are measured one after the other, each with all the
others, as their caches may be large.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from keyhole.bench import measure, model
from keyhole.bench.measure import Report, Result, Turn, take_turns
from keyhole.bench.model import (
    RandomKV,
    Skipped,
    Weights,
    fitting,
    make_weights,
    peak_bytes,
    prompts,
    release_memory,
    reset_peak,
    workspace_bytes,
)
from keyhole.bench.settings import (
    ALL_BASELINES,
    BASELINES,
    PAGE_SIZE,
    DecodeSettings,
    require_systems,
)
from keyhole.bench.systems import (
    Baseline,
    BaselineCache,
    KeyholeSystem,
    Outside,
    OutsideSystem,
    Pages,
)
from keyhole.errors import KeyholeError
from keyhole.kernels import operations
from keyhole.models.modules.fused_layer import fused_tokens
from keyhole.policies import available_policies, make_policy, policy_name
from keyhole.registry import parse_one

_TINY = 1e-30  # makes two rows of zeros agree


class DisagreementError(KeyholeError):
    """Two systems give different results, so their times cannot be compared."""


def check(who: str, found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> float:
    """The largest relative error of the results of `who`; DisagreementError if it is too large.

    Compares as many tensors as both have.
    """
    error = max(relative_error(a, b) for a, b in zip(found, expected, strict=False))
    if not error <= tolerance:  # also false for NaN
        raise DisagreementError(f"{who}: relative error {error:.2g} is above {tolerance}")
    return error


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| (2-norms) of the worst row; integers must be equal."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if bool((found == expected).all()) else float("inf")
    a, b = found.float(), expected.float()
    return float((a - b).norm(dim=-1).div(b.norm(dim=-1).clamp(min=_TINY)).max())


#: The baseline that the others' times are divided by.
REFERENCE = next(iter(BASELINES))
#: Untimed steps of every system: the first one computes the rest of the prompt, the others warm up.
WARM_UP = 3

# Tokens after the prompt whose logits are compared.
_COMPARED = 3
#: Relative error that rounding explains in up to 16 layers: with peaked attention in bfloat16, 16
#: layers gave 0.04 and 32 gave 0.11 (benchmarks/LOG.md). Unrelated logits differ by about 1.4.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.1}
_LAYERS = 16
# Eager attention also rounds scores before the softmax: 0.11 in bfloat16, 0.28 in 32 layers.
_EAGER = 2.0


@dataclass(frozen=True, kw_only=True)
class SystemSteps:
    """The measurements of one system: milliseconds and peaks of its steps, and what a step
    reads.
    """

    step_ms: list[float]
    peak_bytes: list[int]
    cost: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class JointRun:
    """Systems measured together: results by name, errors of the logits, and skipped systems."""

    measured: dict[str, SystemSteps]
    errors: dict[str, float]
    skipped: list[Skipped]


def run_together(
    weights: Weights,
    settings: DecodeSettings,
    context: int,
    outside: Outside | None = None,
    other: str | None = None,
) -> JointRun:
    """Measures all systems of this process that `settings` names, and one of `outside`: `other`.

    The logits of full attention and of one baseline are compared even if neither is timed.
    """
    model, batch = weights.keyhole, settings.batch
    steps = _COMPARED + WARM_UP + settings.repeat + 1
    inside = [n for n in settings.systems if outside is None or n not in outside.names]
    names = ["full", *(n for n in inside if n not in ALL_BASELINES and n != "full")]
    wanted = [n for n in inside if n in ALL_BASELINES and n != REFERENCE]
    if REFERENCE in inside or (other is None and not wanted):
        wanted.insert(0, REFERENCE)
    needs = None
    if outside is not None and other is not None:
        needs = other, outside.needed(model, batch, context, steps)
    fit, skipped = fitting(
        model, names, wanted, batch=batch, context=context, steps=steps, outside=needs
    )
    if skipped and skipped[0].system is None:
        return JointRun(measured={}, errors={}, skipped=skipped)
    numbers = RandomKV(model, batch, context)
    texts, given = prompts(model, batch, context, _COMPARED)
    with contextlib.ExitStack() as stack:
        others: list[OutsideSystem] = []
        if outside is not None and other in fit:
            fit.remove(other)
            others = [outside.start(other, model, batch, context, steps)]
            stack.callback(others[0].close)
            others[0].fill(numbers)  # needs room for a copy, so it comes first
        pages = Pages(model, names, batch, context, steps, settings.token_budget)
        kinds = dict.fromkeys(ALL_BASELINES[name][1] for name in fit)
        pasts = {kind: BaselineCache(kind, model, context, steps) for kind in kinds}
        _fill([pages, *pasts.values()], numbers)
        pages.know(texts)
        peers = [Baseline(name, weights, pasts[ALL_BASELINES[name][1]], context) for name in fit]
        tolerance = TOLERANCE[model.dtype] * max(1.0, numbers.num_layers / _LAYERS)
        errors = compare(pages.systems[0], [*peers, *others], texts, given, tolerance)
        everyone: list[Baseline | KeyholeSystem] = [*peers, *pages.systems]
        systems = [system for system in everyone if system.name in inside]
        used = {ALL_BASELINES[system.name][1] for system in systems if system.name in ALL_BASELINES}
        cache_bytes = pages.num_bytes + sum(pasts[kind].num_bytes for kind in used)
        del peers, everyone
        for kind in pasts.keys() - used:  # needed only for the comparison
            del pasts[kind]
        release_memory()  # so that it does not count as a step's memory
        measured = _timed(systems, others, texts, settings.repeat, model.device)
    for system in systems:
        cost = measured[system.name].cost
        cost |= {"cache_bytes": cache_bytes, "workspace_bytes": workspace_bytes()}
    return JointRun(measured=measured, errors=errors, skipped=skipped)


def compare(
    dense: KeyholeSystem,
    peers: Sequence[Baseline | OutsideSystem],
    texts: list[list[int]],
    given: list[int],
    tolerance: float,
) -> dict[str, float]:
    """Relative error of each peer's logits against full attention, by name of the peer.

    DisagreementError if one is too large.
    """
    if not peers:
        return {}
    expected = dense.logits(texts, given)
    return {
        peer.name: check(
            peer.name, [peer.logits(texts, given)], [expected], allowed(peer.name, tolerance)
        )
        for peer in peers
    }


def _fill(caches: Sequence[Pages | BaselineCache], numbers: RandomKV) -> None:
    with numbers.filling(len(caches)):
        for cache in caches:
            cache.fill(numbers)


def allowed(name: str, tolerance: float) -> float:
    """The error that a peer's rounding explains."""
    if name not in ALL_BASELINES:  # outside: weights, keys and values are rounded to float16
        return max(tolerance, TOLERANCE[torch.float16])
    return tolerance * (_EAGER if ALL_BASELINES[name][0] == "eager" else 1.0)


def _timed(
    systems: Sequence[Baseline | KeyholeSystem],
    others: Sequence[OutsideSystem],
    texts: list[list[int]],
    repeat: int,
    device: torch.device,
) -> dict[str, SystemSteps]:
    """Times and peaks of every step after the warm-up, and what the steps read."""
    everyone = [*systems, *others]
    peaks: dict[str, list[int]] = {system.name: [] for system in everyone}

    def turn(system: Baseline | KeyholeSystem) -> Turn:
        def after() -> None:
            peaks[system.name].append(peak_bytes(device))
            system.rest()

        return Turn(call=system.step, before=lambda: reset_peak(device), after=after)

    def turn_outside(system: OutsideSystem) -> Turn:
        def after() -> None:
            peaks[system.name].append(system.peak_bytes)
            system.rest()

        return Turn(
            call=system.step, before=system.settle, after=after, told_ms=lambda: system.step_ms
        )

    for system in everyone:
        system.start(texts, WARM_UP + repeat)
    turns = {s.name: turn(s) for s in systems} | {s.name: turn_outside(s) for s in others}
    times = take_turns(turns, WARM_UP + repeat, device)
    return {
        system.name: SystemSteps(
            step_ms=times[system.name][WARM_UP:],
            peak_bytes=peaks[system.name][WARM_UP:],
            cost=system.cost(),
        )
        for system in everyone
    }


def run(settings: DecodeSettings, report: Report, outside: Outside | None = None) -> dict[str, Any]:
    """Measures every context; returns the part of a line of results that is specific to this
    benchmark.

    Passes each context's results to `report`, with notes on skipped systems. After Ctrl-C the line
    has the contexts before, and says `interrupted`. outside: systems that `settings` may also name.
    """
    others = () if outside is None else tuple(outside.names)
    require_systems(settings.systems, (*ALL_BASELINES, *others))
    device = measure.device(settings.device)
    bandwidth = measure.read_bandwidth(device)
    _load_libraries(settings, others)
    program_bytes = model.used_bytes(device)
    weights = make_weights(settings)
    if outside is not None:
        outside.write(weights)
    parameters = list(weights.keyhole.network.parameters())
    weight_bytes = sum(parameter.nbytes for parameter in parameters)
    line: dict[str, Any] = {
        "settings": asdict(settings) | {"page_size": PAGE_SIZE, "warm_up": WARM_UP},
        "kernels": operations.backend(device),
        "fused_tokens": fused_tokens(weights.keyhole.network),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "read_bytes_per_s": bandwidth,
        "program_bytes": program_bytes,
        "weight_bytes": weight_bytes,
        "relative_error": {},
        "results": [],
        "skipped": [],
    }
    for context in tqdm(settings.contexts, desc="contexts", leave=False, disable=None):
        try:
            found, errors, skipped = measure_context(weights, settings, context, outside)
        except KeyboardInterrupt:
            if not line["results"]:
                raise
            line["interrupted"] = True  # the earlier contexts are whole
            break
        for result in found:
            own_bytes = result.get("weight_bytes", weight_bytes)
            moved = own_bytes + result["kv_bytes"] + result["other_bytes"]
            result["gb_per_s"] = moved / result["step_ms"] / 1e6
            result["bandwidth_share"] = 1e9 * result["gb_per_s"] / bandwidth
            buffers = result["cache_bytes"] + result["workspace_bytes"]
            result.setdefault("stated_bytes", program_bytes + weight_bytes + buffers)
        line["relative_error"][context] = errors
        line["results"] += found
        line["skipped"] += [one.as_dict() for one in skipped]
        report(found, [*map(str, skipped), *_uncompared(context, errors, found)])
    return line


def measure_context(
    weights: Weights, settings: DecodeSettings, context: int, outside: Outside | None = None
) -> tuple[list[Result], dict[str, float], list[Skipped]]:
    """Results of every system at one context, errors of the compared logits, and skipped systems.

    Each system in its own process is measured together with all the others.
    """
    joint_runs = []
    names = () if outside is None else outside.names
    others: list[str | None] = [name for name in settings.systems if name in names]
    for other in others or [None]:
        joint_runs.append(run_together(weights, settings, context, outside, other))
        model.release_memory()  # the next run needs its memory
    errors: dict[str, float] = {}
    for joint_run in joint_runs:
        for name, error in joint_run.errors.items():
            errors[name] = max(error, errors.get(name, 0.0))
    results = pooled(joint_runs)
    there = {result["system"] for result in results}
    skipped = {one.system: one for joint_run in joint_runs for one in joint_run.skipped}
    left_out = [one for name, one in skipped.items() if name not in there]
    return [result | {"context": context} for result in results], errors, left_out


def pooled(joint_runs: Sequence[JointRun]) -> list[Result]:
    """One result per system: medians of all its steps, and of ratios within a round."""
    names = dict.fromkeys(name for joint_run in joint_runs for name in joint_run.measured)
    results = []
    for name in sorted(names, key=lambda n: (n not in ALL_BASELINES, _is_policy(n))):
        own = [joint_run.measured[name] for joint_run in joint_runs if name in joint_run.measured]
        spent = [ms for one in own for ms in one.step_ms]
        result: Result = {
            "system": name,
            "step_ms": statistics.median(spent),
            "ratio_to_peer": _ratio(joint_runs, name, REFERENCE),
            "ratio_to_full": _ratio(joint_runs, name, "full"),
            "all_step_ms": spent,
            "peak_bytes": max(peak for one in own for peak in one.peak_bytes),
        }
        results.append(result | own[-1].cost)
    return results


def _is_policy(system: str) -> bool:
    return policy_name(parse_one(system, "policy").name) in available_policies()


def _ratio(joint_runs: Iterable[JointRun], name: str, other: str) -> float | None:
    """Median of the ratio of two systems' times in the same round."""
    ratios = [
        a / b
        for joint_run in joint_runs
        if name in joint_run.measured and other in joint_run.measured
        for a, b in zip(
            joint_run.measured[name].step_ms, joint_run.measured[other].step_ms, strict=True
        )
    ]
    return statistics.median(ratios) if ratios else None


def _load_libraries(settings: DecodeSettings, outside: Sequence[str]) -> None:
    """Runs every system once over a small model, to load the libraries that it uses."""
    # Without their settings: layers that these name are not in the small model.
    inside = tuple(
        dict.fromkeys(
            name if name in ALL_BASELINES else make_policy(name).name
            for name in settings.systems
            if name not in outside
        )
    )
    small = replace(settings, shape="smoke", layers=1, contexts=(PAGE_SIZE,), batch=1, repeat=1)
    small = replace(small, systems=inside or ("full",), token_budget=None)
    measure_context(make_weights(small), small, PAGE_SIZE)
    model.release_memory()


def _uncompared(context: int, errors: dict[str, float], found: Sequence[Result]) -> list[str]:
    if errors or not found:
        return []
    return [f"at {context:,} tokens there was no baseline to compare logits with"]
