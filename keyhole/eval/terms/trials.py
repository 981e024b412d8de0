"""Which settings of a method are tried on held-out samples, and which of them is chosen.

Random search with a fixed seed: first the method with the first layers dense and everything else as
it is by default, then combinations of `search_space` by chance. The best mean score wins, of equal
ones the one that reads fewer bytes.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyhole.cache.layout import Geometry
from keyhole.errors import ConfigError
from keyhole.eval.methods import TOKEN_BUDGET, Method
from keyhole.eval.results.conditions import settings_of
from keyhole.eval.results.line_file import Line
from keyhole.eval.terms import search_space
from keyhole.policies import available_policies, make_policy
from keyhole.policies.base import Policy


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
    every = list(search_space.combinations(free, geometry, dense_size, budget))
    random.Random(method.name).shuffle(every)
    usual = next(search_space.layer_settings(free, geometry, dense_size))
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


def best(tried: Sequence[tuple[Mapping[str, Any], Sequence[Line]]], places: int) -> Chosen | None:
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
