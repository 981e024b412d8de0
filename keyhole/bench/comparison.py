"""Systems in memory beside each other over one context: filled, compared, then timed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyhole.bench import memory
from keyhole.bench.baselines import Baseline, Outside, OutsidePeer, Past
from keyhole.bench.keyhole_system import KeyholeSystem, Pages
from keyhole.bench.measure import Turn, take_turns
from keyhole.bench.memory import Skipped, fitting
from keyhole.bench.model import RandomKV, Weights, prompts
from keyhole.bench.settings import ALL_PEERS, PEERS, DecodeSettings
from keyhole.errors import KeyholeError

_TINY = 1e-30  # two rows of zeros agree


class DisagreementError(KeyholeError):
    """Two systems give different results: no time of theirs means anything."""


def check(who: str, found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> float:
    """The largest relative error of what `who` gave; DisagreementError if it is too large.

    Compares as many tensors as both gave.
    """
    error = max(relative_error(a, b) for a, b in zip(found, expected, strict=False))
    if not error <= tolerance:  # NaN is no agreement either
        raise DisagreementError(f"{who}: relative error {error:.2g} is above {tolerance}")
    return error


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| (2-norms) of the worst row; whole numbers must be equal."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if bool((found == expected).all()) else float("inf")
    a, b = found.float(), expected.float()
    return float((a - b).norm(dim=-1).div(b.norm(dim=-1).clamp(min=_TINY)).max())


#: The peer that the others' times are divided by.
PEER = next(iter(PEERS))
#: Steps of every system before those that count: the first ends the prompt, the others bring it to
#: its pace.
WARM_UP = 3

# Tokens after the prompt whose logits are compared.
_COMPARED = 3
#: Relative error that rounding explains in up to 16 layers: of peaked attention in bfloat16 these
#: gave 0.04, and 32 gave 0.11 (benchmarks/LOG.md). Unrelated logits differ by about 1.4.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.1}
_LAYERS = 16
# Eager attention also rounds scores before the softmax: 0.11 in bfloat16, 0.28 in 32 layers.
_EAGER = 2.0


@dataclass(frozen=True, kw_only=True)
class SystemSteps:
    """What one system did: milliseconds and peaks of its steps, and what a step reads."""

    step_ms: list[float]
    peak_bytes: list[int]
    cost: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sitting:
    """Every system of one sitting by name, errors of the compared logits, and who is left out."""

    measured: dict[str, SystemSteps]
    errors: dict[str, float]
    skipped: list[Skipped]


def sit(
    weights: Weights,
    settings: DecodeSettings,
    context: int,
    outside: Outside | None = None,
    other: str | None = None,
) -> Sitting:
    """Measures all systems of this process that `settings` names, and one of `outside`: `other`.

    Full attention and one peer are compared even if nobody asked for their times.
    """
    model, batch = weights.ours, settings.batch
    steps = _COMPARED + WARM_UP + settings.repeat + 1
    inside = [n for n in settings.systems if outside is None or n not in outside.names]
    names = ["full", *(n for n in inside if n not in ALL_PEERS and n != "full")]
    wanted = [n for n in inside if n in ALL_PEERS and n != PEER]
    if PEER in inside or (other is None and not wanted):
        wanted.insert(0, PEER)
    needs = None
    if outside is not None and other is not None:
        needs = other, outside.needed(model, batch, context, steps)
    fit, skipped = fitting(
        model, names, wanted, batch=batch, context=context, steps=steps, outside=needs
    )
    if skipped and skipped[0].system is None:
        return Sitting(measured={}, errors={}, skipped=skipped)
    numbers = RandomKV(model, batch, context)
    texts, given = prompts(model, batch, context, _COMPARED)
    with contextlib.ExitStack() as stack:
        others: list[OutsidePeer] = []
        if outside is not None and other in fit:
            fit.remove(other)
            others = [outside.start(other, model, batch, context, steps)]
            stack.callback(others[0].close)
            others[0].fill(numbers)  # needs room for a copy, and nothing else is there yet
        pages = Pages(model, names, batch, context, steps, settings.token_budget)
        kinds = dict.fromkeys(ALL_PEERS[name][1] for name in fit)
        pasts = {kind: Past(kind, model, context, steps) for kind in kinds}
        _fill([pages, *pasts.values()], numbers)
        pages.know(texts)
        peers = [Baseline(name, weights, pasts[ALL_PEERS[name][1]], context) for name in fit]
        tolerance = TOLERANCE[model.dtype] * max(1.0, numbers.num_layers / _LAYERS)
        errors = compare(pages.ours[0], [*peers, *others], texts, given, tolerance)
        everyone: list[Baseline | KeyholeSystem] = [*peers, *pages.ours]
        systems = [system for system in everyone if system.name in inside]
        used = {ALL_PEERS[system.name][1] for system in systems if system.name in ALL_PEERS}
        cache_bytes = pages.num_bytes + sum(pasts[kind].num_bytes for kind in used)
        del peers, everyone
        for kind in pasts.keys() - used:  # was there to be compared only
            del pasts[kind]
        memory.give_back()  # what filling and comparing took is none of a step's
        measured = _timed(systems, others, texts, settings.repeat, model.device)
    for system in systems:
        cost = measured[system.name].cost
        cost |= {"cache_bytes": cache_bytes, "workspace_bytes": memory.workspace_bytes()}
    return Sitting(measured=measured, errors=errors, skipped=skipped)


def compare(
    dense: KeyholeSystem,
    peers: Sequence[Baseline | OutsidePeer],
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


def _fill(caches: Sequence[Pages | Past], numbers: RandomKV) -> None:
    with numbers.filling(len(caches)):
        for cache in caches:
            cache.fill(numbers)


def allowed(name: str, tolerance: float) -> float:
    """The error that a peer's own way of rounding explains."""
    if name not in ALL_PEERS:  # outside: has rounded weights, keys and values to float16
        return max(tolerance, TOLERANCE[torch.float16])
    return tolerance * (_EAGER if ALL_PEERS[name][0] == "eager" else 1.0)


def _timed(
    systems: Sequence[Baseline | KeyholeSystem],
    others: Sequence[OutsidePeer],
    texts: list[list[int]],
    repeat: int,
    device: torch.device,
) -> dict[str, SystemSteps]:
    """Times and peaks of every step after the warm-up, and what the steps read."""
    everyone = [*systems, *others]
    peaks: dict[str, list[int]] = {system.name: [] for system in everyone}

    def turn(system: Baseline | KeyholeSystem) -> Turn:
        def after() -> None:
            peaks[system.name].append(memory.peak_bytes(device))
            system.rest()

        return Turn(call=system.step, before=lambda: memory.reset_peak(device), after=after)

    def turn_outside(system: OutsidePeer) -> Turn:
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
