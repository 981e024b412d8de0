"""The target model's shape as a retrieval head needs it, and whether the two match."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.cache.layout import head_dim, kv_heads
from keyhole.errors import ModelError
from keyhole.retrieval.config import HeadConfig

#: Positions of Bloom, which names no longest sequence.
_ALIBI_LENGTH = 65536
# Numbers of each parameter that go into the digest: all weights of an 8B model would take a minute,
# and two trainings of one model agree nowhere.
_SAMPLES = 64


@dataclass(frozen=True, kw_only=True)
class Target:
    """The shape of a target model and its embedding [vocabulary or more, hidden_size].

    The embedding is the model's own memory, without gradients: no copy.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    rope_theta: float
    embedding: Tensor

    @classmethod
    def of(cls, network: nn.Module) -> Target:
        """Reads it from a network of transformers."""
        config: Any = network.config
        embed: Any = network.get_input_embeddings()  # type: ignore[operator]
        length = getattr(config, "max_seq_len", _ALIBI_LENGTH)  # MPT's field
        ropes = getattr(config, "rope_parameters", None) or {}
        return cls(
            vocab_size=int(config.vocab_size),
            hidden_size=int(config.hidden_size),
            num_layers=int(config.num_hidden_layers),
            num_heads=int(config.num_attention_heads),
            num_kv_heads=kv_heads(config),
            head_dim=head_dim(config),
            max_length=int(getattr(config, "max_position_embeddings", length)),
            rope_theta=float(ropes.get("rope_theta") or 10000.0),  # Llama's default
            embedding=embed.weight.detach(),
        )

    def embeds_as(self, table: Tensor) -> bool:
        """Whether the model's embedding has the same numbers as the rows of `table`."""
        own = self.embedding[: len(table)]
        return own.shape == table.shape and torch.equal(own, table.to(own.device, own.dtype))

    def check_fits(self, head: HeadConfig, name: str) -> None:
        """ModelError, with both values, unless the head `name` was made for such a target."""
        if head.uses_features and head.feature_size != self.hidden_size:
            raise ModelError(
                f"head {name!r} reads features of hidden size {head.feature_size}, but the target "
                f"has hidden size {self.hidden_size}"
            )
        width = int(self.embedding.shape[-1])
        if not head.own_embedding and head.hidden_size != width:
            raise ModelError(
                f"head {name!r} has hidden size {head.hidden_size} and no embed_tokens of its own, "
                f"but the target's embedding has size {width}"
            )
        if head.vocab_size != self.vocab_size:
            raise ModelError(
                f"head {name!r} was made for a vocabulary of {head.vocab_size} tokens, but the "
                f"target has {self.vocab_size}"
            )
        for kind, count in (("query", self.num_heads), ("KV", self.num_kv_heads)):
            if head.num_heads % count and count % head.num_heads:
                raise ModelError(
                    f"head {name!r} has {head.num_heads} query heads and the target {count} "
                    f"{kind} heads; one number must be a multiple of the other"
                )
        if any(layer >= self.num_layers for layer in head.feature_layers):
            raise ModelError(
                f"head {name!r} reads the inputs of layers {head.feature_layers}, but the target "
                f"has {self.num_layers} layers"
            )


def feature_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs EAGLE-3 reads in a model of this depth: low, middle, high.

    (2, n // 2, n - 3), as in vLLM if a draft's config names none. Some of them coincide in models
    with fewer than 7 layers.
    """
    return (2, num_layers // 2, num_layers - 3)


def distinct_feature_layers(num_layers: int) -> tuple[int, ...]:
    """The same layers, spread out if they would coincide: for heads that are not pruned from a
    draft.
    """
    layers = feature_layers(num_layers)
    if num_layers < 7:
        layers = (min(1, num_layers - 1), num_layers // 2, num_layers - 1)
    return tuple(sorted(set(layers)))


def weights_digest(network: nn.Module) -> str:
    """A digest of names, shapes and some numbers of every parameter and every stored buffer.

    Quantised weights are buffers.
    """
    found = hashlib.sha256()
    buffers = {
        name: value
        for name, value in network.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    }
    tensors = dict(network.named_parameters()) | buffers
    for name, parameter in sorted(tensors.items()):
        flat = parameter.detach().flatten()
        step = max(1, len(flat) // _SAMPLES)
        numbers = flat[::step][:_SAMPLES].float().cpu().numpy().tobytes()
        found.update(f"{name}{tuple(parameter.shape)}".encode() + numbers)
    return found.hexdigest()[:16]
