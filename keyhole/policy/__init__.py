"""The table of policies: one line per method. CLI, documents and conformance tests read it.

Others add theirs by an entry point in the group `keyhole.policies`: name = "package.module:Class".
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from keyhole.config import from_settings
from keyhole.errors import ConfigError, UnknownNameError
from keyhole.policy.base import Policy

_TABLE = {
    "full": "keyhole.policy.full:Full",
    "sliding_window": "keyhole.policy.sliding_window:SlidingWindow",
    "streaming_llm": "keyhole.policy.streaming_llm:StreamingLLM",
    "quest": "keyhole.policy.quest:Quest",
    "delta": "keyhole.policy.delta:Delta",
    "spe_context": "keyhole.policy.spe_context:SpeContext",
}


def policies() -> dict[str, type[Policy]]:
    """Every policy by name: ours in the order of the table, then those of entry points."""
    return {name: _load(name, place) for name, place in _places().items()}


def make_policy(policy: Policy | str | None, settings: dict[str, Any] | None = None) -> Policy:
    """A policy from itself, from its name with settings, or full attention from None."""
    if isinstance(policy, Policy):
        if settings:
            raise ConfigError(
                f"settings {sorted(settings)} go with a policy's name, not its object"
            )
        return policy
    name = "full" if policy is None else policy
    places = _places()
    if name not in places:
        raise UnknownNameError("policy", str(name), places)
    # Only this one is loaded: a package of others that is broken harms nobody who does not use it.
    made = from_settings(_load(name, places[name]), f"policy {name}", settings or {})
    assert isinstance(made, Policy)
    return made


def _places() -> dict[str, str]:
    """Where each policy is, "module:Class" by name; ours cannot be replaced."""
    places = dict(_TABLE)
    for point in entry_points(group="keyhole.policies"):
        places.setdefault(point.name, point.value)
    return places


def _load(name: str, place: str) -> type[Policy]:
    module, _, attribute = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module of others may fail in its own manner while it is loaded
        raise ConfigError(f"policy {name!r} cannot be loaded from {place!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f"policy {name!r}: {place!r} is not a subclass of keyhole.Policy")
    return found
