"""The same ways of loading in a model of a real shape, with random weights and a filled cache.

Random keys have no neighbours in meaning and a random head looks elsewhere at every step, so nearly
nothing repeats: this is what loading costs at its worst, and what overlap can hide of that.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from typing import Any

import torch

from keyhole.bench import agreement, memory
from keyhole.bench.loading import ABOVE, SYSTEMS, WARM_UP, Loading, Text, timed
from keyhole.bench.measure import Result
from keyhole.bench.model import Numbers, make_weights, prompts
from keyhole.bench.settings import PAGE_SIZE, DecodeSettings, OffloadSettings
from keyhole.engine.core import Engine
from keyhole.policy import make_policy
from keyhole.policy.base import Policy
from keyhole.retrieval.head import RetrievalHead

# Tokens after the prompt whose logits are compared.
_COMPARED = 3
_TOLERANCE = 1e-2  # the same numbers in bfloat16, in the same order: 0 is expected


def run(settings: OffloadSettings, folder: str) -> list[Result]:
    """A result for every policy and system at `settings.context` tokens and the largest budget."""
    assert settings.context is not None
    asked = DecodeSettings(contexts=(settings.context,), shape=settings.shape, device="cpu")
    model = make_weights(asked).ours
    numbers = Numbers(model, 1, settings.context)
    head = RetrievalHead.random(model.network)
    results: list[Result] = []
    for name in settings.policies:
        policy = make_policy(name, {"token_budget": settings.budgets[-1]})
        own = head if policy.wants_head else None
        found = _measure(model, policy, own, numbers, settings.repeat, folder)
        results += [{"policy": name, "budget": settings.budgets[-1]} | one for one in found]
        memory.give_back()
    return results


def _measure(
    model: Any,
    policy: Policy,
    head: RetrievalHead | None,
    numbers: Numbers,
    repeat: int,
    folder: str,
) -> list[Result]:
    texts, given = prompts(model, 1, numbers.context, _COMPARED + WARM_UP + repeat)
    short = Text(prompt=texts[0], answer=given[:_COMPARED])
    errors: dict[str, float] = {}
    with ExitStack() as stack:
        systems: dict[str, Loading] = {}
        for name in SYSTEMS:
            system = stack.enter_context(Loading(SYSTEMS[name], model, policy, head, folder))
            _fill(system.engine, numbers, texts[0])
            systems[name] = system
        expected = systems[ABOVE].logits(short)
        for name, system in systems.items():
            found = expected if name == ABOVE else system.logits(short)
            who = f"{policy.name}, {name}"
            errors[name] = agreement.check(who, [found], [expected], _TOLERANCE)
            system.start(Text(prompt=texts[0], answer=given))
        times, traffic = timed(systems, repeat)
        below = {name: system.layers_below for name, system in systems.items()}
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
            "layers_below": below[name],
            "steps_timed": repeat,
            "relative_error": errors[name],
        }
        for name, load in traffic.items()
    ]


def _fill(engine: Engine, numbers: Numbers, prompt: list[int]) -> None:
    """Writes the pages of a prompt but for its last token, and makes them known."""
    cache = engine.cache
    listed = cache.allocate(numbers.context // PAGE_SIZE)
    assert listed is not None
    assert engine.prefix is not None
    pages = torch.tensor(listed)
    generator = torch.Generator().manual_seed(0)
    for tensor in cache.common.values():
        tensor[pages] = torch.randn(tensor[pages].shape, generator=generator).to(tensor.dtype)
    filled = torch.full_like(pages, PAGE_SIZE)
    for layer in range(numbers.num_layers):
        for stored, draw in ((cache.keys, numbers.keys), (cache.values, numbers.values)):
            stored[layer][pages] = draw(layer, 0).unflatten(1, (-1, PAGE_SIZE)).transpose(0, 1)
        engine.policy.on_append(cache.keys[layer], cache.data[layer], pages, filled)
    engine.prefix.insert(prompt[:-1], listed, len(prompt))
    cache.release(listed)
