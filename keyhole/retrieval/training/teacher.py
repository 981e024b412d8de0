"""Runs the frozen target and collects a head's training targets: features, attention, predictions.

The target attends by our own function: through sdpa or, if that would materialise all weights, in
blocks of queries, so that memory stays linear in the length of a text. Weights are computed as in
the eager attention of transformers, for the sampled rows only, and stored as their mean over
layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache

from keyhole.cache.argument import cache_argument
from keyhole.errors import ConfigError, NumericalError

#: Name of our function in transformers' table.
NAME = "keyhole_teacher"
#: Weights computed at once; 64 MiB in float32.
_BLOCK = 1 << 24


@dataclass(frozen=True)
class TeacherTargets:
    """The target's outputs on one text of n tokens.

    token_ids: int64 [n]. hidden: the input of each feature layer, float32 [n, Ht]. rows: int64 [R],
    the sampled query tokens. mass: float32 [Hkv, R, n], the attention weights of each row, mean
    over layers and over the query heads of a KV head; with MLA, which has no groups, per head.
    logits: float32 [R, steps, V], at each row and the steps after it; None if not requested. later:
    float32 [steps, Hkv, R, n], the mass of the tokens 1, 2, ... places after each row; None if not
    requested. cache: keys and values of all tokens, in transformers' form; None if not requested.
    """

    token_ids: Tensor
    hidden: tuple[Tensor, ...]
    rows: Tensor
    mass: Tensor
    logits: Tensor | None = None
    later: Tensor | None = None
    cache: DynamicCache | None = None


class AttentionRecord(ABC):
    """Passed through a forward pass to every layer; takes the weights of the rows int64 [R]."""

    rows: Tensor

    @abstractmethod
    def add(self, layer: int, queries: Tensor, keys: Tensor, parts: Iterator[Tensor]) -> None:
        """Takes a layer with full attention, by its number in the model.

        queries [Hkv, G, n, D] and keys [Hkv, n, D], both rotated. parts: the weights of the rows,
        float32 [Hkv, G, r, n] each, as many rows at a time as memory allows; must be consumed.
        """


@dataclass
class _Mass(AttentionRecord):
    """The sum of the layers' mean weights over the query heads of a KV head."""

    rows: Tensor
    total: Tensor | None = None
    num_layers: int = 0

    def add(self, layer: int, queries: Tensor, keys: Tensor, parts: Iterator[Tensor]) -> None:
        """See `AttentionRecord`."""
        mass = torch.cat([part.mean(1) for part in parts], 1)
        self.total = mass if self.total is None else self.total + mass
        self.num_layers += 1


@contextmanager
def attending_by(network: Any, name: str) -> Iterator[None]:
    """Makes a network attend by this function of transformers' table while a block runs."""
    before = network.config._attn_implementation
    network.set_attn_implementation(name)
    try:
        yield
    finally:
        network.set_attn_implementation(before)


def run_recorded(network: Any, token_ids: Tensor, record: AttentionRecord, **options: Any) -> Any:
    """The network's output on a text, int64 [n]; `record` takes the weights of each layer.

    options: of its forward.
    """
    with attending_by(network, NAME):
        return network(input_ids=token_ids[None], **options, **{NAME: record})


class Teacher:
    """A frozen causal language model of transformers."""

    def __init__(self, network: nn.Module, feature_layers: tuple[int, ...]) -> None:
        self._network: Any = network
        self._layers = feature_layers

    @torch.no_grad()
    def targets(
        self,
        token_ids: Tensor,
        rows: Tensor,
        *,
        logit_steps: int = 0,
        later_steps: int = 0,
        keep_cache: bool = False,
    ) -> TeacherTargets:
        """Reads a text, int64 [n]; rows int64 [R], the last at most n - logit_steps.

        later_steps: of how many tokens after each row the mass is wanted, too; the last row is then
        less than n - later_steps. ConfigError for a model without full attention, NumericalError
        for NaN.
        """
        ahead = torch.arange(later_steps + 1, device=rows.device)
        weighed, place = (rows + ahead[:, None]).unique(return_inverse=True)
        network, record = self._network, _Mass(weighed)
        cache = DynamicCache() if keep_cache else None  # no config: of all layers all tokens
        places = (rows[:, None] + torch.arange(logit_steps, device=rows.device)).flatten()
        kept, back = places.unique(return_inverse=True)
        out = run_recorded(
            network,
            token_ids,
            record,
            use_cache=keep_cache,
            output_hidden_states=True,
            logits_to_keep=kept if logit_steps else rows[:1],
            **{cache_argument(network): cache},
        )
        if record.total is None:
            raise ConfigError(
                "a retrieval head needs layers with full attention, but this model has none"
            )
        mass = record.total / record.num_layers
        if not (mass.isfinite().all() and out.logits.isfinite().all()):
            raise NumericalError(f"the model computes NaN for a text of {len(token_ids)} tokens")
        logits = out.logits[0].float()[back].unflatten(0, (len(rows), -1)) if logit_steps else None
        hidden = tuple(out.hidden_states[layer][0].float() for layer in self._layers)
        own, *after = (mass[:, some] for some in place)
        later = torch.stack(after) if after else None
        return TeacherTargets(token_ids, hidden, rows, own, logits, later, cache)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention of one text: query [1, Hq, n, D], key and value [1, Hkv, n, D].

    options: as transformers passes them. Returns [1, n, Hq, Dv], as transformers expects.
    """
    record: AttentionRecord = options[NAME]
    length, sliding_window = query.shape[2], options.get("sliding_window")
    queries = query[0].unflatten(0, (key.shape[1], -1))
    size = max(1, _BLOCK // (query.shape[1] * length))

    def weights(rows: Tensor) -> Tensor:
        return attention_weights(queries[:, :, rows], key[0], rows, options)

    if sliding_window is None:
        layer: Any = module.layer_idx
        record.add(int(layer), queries, key[0], map(weights, record.rows.split(size)))
    plain = all(options.get(name) is None for name in ("sliding_window", "softcap", "s_aux"))
    if plain and value.shape[-1] == key.shape[-1]:  # else sdpa holds all weights at once
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=options["scaling"], enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None
    parts = [
        (weights(rows).to(value.dtype).flatten(1, 2) @ value[0]).unflatten(1, (-1, len(rows)))
        for rows in torch.arange(length, device=query.device).split(size)
    ]
    return torch.cat(parts, 2).flatten(0, 1).transpose(0, 1)[None].contiguous(), None


def attention_weights(
    queries: Tensor,
    keys: Tensor,
    rows: Tensor,
    options: Mapping[str, Any],
    bias: Tensor | None = None,
) -> Tensor:
    """Attention weights float32 [Hkv, G, R, n] of queries [Hkv, G, R, D] at positions rows [R].

    keys [Hkv, n, D]. options: those that transformers passes to an attention function; the sinks
    (`s_aux`), one logit per query head, take weight that is not returned. bias [Hkv, R, n] is added
    to the logits.
    """
    scale, softcap = options["scaling"], options.get("softcap")
    sinks, window = options.get("s_aux"), options.get("sliding_window")
    logits = (queries.flatten(1, 2) @ keys.mT).float().unflatten(1, queries.shape[1:3]) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    distance = rows[:, None] - torch.arange(keys.shape[1], device=rows.device)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    logits = logits.masked_fill(hidden, float("-inf"))
    if bias is not None:
        logits = logits + bias[:, None]
    if sinks is not None:
        extra = sinks.float().view(*queries.shape[:2], 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat((logits, extra), -1)
    weights: Tensor = logits.softmax(-1)[..., : keys.shape[1]]
    return weights


AttentionInterface.register(NAME, attention)
