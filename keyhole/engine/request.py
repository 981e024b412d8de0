"""What a request may ask of an engine: a policy of its own, token ids, parameters, a length.

All requests of an engine share its pages, its retrieval head and its offloaded layers, whose
layout follows the engine's own policy. Another policy can run if that layout has everything it
needs; its state per sequence and its CUDA graphs are its own. Any other policy is refused when
the request is made, before it is queued.

Prefixes are shared within a `page_group`: the requests whose pages hold what each of them needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keyhole.cache.layout import Geometry
from keyhole.cache.pages import PageCache
from keyhole.config import EngineConfig, SamplingParams, require_known
from keyhole.engine.allocation import LayerOffloader, page_data, page_limit, too_long
from keyhole.errors import (
    CapacityError,
    ConfigError,
    PromptTooLongError,
    RequestError,
    UnknownNameError,
)
from keyhole.models.model import Model
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
        policy = replace(own, **spec)
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
        return f"the LLM runs the retrieval head of {_head(own) or 'the model'!r}; omit head"
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
            f"{start} and these settings, or omit them from the request"
        )
    if policy.wants_gate and _gate(policy) not in (None, _gate(own)):
        return f"the LLM has the gate of {_gate(own) or 'the model'!r}; omit gate"
    return None


def _why_not_offloaded(
    policy: Policy, own: Policy, geometry: Geometry, memory: MemoryModel
) -> str | None:
    """The same for an engine that offloads layers, which are read through its buffers."""
    dense = set(memory.order) - set(policy.offloadable(geometry))
    if dense:
        shown = ", ".join(map(str, sorted(dense)))
        return (
            f"it reads all keys of layers {shown}, which may be offloaded; omit offload=, or use "
            "a policy that selects in these layers"
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


class RequestLimits:
    """The limits of one engine for requests; max_length: the most tokens of a sequence."""

    def __init__(
        self,
        model: Model,
        geometry: Geometry,
        config: EngineConfig,
        cache: PageCache,
        offloader: LayerOffloader | None,
        max_length: int,
    ) -> None:
        self._model, self._geometry, self._config = model, geometry, config
        self._cache, self._offloader = cache, offloader
        self._max_length, self._max_pages = max_length, cache.max_pages

    def check_length(self, count: int) -> None:
        """PromptTooLongError if a prompt of `count` tokens leaves no room for a new one."""
        check_length(count, self._model, self._max_length)

    def check_tokens(self, tokens: Sequence[int], params: SamplingParams) -> None:
        """RequestError for what no policy and no state of the cache could serve."""
        check_tokens(tokens, params, self._model, self._max_length)

    def check(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        policy: Policy,
        *,
        num_given: int = 0,
        stored: bool = False,
    ) -> None:
        """RequestError or CapacityError if a request with these tokens can never be served.

        num_given: how many of the last ones were generated. stored: they are documents, of which
        only a part may be kept.
        """
        model = self._model
        self.check_tokens(tokens, params)
        limit = self._longest(policy, stored=stored)
        if model.rope is not None and len(tokens) >= limit:
            what = "stored documents" if stored else f"policy {policy.name!r}"
            raise PromptTooLongError(
                f"the prompt has {len(tokens)} tokens, but under {what} this model takes at most "
                f"{limit - 1} and one new token ({model.rope.reason})"
            )
        most = self.resolve(params, len(tokens), policy, stored=stored).max_tokens
        assert most is not None
        length = min(len(tokens) + most, self._max_length)
        pages = page_limit(policy, self._geometry, len(tokens) - num_given, length)
        if pages > self._max_pages and not stored:
            length = min(length, pages * self._config.page_size)
            own = self._cache, self._offloader, self._config
            raise CapacityError(too_long(length, *own, is_hybrid=model.is_hybrid))

    def resolve(
        self, params: SamplingParams, num_tokens: int, policy: Policy, *, stored: bool
    ) -> SamplingParams:
        """Parameters without None; max_tokens is what model and KV cache have room for.

        num_tokens, stored: of the prompt, as for `check`.
        """
        params = params.resolve(self._model.defaults)
        limit = self._longest(policy, stored=stored)
        if params.max_tokens is not None:
            if limit == self._max_length:
                return params
            return replace(params, max_tokens=max(1, min(params.max_tokens, limit - num_tokens)))
        pages = page_limit(policy, self._geometry, num_tokens, limit)
        room = self._max_pages * self._config.page_size
        longest = limit if pages <= self._max_pages else min(room, limit)
        return replace(params, max_tokens=max(1, longest - num_tokens))

    def _longest(self, policy: Policy, *, stored: bool) -> int:
        """The maximum length under a policy, below `max_length` if its keys are shifted."""
        if self._model.rope is None or not (stored or policy.shifts_keys):
            return self._max_length
        return min(self._max_length, self._model.rope.threshold)


def longest(model: Model, config: EngineConfig) -> int:
    """The maximum length of a sequence. ConfigError for a `max_length` above the model's."""
    if config.max_length is None:
        return model.max_length
    if config.max_length > model.max_length:
        raise ConfigError(
            f"max_length {config.max_length} must be at most {model.max_length}: "
            f"{model.length_reason}"
        )
    return config.max_length


def check_tokens(
    tokens: Sequence[int], params: SamplingParams, model: Model, max_length: int
) -> None:
    """RequestError for tokens or parameters that the model does not support.

    PromptTooLongError if no new token fits below `max_length`; UnknownNameError for a LoRA adapter
    that is not loaded.
    """
    adapter_number(params.adapter, model)
    if not tokens:
        raise RequestError("the prompt is empty; give at least one token", field="prompt")
    check_length(len(tokens), model, max_length)
    wrong = [t for t in tokens if not 0 <= t < model.vocab_size]
    if wrong:
        right = f"0 to {model.vocab_size - 1}"
        message = f"token id {wrong[0]} is not one of this model's, {right}"
        raise RequestError(message, field="prompt")
    if (params.stop or params.bad_words) and model.tokenizer is None:
        name = "stop" if params.stop else "bad_words"
        raise RequestError(f"{name} needs a tokenizer; this model has none", field=name)
    _check_ids("logit_bias", params.logit_bias or (), model.vocab_size)
    # A tokenizer may have more. Counting its ids takes long, so only where it decides.
    beyond = [token for token in params.stop_token_ids if token >= model.vocab_size]
    if beyond:
        count = 0 if model.tokenizer is None else len(model.tokenizer)
        _check_ids("stop_token_ids", beyond, max(model.vocab_size, count))
    if (params.logprobs or 0) > model.vocab_size:
        raise RequestError(
            f"logprobs {params.logprobs} must be at most {model.vocab_size}, the tokens "
            "of this model",
            field="logprobs",
        )


def check_length(count: int, model: Model, max_length: int) -> None:
    """PromptTooLongError if no new token fits below `max_length`."""
    if count >= max_length:
        reason = model.length_reason
        if max_length < model.max_length:
            reason = "set by max_length"
        raise PromptTooLongError(
            f"the prompt has {count} tokens, but this model takes at most "
            f"{max_length - 1} and one new token ({reason})",
            field="prompt",
        )


def _check_ids(name: str, ids: Iterable[int], count: int) -> None:
    wrong = [token for token in ids if token >= count]
    if wrong:
        right = f"0 to {count - 1}"
        message = f"{name}: token id {wrong[0]} is not one of this model's, {right}"
        raise RequestError(message, field=name)


def end_ids(params: SamplingParams, model: Model) -> list[int]:
    """The tokens that end a sequence, of those that the model has scores for."""
    eos = () if params.ignore_eos else model.eos_token_ids
    return [token for token in {*eos, *params.stop_token_ids} if token < model.vocab_size]


def adapter_number(name: str | None, model: Model) -> int:
    """The number of a LoRA adapter, 0 for None. UnknownNameError for one that is not loaded."""
    try:
        return model.adapters.number(name)
    except ValueError:
        raise UnknownNameError("adapter", str(name), model.adapters.digests) from None
