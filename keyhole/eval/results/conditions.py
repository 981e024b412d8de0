"""Which policies the cells of an evaluation have: the methods, and the controls beside them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from keyhole.cache.layout import Geometry
from keyhole.errors import KeyholeError
from keyhole.eval.methods import Method
from keyhole.eval.results.line_file import Line
from keyhole.eval.terms import GIVEN, Terms
from keyhole.eval.terms import controls as eval_controls
from keyhole.eval.terms.equal import UnequalTermsError
from keyhole.policies import make_policy
from keyhole.policies.base import Policy

#: Fields of a line that say what its cell was measured for; the same cell may serve several.
TERMS, CONTROL, CONTROLS, TUNING = "terms", "control", "controls", "tuning"
_TOLD = ("method", "dense_layers", "outside_budget", "terms_note")


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A policy that is measured at one length, resolved; `error`: why there is none.

    control: which one it is, where it is measured only as a control. about: fields of its line that
    do not say what was measured, but for what.
    """

    method: Method
    label: str
    policy: Policy
    budget: int | None
    control: str | None = None
    error: KeyholeError | None = None
    about: Line = field(default_factory=dict)

    @property
    def known_by(self) -> Line:
        """What of `about` a stored line must have to stand for this cell."""
        names = (TERMS, CONTROL, *(name for name in (CONTROLS, TUNING) if name in self.about))
        return {name: self.about.get(name) for name in names}

    def instead_of(self, line: Line) -> Line:
        """A line of the same measurement that was made for something else, for this cell."""
        others = (TERMS, CONTROL, CONTROLS, TUNING, *_TOLD)
        return {name: value for name, value in line.items() if name not in others} | self.about

    def refused(self, error: KeyholeError) -> Line:
        """What is told of a cell that could not be measured."""
        return {
            "policy": self.method.name,
            "method": self.label,
            "budget": self.budget,
            "error": str(error),
            "unequal": isinstance(error, UnequalTermsError),
        }


def asked(
    methods: Sequence[Method], terms: Terms, length: int, geometry: Geometry, with_controls: bool
) -> list[Condition]:
    """Every method at a length, each followed by those of its controls that were not there yet."""
    found: list[Condition] = []
    seen: set[str] = set()
    for method in methods:
        one = _method(method, terms, length, geometry)
        controls: dict[str, Policy] = {}
        if with_controls and one.error is None:
            controls = eval_controls.controls(one.policy, geometry)
        beside, more = {}, []
        for name, policy in controls.items():
            control = _control(name, policy, one, geometry)
            beside[name] = settings_of(control.policy)
            key = json.dumps(beside[name], sort_keys=True)
            if key not in seen:
                seen.add(key)
                more.append(control)
        if with_controls:
            one = dataclasses.replace(one, about=one.about | {CONTROLS: beside or None})
        found += [one, *more]
    return found


def settings_of(policy: Policy) -> Line:
    """A policy as a line names it: {"policy": ..., "settings": ...}, as it is read again."""
    settings = json.loads(json.dumps(dataclasses.asdict(policy)))
    return {"policy": policy.name, "settings": settings}


def _method(method: Method, terms: Terms, length: int, geometry: Geometry) -> Condition:
    budget, policy = method.tokens(length, geometry.page_size), make_policy(None)
    try:
        policy = terms.policy(method, length, geometry).resolve(geometry)
    except KeyholeError as error:
        return Condition(
            method=method, label=method.label, policy=policy, budget=budget, error=error
        )
    about: dict[str, Any] = {
        "method": method.label,
        "dense_layers": list(policy.dense_layers(geometry)),
        "outside_budget": policy.outside_budget(),
        TERMS: None if terms.name == GIVEN.name else terms.name,
        CONTROL: None,
        **terms.about(method, length, geometry),
    }
    return Condition(method=method, label=method.label, policy=policy, budget=budget, about=about)


def _control(name: str, policy: Policy, of: Condition, geometry: Geometry) -> Condition:
    layers = of.about["dense_layers"]
    label = f"{name}, dense {','.join(map(str, layers)) or 'none'}"
    error = None
    try:
        policy = policy.resolve(geometry)
    except KeyholeError as problem:
        error = problem
    about = {"method": label, "dense_layers": layers, TERMS: None, CONTROL: name}
    return Condition(
        method=of.method,
        label=label,
        policy=policy,
        budget=of.budget,
        control=name,
        error=error,
        about=about,
    )
