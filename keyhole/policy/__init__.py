"""The table of policies: one line per method. CLI, documents and conformance tests read it.

Others add theirs by an entry point in the group `keyhole.policies`: name = "package.module:Class".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keyhole.policy.base import Policy
from keyhole.registry import Registry

_POLICIES = Registry(
    "policy",
    Policy,
    "keyhole.policies",
    {
        "full": "keyhole.policy.full:Full",
        "sliding_window": "keyhole.policy.sliding_window:SlidingWindow",
        "streaming_llm": "keyhole.policy.streaming_llm:StreamingLLM",
        "quest": "keyhole.policy.quest:Quest",
        "delta": "keyhole.policy.delta:Delta",
        "tidal_decode": "keyhole.policy.tidal_decode:TidalDecode",
        "omnikv": "keyhole.policy.omnikv:OmniKV",
        "infllm": "keyhole.policy.infllm:InfLLM",
        "raas": "keyhole.policy.raas:RaaS",
        "clusterkv": "keyhole.policy.clusterkv:ClusterKV",
        "shadowkv": "keyhole.policy.shadowkv:ShadowKV",
        "spe_context": "keyhole.policy.spe_context:SpeContext",
    },
    default="full",
)


def policies() -> dict[str, type[Policy]]:
    """Every policy by name: ours in the order of the table, then those of entry points."""
    return _POLICIES.classes()


def make_policy(policy: Policy | str | None, settings: Mapping[str, Any] | None = None) -> Policy:
    """A policy from itself, from its name with settings, or full attention from None."""
    return _POLICIES.make(policy, settings)
