"""Runs a transformers model under a policy inside a `with` block, with its own `generate`.

    with keyhole.sparse(model, Delta(token_budget=1024)) as run:
        model.generate(**inputs, max_new_tokens=2000)
    print(run.stats)

A hook before each forward packs the rows that transformers gives (left padding taken out) into the
one row that our attention function expects, with pages of ours as the cache; a hook after it puts
the logits back where transformers expects them. A forward of one token per row, after others, is a
decode step under the policy; any other is prompt, and exact. Nothing of the model is replaced.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from keyhole.config import EngineConfig, parse_bytes
from keyhole.errors import ConfigError
from keyhole.exactness_gate import require
from keyhole.hf.hooks import Hooks, SparseRun
from keyhole.models import families
from keyhole.models.attention import NAME
from keyhole.models.model import Model, beside_weights
from keyhole.models.modules import own_attention
from keyhole.policies import make_policy
from keyhole.policies.base import Policy
from keyhole.registry import require_depth

#: Models inside a `sparse` block.
_ACTIVE: weakref.WeakSet[Any] = weakref.WeakSet()


@contextmanager
def sparse(
    model: Any,
    policy: Policy | str | Path | None = None,
    *,
    page_size: int = EngineConfig.page_size,
    memory: int | str | None = None,
) -> Iterator[SparseRun]:
    """Runs a transformers model with Keyhole's pages and a policy inside a `with` block.

    Prompts are computed exactly, each later token reads what the policy selects. Greedy decoding,
    sampling, left-padded batches, streamers, stopping criteria and the cache that `generate`
    returns work; beam search, assisted generation, caches of other kinds, attention
    weights and gradients are refused by name. Afterwards, also after an error, the model is as it
    was. policy: an object such as `Delta(token_budget=1024)`, a name, a settings file, or None
    (dense). page_size: tokens in a page of the KV cache. memory: the most that the cache may take,
    bytes or "2GiB"; None: most of what is free.

    ModelError for a model that is not supported; ConfigError for settings, and for a model that is
    inside such a block already.
    """
    size = None if memory is None else parse_bytes(memory)
    config = EngineConfig(page_size=page_size, memory=size, prefix_cache=False)
    adopted = _adopt(model)
    require_depth(policy, adopted.geometry(page_size).num_layers)
    if model in _ACTIVE:
        raise ConfigError(
            "this model is already inside a keyhole.sparse block; leave it before starting another"
        )
    hooks = Hooks(adopted, make_policy(policy), config)
    before = model.config._attn_implementation
    _ACTIVE.add(model)
    try:
        hooks.attach()
        model.set_attn_implementation(NAME)
        yield hooks.run
    finally:
        with hooks.turn():
            hooks.detach()
            model.set_attn_implementation(before)
            _ACTIVE.discard(model)


def _adopt(network: Any) -> Model:
    """The engine's view of a model that the user loaded."""
    if not isinstance(network, PreTrainedModel):
        raise ConfigError(
            f"keyhole.sparse needs a transformers model, not {type(network).__name__}"
        )
    name = str(network.name_or_path) or type(network).__name__
    require(network.config, name)
    own = own_attention.adapted(network)
    if own:
        raise ConfigError(
            f"keyhole.sparse cannot run {name!r}: its {own} does not call transformers' attention "
            "interface; keyhole.LLM(model) can"
        )
    if families.recurrent_layers(network.config):
        raise ConfigError(
            f"keyhole.sparse cannot run {name!r}, because some of its layers keep a recurrent "
            "state; keyhole.LLM(model) can"
        )
    if any(layout.index_topk is not None for layout in families.layouts(network.config)):
        raise ConfigError(
            f"keyhole.sparse cannot run {name!r}, because the model's own indexer selects what is "
            "read; keyhole.LLM(model) can"
        )
    devices = {parameter.device for parameter in network.parameters()}
    if len(devices) != 1:
        places = ", ".join(sorted(map(str, devices)))
        raise ConfigError(
            f"keyhole.sparse needs a model on one device, but this one is on {places}"
        )
    max_length, reason = families.max_length(network.config, None)
    return Model(
        name=name,
        network=network,
        tokenizer=None,
        device=devices.pop(),
        dtype=network.dtype,
        max_length=max_length,
        length_reason=reason,
        eos_token_ids=frozenset(),
        defaults={},
        **beside_weights(Path(name)),
    )
