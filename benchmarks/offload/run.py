"""Offloaded layers: how much of a selection repeats, what is moved, and what it costs.

The bundled model works through long derivations whose correct words are fed to it, so that every
system has the same context. In a first pass the whole answer is decoded: logits must agree between
all ways of loading, and selections and copies are counted. In a second pass the last steps are
timed, with the systems taking turns. If the operating system caches the file of the offloaded
layers in memory, times are those of copies in memory; the byte counts do not depend on that.

With `context` the same is measured on a model of a real shape with random weights and a filled
cache. Neighbouring random keys are not similar and a random head selects other tokens at every
step, so almost nothing repeats: this is the worst case for loading, and shows how much of the
loading can be hidden.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from collections.abc import Sequence as Several
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from benchmarks.offload import loading
from benchmarks.offload.loading import (
    ELASTIC,
    RESIDENT,
    SYSTEMS,
    WARM_UP,
    ForcedText,
    Loading,
    SelectionOverlap,
    at_budgets,
    budget_of,
    recording,
    timed,
)
from benchmarks.offload.settings import OffloadSettings
from keyhole.bench import decode, measure
from keyhole.bench.decode import TOLERANCE, allowed
from keyhole.bench.measure import Launches, Report, Result, Turn
from keyhole.bench.model import (
    RESERVE_BYTES,
    RandomKV,
    Weights,
    make_weights,
    prompts,
    release_memory,
)
from keyhole.bench.settings import ALL_BASELINES, PAGE_SIZE, DecodeSettings
from keyhole.bench.systems import Baseline, BaselineCache
from keyhole.cache.prefetch import Traffic
from keyhole.config import require
from keyhole.engine.head_runner import load_head
from keyhole.eval.tiny_language.tasks import make
from keyhole.models.model import Model
from keyhole.policies.base import Policy
from keyhole.policies.controls import Full
from keyhole.retrieval.head import RetrievalHead

# Tokens after the prompt whose logits are compared.
_COMPARED = 3
_LARGE_TOLERANCE = 1e-2  # the same numbers in the same order in bfloat16: 0 is expected


def run_large(
    settings: OffloadSettings,
    folder: str,
    theirs: Several[str] = (),
    head_class: type[RetrievalHead] = RetrievalHead,
) -> list[Result]:
    """A result for every policy and system at `settings.context` tokens and the largest budget.

    theirs: baselines with full attention that are interleaved with the systems, and compared with
    Keyhole with all layers resident. head_class: of the retrieval head.
    """
    assert settings.context is not None
    asked = DecodeSettings(
        contexts=(settings.context,), shape=settings.shape, device=settings.device
    )
    weights = make_weights(asked)
    head = head_class.random(weights.keyhole.network)
    case = _LargeCase(
        weights=weights,
        numbers=RandomKV(weights.keyhole, 1, settings.context),
        room=_room(settings, weights, head),
        settings=settings,
        folder=folder,
    )
    results: list[Result] = []
    for name in settings.policies:
        policy = at_budgets(name, settings.budgets)[-1]
        # The trace is of the first policy.
        traced = settings.trace if name == settings.policies[0] else None
        found = _measure_large(case, policy, head if policy.wants_head else None, theirs, traced)
        results += [{"policy": name, "budget": budget_of(policy)} | one for one in found]
        release_memory()
    return results


@dataclass(frozen=True, kw_only=True)
class _LargeCase:
    """What all policies share. room: bytes for resident keys and values; None: no limit."""

    weights: Weights
    numbers: RandomKV
    room: int | None
    settings: OffloadSettings
    folder: str


def _room(settings: OffloadSettings, weights: Weights, head: RetrievalHead) -> int | None:
    """What `settings.memory` leaves for keys and values, after weights and working memory."""
    if settings.memory is None:
        return None
    parameters = {id(x): x for net in (weights.keyhole.network, head) for x in net.parameters()}
    used = sum(parameter.nbytes for parameter in parameters.values()) + RESERVE_BYTES
    right = f"more than {used}, which weights and a step need"
    require(settings.memory > used, "memory", settings.memory, right)
    return settings.memory - used


def _measure_large(
    case: _LargeCase,
    policy: Policy,
    head: RetrievalHead | None,
    theirs: Several[str],
    trace_file: str | None,
) -> list[Result]:
    model, repeat = case.weights.keyhole, case.settings.repeat
    steps = _COMPARED + WARM_UP + repeat + (loading.STEPS if trace_file else 0)
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
        expected = systems[RESIDENT].logits(short)
        for name, system in systems.items():
            found = expected if name == RESIDENT else system.logits(short)
            who = f"{policy.name}, {name}"
            errors[name] = decode.check(who, [found], [expected], _LARGE_TOLERANCE)
            system.start(ForcedText(prompt=texts[0], answer=given))
        peers, wrong = _peers(case, theirs, short, steps)
        turns = {peer.name: Turn(call=peer.step, after=peer.rest) for peer in peers}
        times, traffic = timed(systems, repeat, model.device, turns)
        launched = {name: system.launches(name) for name, system in systems.items()}
        launched |= {peer.name: peer.launches for peer in peers}
        below = {name: system.offloaded_layers for name, system in systems.items()}
        if trace_file:
            loading.write(Path(trace_file), systems[ELASTIC].engine.step, model.device)
    errors |= wrong
    loads = traffic | dict.fromkeys(turns)
    return [
        {
            "system": name,
            "step_ms": statistics.median(times[name]),
            "ratio_to_resident": statistics.median(
                a / b for a, b in zip(times[name], times[RESIDENT], strict=True)
            ),
            "stall_ms": None if load is None else load.stall_ms / repeat,
            "moved_bytes": None if load is None else load.moved_bytes / repeat,
            "hit_rate": None if load is None else load.hit_rate,
            "repeat_rate": None,
            "right_share": None,
            "offloaded_layers": below.get(name),
            "launches": launched[name],
            "steps_timed": repeat,
            "relative_error": errors[name],
        }
        for name, load in loads.items()
    ]


def _peers(
    case: _LargeCase, names: Several[str], text: ForcedText, steps: int
) -> tuple[list[Baseline], dict[str, float]]:
    """The baselines, filled, compared and started, with their errors."""
    if not names:
        return [], {}
    model, context = case.weights.keyhole, case.numbers.context
    with Loading(None, model, Full(), None, case.folder) as dense:
        dense.fill(case.numbers, [text.prompt])
        expected = dense.logits(text)
    peers, errors = [], {}
    for name in names:
        past = BaselineCache(ALL_BASELINES[name][1], model, context, steps)
        past.fill(case.numbers)
        peer = Baseline(name, case.weights, past, context)
        found = peer.logits([text.prompt], text.answer)[0]
        tolerance = allowed(name, TOLERANCE[model.dtype])
        errors[name] = decode.check(name, [found], [expected], tolerance)
        peer.start([text.prompt], steps)
        peers.append(peer)
    return peers, errors


# Attention over the same keys in another order, in float32.
_TOLERANCE = 1e-4


def run(
    model: Model, settings: OffloadSettings, report: Report, head: RetrievalHead | None = None
) -> dict[str, Any]:
    """Measures every policy and budget; returns the part of a line of results that is specific to
    this benchmark.

    model: the bundled one. head: for policies that need one; None: the model's own, ConfigError if
    it has none. Passes the results of each budget to `report`.
    """
    asked = {name: at_budgets(name, settings.budgets) for name in settings.policies}
    everyone = [policy for policies in asked.values() for policy in policies]
    for policy in everyone:
        if policy.wants_head and head is None:
            head = load_head(policy, model)
    largest = max(budget_of(policy) for policy in everyone)
    texts = [_text(model, settings, largest, seed) for seed in range(settings.items)]
    line: dict[str, Any] = {
        "settings": asdict(settings) | {"page_size": PAGE_SIZE, "warm_up": WARM_UP},
        "model": model.name,
        "head": None if head is None else head.config.objective,
        "tokens": [len(text) for text in texts],
        "read_bytes_per_s": measure.read_bandwidth(model.device),
        "results": [],
    }
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        work = [(name, policy) for name, policies in asked.items() for policy in policies]
        for name, policy in tqdm(work, desc="budgets", leave=False, disable=None):
            found = measure_budget(model, policy, head, texts, settings.repeat, folder)
            named = {"policy": name, "budget": budget_of(policy)}
            line["results"] += [named | one for one in found]
            report(line["results"][-len(found) :], [])
        if settings.trace is not None and settings.context is None:
            policy = next(iter(asked.values()))[-1]
            _trace(model, policy, head, texts[0], settings.trace, folder)
        if settings.context is not None:
            line["large"] = run_large(settings, folder)
            about = f"{settings.shape}, random weights, {settings.context:,} tokens: the worst case"
            report(line["large"], [about])
    return line


def measure_budget(
    model: Model,
    policy: Policy,
    head: RetrievalHead | None,
    texts: Sequence[ForcedText],
    repeat: int,
    folder: str,
) -> list[Result]:
    """A result for every system, over all texts; DisagreementError if the logits of one differ."""
    repeats, right = SelectionOverlap(), 0
    counted: dict[str, Traffic] = {name: Traffic() for name in SYSTEMS}
    stalled, errors = dict.fromkeys(SYSTEMS, 0.0), dict.fromkeys(SYSTEMS, 0.0)
    times: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    below = dict.fromkeys(SYSTEMS, 0)
    launches: dict[str, list[Launches]] = {name: [] for name in SYSTEMS}
    for text in texts:
        with Loading(None, model, policy, head, folder, graphs=False) as system:
            expected = system.logits(text)
        right += int((expected[:-1].argmax(-1) == torch.tensor(text.answer)).sum())
        repeats.forget()
        for name, kind in tqdm(SYSTEMS.items(), desc="compare", leave=False, disable=None):
            if kind is None:
                continue
            kind = recording(repeats) if name == ELASTIC else kind
            with Loading(kind, model, policy, head, folder, graphs=False) as system:
                found = system.logits(text)
                counted[name] += system.traffic or Traffic()
                below[name] = system.offloaded_layers
            who = f"{policy.name}, {name}"
            error = decode.check(who, [found], [expected], _TOLERANCE)
            errors[name] = max(errors[name], error)
    for text in texts:
        spent, loaded, launched = _timed(model, policy, head, text, repeat, folder)
        for name, traffic in loaded.items():
            launches[name].append(launched[name])
            times[name] += spent[name]
            stalled[name] += 0.0 if traffic is None else traffic.stall_ms
    words, steps = sum(len(text.answer) for text in texts), repeats.steps
    return [
        {
            "system": name,
            "step_ms": statistics.median(times[name]),
            "ratio_to_resident": statistics.median(
                a / b for a, b in zip(times[name], times[RESIDENT], strict=True)
            ),
            "stall_ms": None if name == RESIDENT else stalled[name] / len(times[name]),
            "moved_bytes": None if name == RESIDENT else counted[name].moved_bytes / steps,
            "hit_rate": counted[name].hit_rate,
            "repeat_rate": repeats.repeated / repeats.selected,
            "right_share": right / words,
            "offloaded_layers": below[name],
            "launches": together(launches[name]),
            "steps_counted": steps,
            "steps_timed": len(times[name]),
            "relative_error": errors[name],
        }
        for name in SYSTEMS
    ]


def together(parts: Sequence[Launches]) -> Launches:
    """The launches of several measurements of one system, combined."""
    reasons = [part["why_not"] for part in parts if part["why_not"] is not None]
    steps = sum(part["replayed_steps"] for part in parts)
    return measure.launches(steps, reasons[0] if reasons else None)


def _timed(
    model: Model,
    policy: Policy,
    head: RetrievalHead | None,
    text: ForcedText,
    repeat: int,
    folder: str,
) -> tuple[dict[str, list[float]], dict[str, Traffic | None], dict[str, Launches]]:
    """Milliseconds of the last `repeat` steps of each system, what they loaded, and launches."""
    graphs = not policy.reads_keys  # the same for all systems
    with ExitStack() as stack:
        systems = {
            name: stack.enter_context(Loading(kind, model, policy, head, folder, graphs=graphs))
            for name, kind in SYSTEMS.items()
        }
        for system in systems.values():
            system.start(text.last(WARM_UP + repeat))
        times, loaded = timed(systems, repeat, model.device)
        return times, loaded, {name: system.launches(name) for name, system in systems.items()}


def _trace(
    model: Model,
    policy: Policy,
    head: RetrievalHead | None,
    text: ForcedText,
    path: str,
    folder: str,
) -> None:
    """Writes a trace of the last steps of a text."""
    with Loading(SYSTEMS[ELASTIC], model, policy, head, folder) as system:
        system.start(text.last(WARM_UP + loading.STEPS))
        for _ in range(WARM_UP):
            system.engine.step()
        loading.write(Path(path), system.engine.step, model.device)


def _text(model: Model, settings: OffloadSettings, largest: int, seed: int) -> ForcedText:
    """A derivation with its answer; ConfigError if it is too short to be measured."""
    item = make("derive", settings.words, seed)
    assert model.tokenizer is not None, "the bundled model has one"
    prompt = model.tokenizer(item.prompt).input_ids
    answer = model.tokenizer(item.answer, add_special_tokens=False).input_ids
    text = ForcedText(prompt=prompt, answer=answer)
    least = largest + WARM_UP + settings.repeat
    right = (
        f"large enough for a derivation of more than {least} tokens, the largest budget and the "
    )
    right += f"timed steps (it has {len(text)}); or use smaller budgets or a smaller repeat"
    good = len(text) > least and len(answer) > WARM_UP + settings.repeat
    require(good, "words", settings.words, right)
    return text
