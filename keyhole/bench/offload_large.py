"""The same ways of loading in a model of a real shape, with random weights and a filled cache.

Random keys have no neighbours in meaning and a random head looks elsewhere at every step, so nearly
nothing repeats: this is what loading costs at its worst, and what overlap can hide of that. The
benchmarks of the papers' settings have a head that chooses much the same again.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Several
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from keyhole.bench import comparison, memory, offload_loading
from keyhole.bench.baselines import Baseline, Past
from keyhole.bench.comparison import TOLERANCE, allowed
from keyhole.bench.measure import Result, Turn
from keyhole.bench.memory import RESERVE_BYTES
from keyhole.bench.model import RandomKV, Weights, make_weights, prompts
from keyhole.bench.offload_loading import (
    ABOVE,
    ELASTIC,
    SYSTEMS,
    WARM_UP,
    ForcedText,
    Loading,
    at_budgets,
    budget_of,
    timed,
)
from keyhole.bench.settings import ALL_PEERS, DecodeSettings, OffloadSettings
from keyhole.config import require
from keyhole.policies.base import Policy
from keyhole.policies.controls import Full
from keyhole.retrieval.head import RetrievalHead

# Tokens after the prompt whose logits are compared.
_COMPARED = 3
_TOLERANCE = 1e-2  # the same numbers in bfloat16, in the same order: 0 is expected


def run(
    settings: OffloadSettings,
    folder: str,
    theirs: Several[str] = (),
    head_class: type[RetrievalHead] = RetrievalHead,
) -> list[Result]:
    """A result for every policy and system at `settings.context` tokens and the largest budget.

    theirs: peers of full attention that take turns with them, compared with ours over everything
    above. head_class: of the retrieval head.
    """
    assert settings.context is not None
    asked = DecodeSettings(
        contexts=(settings.context,), shape=settings.shape, device=settings.device
    )
    weights = make_weights(asked)
    head = head_class.random(weights.ours.network)
    case = _LargeCase(
        weights=weights,
        numbers=RandomKV(weights.ours, 1, settings.context),
        room=_room(settings, weights, head),
        settings=settings,
        folder=folder,
    )
    results: list[Result] = []
    for name in settings.policies:
        policy = at_budgets(name, settings.budgets)[-1]
        # The trace is of the first policy.
        traced = settings.trace if name == settings.policies[0] else None
        found = _measure(case, policy, head if policy.wants_head else None, theirs, traced)
        results += [{"policy": name, "budget": budget_of(policy)} | one for one in found]
        memory.give_back()
    return results


@dataclass(frozen=True, kw_only=True)
class _LargeCase:
    """What all policies have in common. room: for keys and values above; None: no limit."""

    weights: Weights
    numbers: RandomKV
    room: int | None
    settings: OffloadSettings
    folder: str


def _room(settings: OffloadSettings, weights: Weights, head: RetrievalHead) -> int | None:
    """What `settings.memory` leaves for keys and values, beside weights and what a step needs."""
    if settings.memory is None:
        return None
    parameters = {id(x): x for net in (weights.ours.network, head) for x in net.parameters()}
    used = sum(parameter.nbytes for parameter in parameters.values()) + RESERVE_BYTES
    right = f"more than {used}, which weights and a step need"
    require(settings.memory > used, "memory", settings.memory, right)
    return settings.memory - used


def _measure(
    case: _LargeCase,
    policy: Policy,
    head: RetrievalHead | None,
    theirs: Several[str],
    trace_file: str | None,
) -> list[Result]:
    model, repeat = case.weights.ours, case.settings.repeat
    steps = _COMPARED + WARM_UP + repeat + (offload_loading.STEPS if trace_file else 0)
    texts, given = prompts(model, 1, case.numbers.context, steps)
    short = ForcedText(prompt=texts[0], answer=given[:_COMPARED])
    errors: dict[str, float] = {}
    with ExitStack() as stack:
        systems: dict[str, Loading] = {}
        with case.numbers.filling(len(SYSTEMS)):
            for name, kind in SYSTEMS.items():
                settings = (model, policy, head, case.folder, case.room)
                system = stack.enter_context(Loading(kind, *settings))
                system.fill(case.numbers, texts)
                systems[name] = system
        expected = systems[ABOVE].logits(short)
        for name, system in systems.items():
            found = expected if name == ABOVE else system.logits(short)
            who = f"{policy.name}, {name}"
            errors[name] = comparison.check(who, [found], [expected], _TOLERANCE)
            system.start(ForcedText(prompt=texts[0], answer=given))
        peers, wrong = _peers(case, theirs, short, steps)
        turns = {peer.name: Turn(call=peer.step, after=peer.rest) for peer in peers}
        times, traffic = timed(systems, repeat, model.device, turns)
        launched = {name: system.launches(name) for name, system in systems.items()}
        launched |= {peer.name: peer.launches for peer in peers}
        below = {name: system.layers_below for name, system in systems.items()}
        if trace_file:
            offload_loading.write(Path(trace_file), systems[ELASTIC].engine.step, model.device)
    errors |= wrong
    loads = traffic | dict.fromkeys(turns)
    return [
        {
            "system": name,
            "step_ms": statistics.median(times[name]),
            "ratio_to_above": statistics.median(
                a / b for a, b in zip(times[name], times[ABOVE], strict=True)
            ),
            "stall_ms": None if load is None else load.stall_ms / repeat,
            "moved_bytes": None if load is None else load.moved_bytes / repeat,
            "hit_rate": None if load is None else load.hit_rate,
            "repeat_rate": None,
            "right_share": None,
            "layers_below": below.get(name),
            "launches": launched[name],
            "steps_timed": repeat,
            "relative_error": errors[name],
        }
        for name, load in loads.items()
    ]


def _peers(
    case: _LargeCase, names: Several[str], text: ForcedText, steps: int
) -> tuple[list[Baseline], dict[str, float]]:
    """Other people's systems, filled, compared and about to begin; their errors."""
    if not names:
        return [], {}
    model, context = case.weights.ours, case.numbers.context
    with Loading(None, model, Full(), None, case.folder) as dense:
        dense.fill(case.numbers, [text.prompt])
        expected = dense.logits(text)
    peers, errors = [], {}
    for name in names:
        past = Past(ALL_PEERS[name][1], model, context, steps)
        past.fill(case.numbers)
        peer = Baseline(name, case.weights, past, context)
        found = peer.logits([text.prompt], text.answer)[0]
        tolerance = allowed(name, TOLERANCE[model.dtype])
        errors[name] = comparison.check(name, [found], [expected], tolerance)
        peer.start([text.prompt], steps)
        peers.append(peer)
    return peers, errors
