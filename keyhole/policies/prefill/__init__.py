"""The table of prefill policies: one line per method. CLI, documents and tests read it.

A prefill policy selects what the tokens of a long prompt read, where a policy selects what a decode
step reads. Without one, prompts are computed exactly. Controls have a separate table.

Other packages add prefill policies by an entry point in the group `keyhole.prefill_policies`:
name = "package.module:Class".
"""

from __future__ import annotations

from keyhole.cache.layout import Geometry
from keyhole.policies.prefill.base import PrefillPolicy
from keyhole.registry import Registry

_METHODS = {"xattention": "keyhole.policies.prefill.xattention:XAttention"}
_CONTROLS = {
    "recent_blocks": "keyhole.policies.prefill.controls:RecentBlocks",
    "random_blocks": "keyhole.policies.prefill.controls:RandomBlocks",
}
_PREFILL_POLICIES = Registry(
    "prefill policy",
    PrefillPolicy,
    "keyhole.prefill_policies",
    _METHODS | _CONTROLS,
    default="xattention",
    field="prefill_policy",
)


def available_prefill_policies() -> dict[str, type[PrefillPolicy]]:
    """Every method by name: the table in its order, then entry points."""
    found = _PREFILL_POLICIES.classes()
    return {name: cls for name, cls in found.items() if name not in _CONTROLS}


def available_prefill_controls() -> dict[str, type[PrefillPolicy]]:
    """The controls by name; `make_prefill_policy` accepts them too."""
    return {name: cls for name, cls in _PREFILL_POLICIES.classes().items() if name in _CONTROLS}


def make_prefill_policy(text: str) -> PrefillPolicy:
    """A prefill policy from text such as "xattention:mass=0.95", not resolved.

    UnknownNameError for an unknown name or setting, ConfigError for a wrong value.
    """
    return _PREFILL_POLICIES.make(text)


def resolved_prefill_policy(text: str | None, geometry: Geometry) -> PrefillPolicy | None:
    """The prefill policy for a model; None, exact prompts, from None."""
    return None if text is None else make_prefill_policy(text).resolve(geometry)
