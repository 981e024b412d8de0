"""The plugin's settings: a policy, its settings, and one setting of the plugin itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keyhole.errors import ConfigError
from keyhole.policies import make_policy
from keyhole.policies.base import Policy

#: The key of `additional_config`, and the variable that replaces it.
KEY, VARIABLE = "keyhole", "KEYHOLE_VLLM"

_SCORES = ("all_ranks", "each_rank")


@dataclass(frozen=True, kw_only=True)
class PluginSettings:
    """policy: a name, "delta" or "delta:recent_pages=2", or a settings file. settings: of it.

    tensor_parallel_scores: "all_ranks" reduces the scores that select pages for all heads over all
    ranks; "each_rank" lets each rank select by its own heads, without communication.
    """

    policy: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    tensor_parallel_scores: str = "all_ranks"

    def make_policy(self) -> Policy:
        """The policy, not resolved. ConfigError for an unknown name, setting or value."""
        given = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.settings.items()
        }
        return make_policy(self.policy, given)


def read_settings(
    additional_config: object, environment: Mapping[str, str]
) -> PluginSettings | None:
    """The plugin's settings, or None without a policy.

    additional_config: vLLM's; its "keyhole" takes precedence over `KEYHOLE_VLLM`. ConfigError for
    settings that are not an object with a "policy".
    """
    given: object = None
    if isinstance(additional_config, Mapping):
        given = additional_config.get(KEY)
    source = f"additional_config[{KEY!r}]"
    if given is None and environment.get(VARIABLE):
        source = VARIABLE
        try:
            given = json.loads(environment[VARIABLE])
        except ValueError as error:
            raise ConfigError(f"{VARIABLE} must be a JSON object: {error}") from error
    if given is None:
        return None
    if not isinstance(given, Mapping) or not isinstance(given.get("policy"), str):
        raise ConfigError(
            f"{source} {given!r} must be an object that names a policy, such as "
            '{"policy": "delta", "token_budget": 1024}'
        )
    settings = {name: value for name, value in given.items() if name != "policy"}
    scores = settings.pop("tensor_parallel_scores", _SCORES[0])
    if scores not in _SCORES:
        raise ConfigError(f"tensor_parallel_scores {scores!r} must be one of {_SCORES}")
    return PluginSettings(
        policy=given["policy"],
        settings=settings,
        tensor_parallel_scores=scores,
    )
