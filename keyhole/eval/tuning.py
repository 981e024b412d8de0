"""Settings that `--terms tuned` tries, and which of them it takes.

Random search with a fixed seed: first the method with its first layers dense and defaults
elsewhere, then random combinations of the values below, which are the same for all methods that
have a setting of that name. The best mean score wins; of equal scores the one that reads fewer
bytes.

Settings that change what the budget means (whether a prompt counts, a selection per query head), or
that save time at the cost of the score (how often a selection is refreshed) are not searched: the
table is about scores at one budget.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from keyhole.cache.layout import Geometry
from keyhole.errors import ConfigError
from keyhole.eval.line_file import Line
from keyhole.eval.methods import NO_MORE_DENSE, SELECTION_LAYERS, TOKEN_BUDGET, Method, settings_of
from keyhole.policies import available_policies, make_policy
from keyhole.policies.base import Policy

_FULL_LAYERS = "full_layers"


@dataclass(frozen=True)
class Share:
    """A share of the budget in whole pages, at least one; counted in tokens or in pages."""

    of_budget: Fraction
    in_pages: bool = False

    def at(self, budget: int, page_size: int) -> int:
        """For a budget in tokens."""
        pages = max(1, int(budget * self.of_budget) // page_size)
        return pages if self.in_pages else pages * page_size


_SHARES = (Fraction(1, 8), Fraction(1, 4), Fraction(1, 2))

#: None is a method's own default. Values that a method cannot have are passed over.
SPACE: Mapping[str, Sequence[Any]] = {
    "sink_size": (0, 16),
    "window_size": tuple(Share(share) for share in _SHARES),
    "recent_pages": tuple(Share(share, in_pages=True) for share in _SHARES),
    "cluster_size": (8, 16, 32, 80),
    "block_size": (None, 16, 32, 64),
    "outlier_chunks": (None, 0, 1, 2, 4),
    "rank": (None, 0),
    "alpha": (1e-4, 1e-3, 1e-2, 1e-1),
    "per_head": (True, False),
}

#: Where the last dense layer stands, as a share of the full-attention layers.
_DEPTHS = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))


def dense_sets(geometry: Geometry, size: int) -> list[tuple[int, ...]]:
    """A few sets of so many dense layers: the first ones; all but one of these and a deeper one;
    the same, evenly spread.

    The first full-attention layer is in all of them, since a method with selection layers reads
    everything before the first of these.
    """
    usable = geometry.full_attention
    size = min(size, len(usable))
    if size == 0:
        return [()]
    first = usable[: size - 1]
    deeper = [usable[min(len(usable) - 1, int(len(usable) * share))] for share in _DEPTHS]
    spread = tuple(usable[len(usable) * i // size] for i in range(size))
    found = [usable[:size], *((*first, layer) for layer in deeper if layer not in first), spread]
    if size > 1:
        found = [one for one in found if one[0] == usable[0]]
    return list(dict.fromkeys(found))


def layer_settings(
    fields: Collection[str], geometry: Geometry, size: int
) -> Iterator[dict[str, Any]]:
    """Settings that give a policy with these fields `size` dense layers; one that has none: {}."""
    selecting = [name for name in SELECTION_LAYERS if name in fields]
    if _FULL_LAYERS not in fields:
        yield {}
        return
    for dense in dense_sets(geometry, size):
        if not selecting:
            yield {_FULL_LAYERS: dense}
        for begin in range(len(dense) if selecting else 0):
            # Everything before the first selection layer is read; it must be in the set anyway.
            if dense[: begin + 1] == geometry.full_attention[: begin + 1]:
                layers = {_FULL_LAYERS: dense[:begin]} | dict.fromkeys(selecting, dense[begin:])
                yield layers | {
                    name: NO_MORE_DENSE[name] for name in NO_MORE_DENSE if name in fields
                }


def combinations(
    fields: Collection[str], geometry: Geometry, size: int, budget: int
) -> Iterator[dict[str, Any]]:
    """Every combination of values for a policy with these fields."""
    names = [name for name in SPACE if name in fields]
    values = [
        [
            value.at(budget, geometry.page_size) if isinstance(value, Share) else value
            for value in SPACE[name]
        ]
        for name in names
    ]
    for layers in layer_settings(fields, geometry, size):
        for chosen in itertools.product(*values):
            yield layers | dict(zip(names, chosen, strict=True))


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The best of a method's trials.

    settings: all that were said, the budget among them. score: on the held-out samples, of which
    there were `samples` for each task.
    """

    settings: Mapping[str, Any]
    score: float
    trials: int
    samples: int

    @property
    def note(self) -> str:
        """What a table says of it."""
        return f"best of {self.trials} trials on held-out samples ({100 * self.score:.1f} %)"


def trials(
    method: Method, length: int, geometry: Geometry, number: int, dense_size: int
) -> list[dict[str, Any]]:
    """Settings to be tried with a budget, at most `number`; the policy's name decides their order.

    Combinations that this model cannot have are passed over, and those that settle to the same
    policy count once. What the user has set stays. dense_size: dense layers that each trial has, of
    a policy whose dense layers can be set.
    """
    fields = available_policies()[method.name].__dataclass_fields__
    free = [name for name in fields if name not in (*method.settings, TOKEN_BUDGET)]
    budget = method.tokens(length, geometry.page_size)
    assert budget is not None
    every = list(combinations(free, geometry, dense_size, budget))
    random.Random(method.name).shuffle(every)
    usual = next(layer_settings(free, geometry, dense_size))
    found: dict[str, dict[str, Any]] = {}
    for settings in (usual, *every):
        try:
            given = {**method.settings, **settings, TOKEN_BUDGET: budget}
            policy = make_policy(method.name, given).resolve(geometry)
        except ConfigError:
            continue
        if _has_size(policy, free, geometry, dense_size):
            found.setdefault(json.dumps(settings_of(policy)), given)
        if len(found) == number:
            break
    return list(found.values())


def best_trial(
    tried: Sequence[tuple[Mapping[str, Any], Sequence[Line]]], places: int
) -> Chosen | None:
    """The best of some settings, each with its lines; None if none was measured at all places."""
    found: Chosen | None = None
    least: tuple[float, float] | None = None
    for settings, lines in tried:
        if len(lines) < places:  # refused somewhere
            continue
        score = statistics.fmean(line["score"] for line in lines)
        rank = (score, -statistics.fmean(line["bytes_per_step"] or 0 for line in lines))
        if least is None or rank > least:
            samples = min(line["samples"] for line in lines)
            found = Chosen(settings=settings, score=score, trials=len(tried), samples=samples)
            least = rank
    return found


def _has_size(policy: Policy, free: Collection[str], geometry: Geometry, dense_size: int) -> bool:
    if "full_layers" not in free:
        return True
    return len(policy.dense_layers(geometry)) == min(dense_size, len(geometry.full_attention))
