"""The policies of an evaluation: methods under budgets, terms, and controls.

A `Method` is what the user named, under one budget. Terms define which policy it becomes:

    given       as the user writes it, with defaults otherwise
    equal       the same dense layers, sinks, recency window and budget for all methods
    published   as in the method's paper, or in its authors' code

Controls keep a policy's dense layers and its budget, and replace its selection:

    recent   the sinks and the newest tokens: the score without a selection
    random   the same number of tokens, drawn at random, including the newest one
    oracle   the tokens with the largest true attention weights of each step, per KV head: the best
             possible selection

A method that is no better than its recent control owes its score to its dense layers, not to its
selection.

Prefill policies are measured with full attention in decode steps. Their controls read as many
blocks for every block of queries and head: the newest ones (recent), or random ones (random).

Equal terms set these settings by name, so they also apply to a policy of another package that uses
the same names:

    full_layers                     layers that read everything
    delta_layers, selection_layers, layers that read everything and select for the layers after
    filter_layers                   them: the last layer of the dense set
    dense_after                     further layers that read everything; set to none
    sink_size                       first tokens that are always read
    window_size, or recent_pages    newest tokens, or pages, that are always read

A method that can read anything outside its budget is refused, unless that is a setting that is off
by default.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, Self

from keyhole.cache.layout import Geometry
from keyhole.config import is_count, require, require_known
from keyhole.errors import ConfigError, KeyholeError
from keyhole.eval.line_file import Line
from keyhole.policies import available_policies, make_policy
from keyhole.policies.base import Policy
from keyhole.policies.controls import Oracle, RandomTokens
from keyhole.policies.prefill import make_prefill_policy
from keyhole.policies.prefill.base import PrefillPolicy
from keyhole.policies.prefill.controls import RandomBlocks, RecentBlocks
from keyhole.policies.prefill.xattention import XAttention
from keyhole.policies.streaming_llm import StreamingLLM

TOKEN_BUDGET = "token_budget"
"""The setting that is a policy's budget."""

_RIGHT = "a number of tokens, at least 1, or a share of the length such as 1/8"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The tokens that a step may read: a number, or a share of the length."""

    text: str
    tokens: int | None = None
    share: Fraction | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """From 256, 1/8 or 0.125. ConfigError for anything else."""
        try:
            if "/" in text or "." in text:
                share = Fraction(text)
                if 0 < share <= 1:
                    return cls(text=text, share=share)
            elif is_count(int(text)):
                return cls(text=text, tokens=int(text))
        except (ValueError, ZeroDivisionError):
            pass
        raise ConfigError(f"budget {text!r} must be {_RIGHT}")

    def at(self, length: int, page_size: int) -> int:
        """In tokens; a share is rounded down to whole pages, at least one, so that all methods get
        the same.
        """
        if self.share is None:
            assert self.tokens is not None
            return self.tokens
        return max(1, int(length * self.share) // page_size) * page_size


@dataclass(frozen=True, kw_only=True)
class Method:
    """A policy as the user named it; `label` is the name as written."""

    label: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget | None = None

    def policy(self, length: int, page_size: int) -> Policy:
        """The policy for this length. ConfigError for invalid settings."""
        tokens = self.tokens(length, page_size)
        budget = {} if tokens is None else {TOKEN_BUDGET: tokens}
        return make_policy(self.name, {**self.settings, **budget})

    def tokens(self, length: int, page_size: int) -> int | None:
        """The budget in tokens; None for a policy without one."""
        if self.budget is None:
            return self.settings.get(TOKEN_BUDGET)
        return self.budget.at(length, page_size)


FULL = Method(label="full", name="full")


def under_budgets(given: Sequence[Method], budgets: Sequence[Budget]) -> list[Method]:
    """Full attention as the reference, and every other policy under every budget.

    A policy that sets its own budget, or has none, appears once.
    """
    found = [FULL]
    for method in given:
        cls = available_policies().get(method.name)
        names = [f.name for f in dataclasses.fields(cls)] if cls is not None else []
        if TOKEN_BUDGET in names and TOKEN_BUDGET not in method.settings:
            found += [dataclasses.replace(method, budget=budget) for budget in budgets]
        elif method.name != FULL.name:
            found.append(method)
    return found


def controls_of(policy: Policy, geometry: Geometry, seed: int = 0) -> dict[str, Policy]:
    """The controls of a resolved policy by name; {} for one that is dense or has no budget.

    They keep its dense layers, its sinks and its `token_budget`, but read nothing outside the
    budget. seed: for the random tokens.
    """
    settings = dataclasses.asdict(policy)
    budget = settings.get(TOKEN_BUDGET)
    if policy.dense or budget is None:
        return {}
    layers = policy.dense_layers(geometry)
    sinks = settings.get(_SINKS) or 0
    return {
        "recent": StreamingLLM(token_budget=budget, sink_size=sinks, full_layers=layers),
        "random": RandomTokens(token_budget=budget, sink_size=sinks, full_layers=layers, seed=seed),
        "oracle": Oracle(token_budget=budget, full_layers=layers),
    }


class Terms(ABC):
    """Rules by which a method becomes a policy. `name`: as in `--terms` and in stored lines."""

    name: ClassVar[str]

    @abstractmethod
    def policy(self, method: Method, length: int, geometry: Geometry) -> Policy:
        """The policy for this length. ConfigError for invalid settings."""

    def about(self, method: Method, length: int, geometry: Geometry) -> Line:
        """Further fields of the line, such as `terms_note`, a remark on this method."""
        return {}


class Given(Terms):
    """The settings that the user gave."""

    name = "given"

    def policy(self, method: Method, length: int, geometry: Geometry) -> Policy:
        """The settings that the user gave, with defaults otherwise."""
        return method.policy(length, geometry.page_size)


GIVEN = Given()


@dataclass(frozen=True, kw_only=True)
class Equal(Terms):
    """The same dense layers, sinks, window and budget for all methods. None: the defaults of
    `equal_terms`.
    """

    name: ClassVar[str] = "equal"
    dense: tuple[int, ...] | None = None
    sinks: int = 16
    window: int | None = None

    def policy(self, method: Method, length: int, geometry: Geometry) -> Policy:
        """UnequalTermsError for a method that cannot be set up in this way."""
        budget = method.tokens(length, geometry.page_size)
        if budget is None:
            return method.policy(length, geometry.page_size)
        dense, window = self.dense, self.window
        settings = {k: v for k, v in method.settings.items() if k != TOKEN_BUDGET}
        return equal_terms(
            method.name,
            geometry,
            budget,
            default_dense(geometry) if dense is None else check_dense(dense, geometry),
            self.sinks,
            default_window(budget, geometry.page_size) if window is None else window,
            settings,
        )

    def about(self, method: Method, length: int, geometry: Geometry) -> Line:
        """The settings that the method lacks by definition."""
        return {"terms_note": "; ".join(BY_DEFINITION.get(method.name, {}).values())}


class Published(Terms):
    """As in each paper, or in its authors' code."""

    name = "published"

    def policy(self, method: Method, length: int, geometry: Geometry) -> Policy:
        """ConfigError if the user set anything but the budget."""
        budget = method.tokens(length, geometry.page_size)
        own = {k: v for k, v in method.settings.items() if k != TOKEN_BUDGET}
        if own:
            raise ConfigError(
                f"{method.label}: with --terms published, a method takes no settings but its budget"
            )
        if budget is None:
            return make_policy(method.name)
        return available_policies()[method.name].as_published(geometry, budget)


SELECTION_LAYERS = ("delta_layers", "selection_layers", "filter_layers")
NO_MORE_DENSE = {"dense_after": 0}
"""Settings that would make further layers dense, with the values that prevent it."""
FULL_LAYERS, _SINKS, _WINDOW, _PAGES = "full_layers", "sink_size", "window_size", "recent_pages"

#: Settings that some methods lack by definition; they take part nevertheless.
BY_DEFINITION = {
    "streaming_llm": {_WINDOW: "its window is the whole budget but the sinks"},
    "sliding_window": {
        _SINKS: "it has no sinks",
        _WINDOW: "its window is the whole budget",
    },
}


class UnequalTermsError(ConfigError):
    """A method does not have the settings that equal terms need."""


def equal_terms(
    name: str,
    geometry: Geometry,
    budget: int,
    dense: tuple[int, ...],
    sinks: int,
    window: int,
    settings: Mapping[str, Any] | None = None,
) -> Policy:
    """The policy with exactly these dense layers, sinks, window and budget.

    sinks, window, budget: in tokens; settings: others of the policy. UnequalTermsError for a policy
    that lacks one of these settings, ends up with other dense layers, or reads anything outside its
    budget; ConfigError if `settings` contains one of them.
    """
    known = available_policies()
    require_known("policy", name, known)
    fields = [field.name for field in dataclasses.fields(known[name])]
    lacks = BY_DEFINITION.get(name, {})
    shared: dict[str, Any] = {TOKEN_BUDGET: budget}
    choosing = [field for field in SELECTION_LAYERS if field in fields]
    if choosing and not dense:
        raise UnequalTermsError(f"{name} selects in a dense layer, and the dense set is empty")
    shared |= dict.fromkeys(choosing, dense[-1:])
    shared |= {field: value for field, value in NO_MORE_DENSE.items() if field in fields}
    shared[FULL_LAYERS] = dense[:-1] if choosing else dense
    if _SINKS not in lacks:
        shared[_SINKS] = sinks
    if _WINDOW not in lacks:
        pages = _PAGES in fields and _WINDOW not in fields
        shared[_PAGES if pages else _WINDOW] = -(-window // geometry.page_size) if pages else window
    for setting in shared:
        if setting not in fields:
            raise UnequalTermsError(f"{name} has no setting {setting}")
    for setting in settings or {}:
        require(setting not in shared, f"{name}:{setting}", (settings or {})[setting], "left out")
    policy = make_policy(name, {**(settings or {}), **shared}).resolve(geometry)
    found = policy.dense_layers(geometry)
    if found != dense:
        raise UnequalTermsError(f"{name} reads everything in layers {found}, not in {dense}")
    beside = policy.outside_budget()
    if beside:
        raise UnequalTermsError(f"{name} reads outside its budget: {beside}")
    return policy


def default_dense(geometry: Geometry) -> tuple[int, ...]:
    """The first two full-attention layers."""
    return geometry.full_attention[:2]


def check_dense(dense: tuple[int, ...], geometry: Geometry) -> tuple[int, ...]:
    """The dense layers in order.

    ConfigError unless all are full-attention layers of the model, and others are left to methods.
    """
    usable = geometry.full_attention
    good = all(is_count(layer, 0) and layer in usable for layer in dense)
    require(good, "dense_layers", dense, f"full-attention layers, of {usable}")
    fewer = f"fewer layers than {usable}: every policy would be full attention"
    require(set(dense) != set(usable), "dense_layers", dense, fewer)
    return tuple(sorted(set(dense)))


def default_window(budget: int, page_size: int) -> int:
    """A quarter of the budget, in whole pages, at least one."""
    return max(1, budget // 4 // page_size) * page_size


#: Fields that say why a cell was measured; one cell may serve several purposes.
TERMS, CONTROL, CONTROLS, TUNING = "terms", "control", "controls", "tuning"
_TOLD = ("method", "dense_layers", "outside_budget", "terms_note")


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A resolved policy that is measured at one length; `error`: why it could not be made.

    prefill: the prefill policy; None: prompts read everything. control: the control's name if this
    is measured only as a control. about: fields of its line that say why it was measured.
    """

    method: Method
    label: str
    policy: Policy
    budget: int | None
    control: str | None = None
    error: KeyholeError | None = None
    about: Line = field(default_factory=dict)
    prefill: PrefillPolicy | None = None

    @property
    def measured(self) -> Policy | PrefillPolicy:
        """What the cell measures, whose name and settings identify it."""
        return self.policy if self.prefill is None else self.prefill

    @property
    def known_by(self) -> Line:
        """The fields of `about` that a stored line must match to be used for this cell."""
        told = (name for name in (CONTROLS, TUNING) if name in self.about)
        return {name: self.about.get(name) for name in ("method", TERMS, CONTROL, *told)}

    def instead_of(self, line: Line) -> Line:
        """A line of the same measurement, made for another purpose, with the fields of this cell's
        purpose.
        """
        others = (TERMS, CONTROL, CONTROLS, TUNING, *_TOLD)
        return {name: value for name, value in line.items() if name not in others} | self.about

    def refused(self, error: KeyholeError) -> Line:
        """The reported fields of a cell that could not be measured."""
        return {
            "policy": self.method.name,
            "method": self.label,
            "budget": self.budget,
            "error": str(error),
            "unequal": isinstance(error, UnequalTermsError),
        }


def conditions_at(
    methods: Sequence[Method], terms: Terms, length: int, geometry: Geometry, with_controls: bool
) -> list[Condition]:
    """Every method at a length, each followed by its controls that have not appeared yet."""
    found: list[Condition] = []
    seen: set[str] = set()
    for method in methods:
        one = _method(method, terms, length, geometry)
        controls: dict[str, Policy] = {}
        if with_controls and one.error is None:
            controls = controls_of(one.policy, geometry)
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


#: The controls of a prefill policy, as `controls_of` names those of a policy.
_PREFILL_CONTROLS = {"recent": RecentBlocks, "random": RandomBlocks}


def prefill_conditions(
    labels: Sequence[str], geometry: Geometry, with_controls: bool
) -> list[Condition]:
    """Prefill policies, each under full attention and followed by its controls.

    labels: as the user wrote them. ConfigError for a wrong one. A policy of another package has no
    controls, because they read as many blocks as XAttention.
    """
    found = []
    for label in labels:
        own = make_prefill_policy(label).resolve(geometry)
        one = _prefill_condition(label, own)
        beside: dict[str, Condition] = {}
        if with_controls and isinstance(own, XAttention):
            for name, control in _PREFILL_CONTROLS.items():
                policy = control(**dataclasses.asdict(own))
                beside[name] = _prefill_condition(f"{name} blocks of {label}", policy, name)
        if with_controls:
            named = {name: settings_of(other.measured) for name, other in beside.items()}
            one = dataclasses.replace(one, about=one.about | {CONTROLS: named or None})
        found += [one, *beside.values()]
    return found


def _prefill_condition(label: str, prefill: PrefillPolicy, control: str | None = None) -> Condition:
    return Condition(
        method=Method(label=label, name=prefill.name),
        label=label,
        policy=make_policy(None),
        budget=None,
        control=control,
        about={"method": label, TERMS: None, CONTROL: control},
        prefill=prefill,
    )


def settings_of(policy: Policy | PrefillPolicy) -> Line:
    """A policy as stored in a line: {"policy": ..., "settings": ...}, as it is read back."""
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
