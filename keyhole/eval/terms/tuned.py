"""Settings of every method, chosen on samples that the evaluation does not use.

Every method gets as many trials (`trials`). Trials are cells like all others, in a file of their
own, so that an interrupted search goes on.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from keyhole.cache.layout import Geometry
from keyhole.errors import ConfigError
from keyhole.eval.methods import TOKEN_BUDGET, Method
from keyhole.eval.results.conditions import settings_of
from keyhole.eval.results.line_file import Line
from keyhole.eval.run import EvalGrid, EvalOutcome
from keyhole.eval.terms import GIVEN, Terms, trials
from keyhole.eval.terms.trials import Chosen
from keyhole.policies import make_policy
from keyhole.policies.base import Policy

HELD_OUT = 1_000_000
"""Seed of the first sample that settings are chosen on; evaluations begin at 0."""

#: Label, length and budget of what was tuned.
Key = tuple[str, int, int | None]


@dataclass(frozen=True, kw_only=True)
class Tuned(Terms):
    """Each method with the settings that were best on held-out samples."""

    name: ClassVar[str] = "tuned"
    chosen: Mapping[Key, Chosen]

    def policy(self, method: Method, length: int, geometry: Geometry) -> Policy:
        """ConfigError for a method of which no trial could be run."""
        if not is_tuned(method):
            return method.policy(length, geometry.page_size)
        budget = method.tokens(length, geometry.page_size)
        found = self.chosen.get((method.label, length, budget))
        if found is None:
            raise ConfigError(f"{method.label}: no trial could be run with budget {budget}")
        return make_policy(method.name, found.settings)

    def about(self, method: Method, length: int, geometry: Geometry) -> Line:
        """How the settings were chosen."""
        found = self.chosen.get((method.label, length, method.tokens(length, geometry.page_size)))
        if found is None:
            return {}
        told = {"trials": found.trials, "samples": found.samples, "score": found.score}
        return {"terms_note": found.note, "tuning": told | {"first_seed": HELD_OUT}}


def is_tuned(method: Method) -> bool:
    """Whether there is anything to choose: not without a budget."""
    return method.budget is not None or TOKEN_BUDGET in method.settings


def tune(
    grid: EvalGrid,
    number: int,
    dense_size: int,
    geometry: Geometry,
    evaluate: Callable[[EvalGrid], EvalOutcome],
) -> Tuned:
    """Tries `number` settings of each method of a grid and chooses, by length and budget.

    grid: over held-out samples. dense_size: how many layers every trial reads densely. evaluate:
    runs a grid, its lines going to the file of the trials.
    """
    chosen: dict[Key, Chosen] = {}
    for length in grid.lengths:
        tried = {
            (method.label, length, method.tokens(length, geometry.page_size)): _as_methods(
                method, length, geometry, number, dense_size
            )
            for method in grid.methods
            if is_tuned(method)
        }
        every = [one for methods in tried.values() for one in methods]
        part = dataclasses.replace(
            grid, lengths=(length,), methods=every, terms=GIVEN, controls=False, maps=False
        )
        measured = _by_policy(evaluate(part).lines)
        for key, methods in tried.items():
            lines = [measured.get(_known(one, length, geometry), []) for one in methods]
            found = [(one.settings, of_one) for one, of_one in zip(methods, lines, strict=True)]
            best = trials.best(found, len(list(part.groups())))
            if best is not None:
                chosen[key] = best
    return Tuned(chosen=chosen)


def sibling(output: str | Path) -> Path:
    """The file of the trials beside that of an evaluation."""
    path = Path(output)
    return path.with_name(f"{path.stem}.trials.jsonl")


def _as_methods(
    method: Method, length: int, geometry: Geometry, number: int, dense_size: int
) -> list[Method]:
    found = trials.trials(method, length, geometry, number, dense_size)
    return [
        Method(label=f"{method.label}, trial {count}", name=method.name, settings=settings)
        for count, settings in enumerate(found, 1)
    ]


def _known(method: Method, length: int, geometry: Geometry) -> str:
    policy = method.policy(length, geometry.page_size).resolve(geometry)
    return json.dumps(settings_of(policy), sort_keys=True)


def _by_policy(lines: Sequence[Line]) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        known = {"policy": line["policy"], "settings": line["settings"]}
        found.setdefault(json.dumps(known, sort_keys=True), []).append(line)
    return found
