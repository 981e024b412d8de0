"""Taking turns: every system once per round, in an order that rotates, so that none is favoured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm

from keyhole.bench import measure


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a system does in its turn; only `call` is timed.

    `told_ms` is for a system in another process, which times itself: what its last call took.
    """

    call: Callable[[], object]
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing
    told_ms: Callable[[], float] | None = None


def take_turns(
    turns: Mapping[str, Turn], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of every call, by system."""
    names = list(turns)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in tqdm(range(rounds), desc="measure", unit="round", leave=False, disable=None):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            turn = turns[name]
            turn.before()
            spent = measure.time_ms(turn.call, device)
            times[name].append(spent if turn.told_ms is None else turn.told_ms())
            turn.after()
    return times
