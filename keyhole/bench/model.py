"""A model of a given shape with random weights, and the numbers that its caches are filled with."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from keyhole.bench import measure
from keyhole.bench.settings import PAGE_SIZE, DecodeSettings
from keyhole.bench.shapes import SHAPES
from keyhole.models import families
from keyhole.models.attention import NAME
from keyhole.models.linear import speed_up
from keyhole.models.loading import Model

# Keys this wide make attention peaked, so that a wrong page changes the logits visibly.
_KEY_SCALE = 3.0
# Positions beyond the longest context: for the tokens that the benchmark adds.
_SPARE_POSITIONS = 1024


@dataclass(frozen=True)
class Weights:
    """The same weights in two networks: as Keyhole uses them, and as transformers does."""

    ours: Model
    theirs: Any


def make_weights(settings: DecodeSettings) -> Weights:
    """A Llama with random weights, made in place."""
    fields = dict(SHAPES[settings.shape])
    if settings.layers is not None:
        fields["num_hidden_layers"] = settings.layers
    longest = max(settings.contexts) + _SPARE_POSITIONS
    config = LlamaConfig(**fields, max_position_embeddings=longest)
    device = measure.device(settings.device)
    dtype = getattr(torch, settings.dtype)
    torch.manual_seed(0)
    with device:
        network = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    network.eval()
    theirs = without_copying_weights(network)
    speed_up(network, device)
    length, reason = families.max_length(config)
    ours = Model(
        name=settings.shape,
        network=network,
        tokenizer=None,
        device=device,
        dtype=dtype,
        max_length=length,
        length_reason=reason,
        eos_token_ids=frozenset(),
        defaults={},
    )
    return Weights(ours, theirs)


def without_copying_weights(network: Any) -> Any:
    """Another network with the same weights in it."""
    return copy.deepcopy(network, {id(weight): weight for weight in network.parameters()})


def keys_and_values(model: Model, batch: int, context: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Layer by layer: its number, keys and values [B, Hkv, N, D]; always the same ones."""
    generator = torch.Generator(model.device).manual_seed(context)
    for layer, layout in enumerate(model.geometry(PAGE_SIZE).layers):
        size = (batch, layout.num_kv_heads, context, layout.key_dim)
        keys, values = (
            torch.randn(size, generator=generator, dtype=model.dtype, device=model.device)
            for _ in range(2)
        )
        yield layer, keys.mul_(_KEY_SCALE), values


def prompts(model: Model, batch: int, context: int, more: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of context + 1 tokens, and `more` tokens that may follow each of them."""
    generator = torch.Generator().manual_seed(context)
    tokens = torch.randint(model.vocab_size, (batch, context + 1), generator=generator)
    given = torch.randint(model.vocab_size, (more,), generator=generator)
    return tokens.tolist(), given.tolist()
