"""Step time of decoding with a long cache, beside transformers.

A Llama of a given shape with random weights; the caches are filled with random numbers, the same in
all, so nothing is prefilled. Before anything is timed, the logits of full attention and of every
peer must agree over the same cache. Then all systems take turns, one step each. Systems that have
a process of their own (`Outside`) are measured one after the other, each beside all the others, as
their caches may be large.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from tqdm.auto import tqdm

from keyhole.bench import measure, memory
from keyhole.bench.baselines import Outside
from keyhole.bench.comparison import PEER, WARM_UP, Sitting, sit
from keyhole.bench.measure import Report, Result
from keyhole.bench.memory import Skipped
from keyhole.bench.model import Weights, make_weights
from keyhole.bench.settings import ALL_PEERS, PAGE_SIZE, DecodeSettings, require_systems
from keyhole.kernels import operations
from keyhole.policies import available_policies, make_policy, policy_name
from keyhole.registry import parse_one


def run(settings: DecodeSettings, report: Report, outside: Outside | None = None) -> dict[str, Any]:
    """Measures every context; the part of a line of results that is this benchmark's own.

    Gives each context's results to `report`, with notes on what was left out. outside: systems that
    `settings` may name, too.
    """
    others = () if outside is None else tuple(outside.names)
    require_systems(settings.systems, (*ALL_PEERS, *others))
    device = measure.device(settings.device)
    bandwidth = measure.read_bandwidth(device)
    _load_libraries(settings, others)
    program_bytes = memory.used_bytes(device)
    weights = make_weights(settings)
    if outside is not None:
        outside.write(weights)
    parameters = list(weights.ours.network.parameters())
    weight_bytes = sum(parameter.nbytes for parameter in parameters)
    line: dict[str, Any] = {
        "settings": asdict(settings) | {"page_size": PAGE_SIZE, "warm_up": WARM_UP},
        "kernels": operations.backend(device),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "read_bytes_per_s": bandwidth,
        "program_bytes": program_bytes,
        "weight_bytes": weight_bytes,
        "relative_error": {},
        "results": [],
        "skipped": [],
    }
    for context in tqdm(settings.contexts, desc="contexts", leave=False, disable=None):
        found, errors, skipped = measure_context(weights, settings, context, outside)
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
    """Results of every system at one context, errors of the compared logits, and who is left out.

    Each system that is outside has a sitting with all the others.
    """
    sittings = []
    names = () if outside is None else outside.names
    others: list[str | None] = [name for name in settings.systems if name in names]
    for other in others or [None]:
        sittings.append(sit(weights, settings, context, outside, other))
        memory.give_back()  # the next one needs this one's
    errors: dict[str, float] = {}
    for sitting in sittings:
        for name, error in sitting.errors.items():
            errors[name] = max(error, errors.get(name, 0.0))
    results = pooled(sittings)
    there = {result["system"] for result in results}
    skipped = {one.system: one for sitting in sittings for one in sitting.skipped}
    left_out = [one for name, one in skipped.items() if name not in there]
    return [result | {"context": context} for result in results], errors, left_out


def pooled(sittings: Sequence[Sitting]) -> list[Result]:
    """One result for every system: medians of all its steps, and of ratios within a round."""
    names = dict.fromkeys(name for sitting in sittings for name in sitting.measured)
    results = []
    for name in sorted(names, key=lambda n: (n not in ALL_PEERS, _is_policy(n))):
        own = [sitting.measured[name] for sitting in sittings if name in sitting.measured]
        spent = [ms for one in own for ms in one.step_ms]
        result: Result = {
            "system": name,
            "step_ms": statistics.median(spent),
            "ratio_to_peer": _ratio(sittings, name, PEER),
            "ratio_to_full": _ratio(sittings, name, "full"),
            "all_step_ms": spent,
            "peak_bytes": max(peak for one in own for peak in one.peak_bytes),
        }
        results.append(result | own[-1].cost)
    return results


def _is_policy(system: str) -> bool:
    return policy_name(parse_one(system, "policy").name) in available_policies()


def _ratio(sittings: Iterable[Sitting], name: str, other: str) -> float | None:
    """Median of the time of one system by that of another in the same round."""
    ratios = [
        a / b
        for sitting in sittings
        if name in sitting.measured and other in sitting.measured
        for a, b in zip(
            sitting.measured[name].step_ms, sitting.measured[other].step_ms, strict=True
        )
    ]
    return statistics.median(ratios) if ratios else None


def _load_libraries(settings: DecodeSettings, outside: Sequence[str]) -> None:
    """Runs every system once over a small model, so that the program has what it will load."""
    # Without their settings: layers that these name are not in the small model.
    inside = tuple(
        dict.fromkeys(
            name if name in ALL_PEERS else make_policy(name).name
            for name in settings.systems
            if name not in outside
        )
    )
    small = replace(settings, shape="smoke", layers=1, contexts=(PAGE_SIZE,), batch=1, repeat=1)
    small = replace(small, systems=inside or ("full",), token_budget=None)
    measure_context(make_weights(small), small, PAGE_SIZE)
    memory.give_back()


def _uncompared(context: int, errors: dict[str, float], found: Sequence[Result]) -> list[str]:
    if errors or not found:
        return []
    return [f"at {context:,} tokens no peer was there to compare logits with"]
