"""Equal terms: one dense set, one number of sinks, one recency window and one budget for all.

A method is set up by the names of its settings, so a policy of another package with the same names
is set up the same way:

    full_layers                     layers that read everything
    delta_layers, selection_layers, layers that read everything and select for the layers after
    filter_layers                   them: the last layer of the dense set
    dense_after                     layers after each of these that read everything: none
    dense_after                     layers after these that read everything: none
    sink_size                       first tokens that are always read
    window_size, or recent_pages    newest tokens, or pages, that are always read

Whatever a method would read beside its budget is a setting that is off by default, or refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from keyhole.cache.layout import Geometry
from keyhole.config import is_count, require
from keyhole.errors import ConfigError, UnknownNameError
from keyhole.eval.methods import TOKEN_BUDGET
from keyhole.policies import available_policies, make_policy
from keyhole.policies.base import Policy

SELECTION_LAYERS = ("delta_layers", "selection_layers", "filter_layers")
NO_MORE_DENSE = {"dense_after": 0}
"""Settings that would make more layers dense than are named, and their values that do not."""
_AFTER = "dense_after"
_FULL_LAYERS, _SINKS, _WINDOW, _PAGES = "full_layers", "sink_size", "window_size", "recent_pages"

#: What a method lacks because of what it is; it takes part all the same.
BY_DEFINITION = {
    "streaming_llm": {_WINDOW: "its window is the whole budget but the sinks"},
    "sliding_window": {
        _SINKS: "it has no sinks",
        _WINDOW: "its window is the whole budget",
    },
}


class UnequalTermsError(ConfigError):
    """A method that cannot be set up as the others are."""


def equal_terms(
    name: str,
    geometry: Geometry,
    budget: int,
    dense: tuple[int, ...],
    sinks: int,
    window: int,
    settings: Mapping[str, Any] | None = None,
) -> Policy:
    """The policy of a name with exactly these dense layers, sinks, window and budget.

    sinks, window, budget: in tokens; settings: others of the policy. UnequalTermsError for a policy
    that lacks one of them, has other dense layers then, or reads anything beside its budget;
    ConfigError for a setting in `settings` that the terms say.
    """
    known = available_policies()
    if name not in known:
        raise UnknownNameError("policy", name, known)
    fields = [field.name for field in dataclasses.fields(known[name])]
    lacks = BY_DEFINITION.get(name, {})
    said: dict[str, Any] = {TOKEN_BUDGET: budget}
    choosing = [field for field in SELECTION_LAYERS if field in fields]
    if choosing and not dense:
        raise UnequalTermsError(f"{name} selects in a dense layer, and the dense set is empty")
    said |= dict.fromkeys(choosing, dense[-1:])
    if _AFTER in fields:
        said[_AFTER] = 0
    said |= {field: value for field, value in NO_MORE_DENSE.items() if field in fields}
    said[_FULL_LAYERS] = dense[:-1] if choosing else dense
    if _SINKS not in lacks:
        said[_SINKS] = sinks
    if _WINDOW not in lacks:
        pages = _PAGES in fields and _WINDOW not in fields
        said[_PAGES if pages else _WINDOW] = -(-window // geometry.page_size) if pages else window
    for setting in said:
        if setting not in fields:
            raise UnequalTermsError(f"{name} has no setting {setting}")
    for setting in settings or {}:
        require(setting not in said, f"{name}:{setting}", (settings or {})[setting], "left out")
    policy = make_policy(name, {**(settings or {}), **said}).resolve(geometry)
    found = policy.dense_layers(geometry)
    if found != dense:
        raise UnequalTermsError(f"{name} reads everything in layers {found}, not in {dense}")
    beside = policy.outside_budget()
    if beside:
        raise UnequalTermsError(f"{name} reads beside its budget: {beside}")
    return policy


def default_dense(geometry: Geometry) -> tuple[int, ...]:
    """The first two full-attention layers."""
    return geometry.full_attention[:2]


def check_dense(dense: tuple[int, ...], geometry: Geometry) -> tuple[int, ...]:
    """The dense set in order; ConfigError unless all are full-attention layers of the model."""
    usable = geometry.full_attention
    good = all(is_count(layer, 0) and layer in usable for layer in dense)
    require(good, "dense_layers", dense, f"full-attention layers, of {usable}")
    return tuple(sorted(set(dense)))


def default_window(budget: int, page_size: int) -> int:
    """A quarter of the budget, in whole pages, at least one."""
    return max(1, budget // 4 // page_size) * page_size
