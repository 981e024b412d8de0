"""Step time of decoding with a long cache, beside transformers.

A Llama of a given shape with random weights; the caches are filled with random numbers, the same in
all, so nothing is prefilled. Before anything is timed, the logits of full attention and of
transformers must agree over the same cache. Then all systems take turns, one step each.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from keyhole.bench import agreement, measure, memory
from keyhole.bench.measure import Report, Result
from keyhole.bench.model import Weights, keys_and_values, make_weights, prompts
from keyhole.bench.ours import Ours, Pages
from keyhole.bench.peers import Past, Peer
from keyhole.bench.room import Skipped, fitting
from keyhole.bench.settings import PAGE_SIZE, PEERS, DecodeSettings, require_known
from keyhole.bench.turns import Turn, take_turns
from keyhole.kernels import operations
from keyhole.models.loading import Model
from keyhole.policy import policies

#: The peer that the others' times are divided by.
PEER = next(iter(PEERS))

# Tokens after the prompt whose logits are compared.
_COMPARED = 3
# Relative error that rounding explains: in bfloat16, 16 layers of peaked attention gave 0.04
# (benchmarks/LOG.md). Unrelated logits differ by about 1.4.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.1}
# Eager attention also rounds scores before the softmax: 0.11 in bfloat16 (benchmarks/LOG.md).
_EAGER = 2.0
# The first step ends the prompt, the others bring every system to its pace.
_WARM_UP = 3


def run(settings: DecodeSettings, report: Report) -> dict[str, Any]:
    """Measures every context; the part of a line of results that is this benchmark's own.

    Gives each context's results to `report`, with notes on what was left out.
    """
    require_known("system", settings.systems, (*PEERS, *policies()))
    device = measure.device(settings.device)
    bandwidth = measure.read_bandwidth(device)
    _load_libraries(settings)
    program_bytes = memory.used_bytes(device)
    weights = make_weights(settings)
    parameters = list(weights.ours.network.parameters())
    weight_bytes = sum(parameter.nbytes for parameter in parameters)
    line: dict[str, Any] = {
        "settings": asdict(settings) | {"page_size": PAGE_SIZE, "warm_up": _WARM_UP},
        "kernels": operations.backend(device),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "read_bytes_per_s": bandwidth,
        "program_bytes": program_bytes,
        "weight_bytes": weight_bytes,
        "relative_error": {},
        "results": [],
        "skipped": [],
    }
    for context in settings.contexts:
        found, errors, skipped = measure_context(weights, settings, context)
        memory.give_back()  # the next context needs this one's
        for result in found:
            moved = weight_bytes + result["kv_bytes"] + result["other_bytes"]
            result["gb_per_s"] = moved / result["step_ms"] / 1e6
            result["bandwidth_share"] = 1e9 * result["gb_per_s"] / bandwidth
            buffers = result["cache_bytes"] + result["workspace_bytes"]
            result["stated_bytes"] = program_bytes + weight_bytes + buffers
        line["relative_error"][context] = errors
        line["results"] += found
        line["skipped"] += [one.as_dict() for one in skipped]
        report(found, [*map(str, skipped), *_uncompared(context, errors, found)])
    return line


def measure_context(
    weights: Weights, settings: DecodeSettings, context: int
) -> tuple[list[Result], dict[str, float], list[Skipped]]:
    """Results of every system at one context, errors of the compared logits, and who is left out.

    Full attention and the first peer are compared even if nobody asked for their times.
    """
    model = weights.ours
    steps = _COMPARED + _WARM_UP + settings.repeat + 1
    names = ["full", *(n for n in settings.systems if n not in PEERS and n != "full")]
    wanted = [PEER, *(n for n in settings.systems if n in PEERS and n != PEER)]
    sizes = {"batch": settings.batch, "context": context, "steps": steps}
    fit, skipped = fitting(model, names, wanted, **sizes)
    if skipped and skipped[0].system is None:
        return [], {}, skipped
    pages = Pages(model, names, settings.batch, context, steps)
    pasts = {
        kind: Past(kind, model, context, steps)
        for kind in dict.fromkeys(PEERS[name][1] for name in fit)
    }
    _fill([pages, *pasts.values()], model, settings.batch, context)
    texts, given = prompts(model, settings.batch, context, _COMPARED)
    pages.know(texts)
    peers = [Peer(name, weights, pasts[PEERS[name][1]], context) for name in fit]
    errors = compare(pages.ours[0], peers, texts, given, _TOLERANCE[model.dtype])
    everyone: list[Peer | Ours] = [*peers, *pages.ours]
    systems = [system for system in everyone if system.name in settings.systems]
    used = {PEERS[system.name][1] for system in systems if system.name in PEERS}
    cache_bytes = pages.num_bytes + sum(pasts[kind].num_bytes for kind in used)
    del peers, everyone
    for kind in pasts.keys() - used:  # was there to be compared only
        del pasts[kind]
    memory.give_back()  # what filling and comparing took is none of a step's
    results = _timed(systems, texts, settings.repeat, model.device)
    for result in results:
        result |= {"context": context, "cache_bytes": cache_bytes}
        result["workspace_bytes"] = memory.workspace_bytes()
    return results, errors, skipped


def _load_libraries(settings: DecodeSettings) -> None:
    """Runs every system once over a small model, so that the program has what it will load."""
    small = replace(settings, shape="smoke", layers=1, contexts=(PAGE_SIZE,), batch=1, repeat=1)
    measure_context(make_weights(small), small, PAGE_SIZE)
    memory.give_back()


def compare(
    dense: Ours,
    peers: Sequence[Peer],
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
        peer.name: agreement.check(
            peer.name,
            [peer.logits(texts, given)],
            [expected],
            tolerance * (_EAGER if peer.name == "transformers_eager" else 1.0),
        )
        for peer in peers
    }


def _fill(caches: Sequence[Pages | Past], model: Model, batch: int, context: int) -> None:
    for layer, keys, values in keys_and_values(model, batch, context):
        for cache in caches:
            cache.fill(layer, keys, values)


def _timed(
    systems: Sequence[Peer | Ours], texts: list[list[int]], repeat: int, device: torch.device
) -> list[Result]:
    """Times and peaks of every step after the warm-up, and what the steps read."""
    peaks: dict[str, list[int]] = {system.name: [] for system in systems}

    def turn(system: Peer | Ours) -> Turn:
        def after() -> None:
            peaks[system.name].append(memory.peak_bytes(device))
            system.rest()

        return Turn(call=system.step, before=lambda: memory.reset_peak(device), after=after)

    for system in systems:
        system.start(texts, _WARM_UP + repeat)
    times = take_turns({s.name: turn(s) for s in systems}, _WARM_UP + repeat, device)
    times = {name: spent[_WARM_UP:] for name, spent in times.items()}
    results = []
    for system in systems:
        spent = times[system.name]
        ratios = [a / b for a, b in zip(spent, times.get(PEER, []), strict=False)]
        result: Result = {
            "system": system.name,
            "step_ms": statistics.median(spent),
            "ratio_to_peer": statistics.median(ratios) if ratios else None,
            "all_step_ms": spent,
            "peak_bytes": max(peaks[system.name][_WARM_UP:]),
        }
        results.append(result | system.cost())
    return results


def _uncompared(context: int, errors: dict[str, float], found: Sequence[Result]) -> list[str]:
    if errors or not found:
        return []
    return [f"at {context:,} tokens no peer was there to compare logits with"]
