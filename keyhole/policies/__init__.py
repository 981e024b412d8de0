"""The table of policies: one line per method. CLI, documents and conformance tests read it.

Controls have a separate table. They are baselines that no paper proposes: selecting at random,
or perfectly. The control that selects the newest tokens is `streaming_llm` with the dense layers of
the method.

Other packages add policies by an entry point in the group `keyhole.policies`: name =
"package.module:Class".

The docstring of a method's module lists its differences from the paper with their measured effects:
how many of 48 answers to `tiny_derive` (derivations of the bundled model in 1,024 tokens) are
right, with 95 % Wilson intervals, where layers 0 and 1 are dense unless the method cannot keep
layers dense. They say what a difference does on this model, not which method is better.
benchmarks/results/differences.jsonl has the lines and their commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keyhole.policies.base import Policy
from keyhole.registry import Registry

_METHODS = {
    "full": "keyhole.policies.controls:Full",
    "sliding_window": "keyhole.policies.controls:SlidingWindow",
    "streaming_llm": "keyhole.policies.streaming_llm:StreamingLLM",
    "quest": "keyhole.policies.quest:Quest",
    "delta": "keyhole.policies.delta:Delta",
    "tidal_decode": "keyhole.policies.tidal_decode:TidalDecode",
    "omnikv": "keyhole.policies.omnikv:OmniKV",
    "infllm": "keyhole.policies.infllm:InfLLM",
    "raas": "keyhole.policies.evicting.raas:RaaS",
    "r_kv": "keyhole.policies.evicting.r_kv:RKV",
    "snapkv": "keyhole.policies.evicting.snapkv:SnapKV",
    "clusterkv": "keyhole.policies.clusterkv:ClusterKV",
    "shadowkv": "keyhole.policies.shadowkv:ShadowKV",
    "seer_attention_r": "keyhole.policies.seer_attention_r:SeerAttentionR",
    "spe_context": "keyhole.policies.spe_context:SpeContext",
}
_CONTROLS = {
    "random": "keyhole.policies.controls:RandomTokens",
    "oracle": "keyhole.policies.controls:Oracle",
}
_POLICIES = Registry(
    "policy", Policy, "keyhole.policies", _METHODS | _CONTROLS, default="full", field="policy"
)


def available_policies() -> dict[str, type[Policy]]:
    """Every method by name: the table in its order, then entry points."""
    return {name: cls for name, cls in _POLICIES.classes().items() if name not in _CONTROLS}


def available_controls() -> dict[str, type[Policy]]:
    """The controls by name; `make_policy` accepts them too."""
    return {name: cls for name, cls in _POLICIES.classes().items() if name in _CONTROLS}


def policy_name(name: str) -> str:
    """The table's name for spellings such as DELTA or Tidal-Decode; unknown names stay."""
    return _POLICIES.canonical(name)


def make_policy(
    policy: Policy | str | Path | None, settings: Mapping[str, Any] | None = None
) -> Policy:
    """A policy from a policy, a name such as "delta:token_budget=512" or a settings file.

    None is full attention.
    """
    return _POLICIES.make(policy, settings)
