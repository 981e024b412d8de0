"""The policy of a single request.

All requests of an engine share its pages, its retrieval head and its offloaded layers, whose
layout follows the engine's own policy. Another policy can run if that layout has everything it
needs; its state per sequence and its CUDA graphs are its own. Any other policy is refused when
the request is made, before it is queued.

Prefixes are shared within a `page_group`: the requests whose pages hold what each of them needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.cache.layout import Geometry
from keyhole.config import require_known
from keyhole.engine.allocation import page_data
from keyhole.errors import ConfigError
from keyhole.planner import MemoryModel
from keyhole.policies import make_policy
from keyhole.policies.base import Policy
from keyhole.policies.controls import Full
from keyhole.registry import require_depth

#: The policy of a call: as `LLM` accepts it, or settings that differ from those of the `LLM`.
PolicySpec = Policy | str | Path | Mapping[str, Any]

#: The group of pages with keys and values only, where the engine's policy also reads queries.
_KEYS_ONLY = b"keys"


@dataclass(frozen=True, eq=False)
class RequestPolicy:
    """The policy of a request, from its prompt to its end.

    policy: resolved. keeper: the policy whose `on_append` runs on its pages; for a policy without
    data per page it is the engine's, so that their requests can share pages. page_group: see above.
    """

    policy: Policy
    keeper: Policy
    page_group: bytes = b""


#: For sequences that are made without an engine.
DENSE = RequestPolicy(Full(), Full())


def requested(spec: PolicySpec, own: Policy, geometry: Geometry) -> Policy:
    """The policy of an engine or of a call, resolved; own: the engine's, as it was given.

    UnknownNameError for an unknown name or setting, ConfigError for a wrong value, and for a policy
    that selects in a model that does so itself.
    """
    if isinstance(spec, Mapping):
        known = {field.name for field in dataclasses.fields(own)}
        for name in spec:
            require_known(f"setting of policy {own.name}", name, known)
        policy = dataclasses.replace(own, **spec)
    else:
        require_depth(spec, geometry.num_layers)
        policy = make_policy(spec)
    if geometry.index_topk is not None and not policy.dense:
        raise ConfigError(
            f"policy {policy.name!r} cannot be used with this model, because its own indexer "
            f"selects {geometry.index_topk} tokens in each layer; leave policy out"
        )
    return policy.resolve(geometry)


def beside(
    policy: Policy,
    own: Policy,
    geometry: Geometry,
    *,
    has_head: bool,
    memory: MemoryModel | None,
    group: bytes,
) -> RequestPolicy:
    """A request's policy next to the engine's own, both resolved. ConfigError if it cannot run
    there.

    has_head: whether the engine runs a retrieval head. memory: the widths of its
    buffers, if the engine offloads. group: a name that no `page_group` has yet.
    """
    why = _why_not(policy, own, geometry, has_head=has_head, memory=memory)
    if why is not None:
        raise ConfigError(
            f"policy {policy.name!r} of this request cannot run with policy {own.name!r} of the "
            f"LLM: {why}"
        )
    if not _keeps(policy, geometry):
        # Pages get the engine's side data, unless that is computed from queries too.
        return RequestPolicy(policy, own, _KEYS_ONLY if own.reads_queries else b"")
    return RequestPolicy(policy, policy, b"" if _keeps_alike(policy, own) else group)


def _why_not(
    policy: Policy, own: Policy, geometry: Geometry, *, has_head: bool, memory: MemoryModel | None
) -> str | None:
    """What the engine lacks, and a remedy; None if it lacks nothing."""
    start = f"start the LLM with policy={policy.name!r}"
    if policy.wants_head and not has_head:
        return f"it needs a retrieval head, which was not loaded; {start}"
    if policy.wants_head and getattr(policy, "head", None) not in (None, _head(own)):
        return f"the LLM runs the retrieval head of {_head(own) or 'the model'!r}; leave head out"
    if policy.wants_gate and not own.wants_gate:
        return f"it needs a gate, which was not loaded; {start}"
    return _why_not_kept(policy, own, geometry) or (
        None if memory is None else _why_not_offloaded(policy, own, geometry, memory)
    )


def _why_not_kept(policy: Policy, own: Policy, geometry: Geometry) -> str | None:
    """The same for the data of pages, and for the gate that scores it."""
    start = f"start the LLM with policy={policy.name!r}"
    kept = _keeps(policy, geometry)
    if kept and policy.name != own.name:
        return f"it keeps {_listed(kept)} with every page, which this cache does not; {start}"
    if kept and page_data(geometry, policy, None) != page_data(geometry, own, None):
        return (
            f"with these settings it keeps {_listed(kept)} of another shape with every page; "
            f"{start} and these settings, or leave these settings as they are"
        )
    if policy.wants_gate and _gate(policy) not in (None, _gate(own)):
        return f"the LLM has the gate of {_gate(own) or 'the model'!r}; leave gate out"
    return None


def _why_not_offloaded(
    policy: Policy, own: Policy, geometry: Geometry, memory: MemoryModel
) -> str | None:
    """The same for an engine that offloads layers, which are read through its buffers."""
    dense = set(memory.order) - set(policy.offloadable(geometry))
    if dense:
        shown = ", ".join(map(str, sorted(dense)))
        return (
            f"it reads all keys of layers {shown}, which may be offloaded; leave offload= out, or "
            "take a policy that selects in these layers"
        )
    budget = getattr(policy, "token_budget", None) or 0
    if budget > memory.token_budget:
        return (
            f"token_budget {budget} must be at most {memory.token_budget}, which the buffers of "
            "offloaded layers are made for; start the LLM with a larger token_budget"
        )
    if policy.selection_heads(geometry) != own.selection_heads(geometry):
        return (
            "it makes another number of selections per layer than the buffers of offloaded layers "
            f"have room for; start the LLM with policy={policy.name!r}"
        )
    return None


def _keeps(policy: Policy, geometry: Geometry) -> list[str]:
    """The names of a policy's data per page, of all layers."""
    return sorted({name for data in page_data(geometry, policy, None) for name in data})


def _keeps_alike(policy: Policy, own: Policy) -> bool:
    """Whether two policies of a name keep the same of every page."""
    names = policy.page_settings
    return names is not None and all(getattr(policy, name) == getattr(own, name) for name in names)


def _listed(names: list[str]) -> str:
    return " and ".join(repr(name) for name in names)


def _head(policy: Policy) -> str | None:
    return getattr(policy, "head", None)


def _gate(policy: Policy) -> str | None:
    return getattr(policy, "gate", None)
