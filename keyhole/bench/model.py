"""A model of a given shape with random weights, and the numbers that its caches are filled with."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from keyhole.bench import measure
from keyhole.bench.settings import PAGE_SIZE, SHAPES, DecodeSettings
from keyhole.models import families
from keyhole.models.attention import NAME
from keyhole.models.fast_layers import speed_up
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
    """A model of that shape with random weights, made in place."""
    fields = {"model_type": "llama"} | SHAPES[settings.shape]
    if settings.layers is not None:
        fields["num_hidden_layers"] = settings.layers
    longest = max(settings.contexts) + _SPARE_POSITIONS
    config = AutoConfig.for_model(**fields, max_position_embeddings=longest)
    device = measure.device(settings.device)
    dtype = getattr(torch, settings.dtype)
    torch.manual_seed(0)
    # Drawn below, where a bar shows how far that is: a minute for larger shapes.
    with device, no_init_weights():
        network = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    network.tie_weights()  # which goes with initialising them
    _draw_weights(network.eval(), config.initializer_range)
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


@torch.no_grad()
def _draw_weights(network: Any, std: float) -> None:
    """Random matrices, and ones for norms, as transformers initialises a Llama."""
    parameters = list(network.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    with tqdm(total=total, desc="weights", unit_scale=True, leave=False, disable=None) as bar:
        for parameter in parameters:
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=std)
            bar.update(parameter.numel())


def without_copying_weights(network: Any) -> Any:
    """Another network with the same weights in it."""
    return copy.deepcopy(network, {id(weight): weight for weight in network.parameters()})


class RandomKV:
    """The keys and values that every cache is filled with, drawn again whenever they are asked for.

    A cache of another layout, or in another process, takes them in the order that suits it; no
    more than what is asked for is in memory.
    """

    def __init__(self, model: Model, batch: int, context: int) -> None:
        layout, *_ = layers = model.geometry(PAGE_SIZE).layers
        self.batch, self.context = batch, context
        self.num_layers, self.num_kv_heads = len(layers), layout.num_kv_heads
        self.head_dim = layout.key_dim
        self.device = model.device
        self._like = torch.empty(0, dtype=model.dtype, device=model.device)
        self._bar: Any = None
        size = (self.num_layers, batch, 2)
        generator = torch.Generator().manual_seed(context)
        self._seeds = torch.randint(2**31, size, generator=generator).tolist()

    def keys(self, layer: int, sequence: int) -> Tensor:
        """[Hkv, N, D] of one sequence."""
        return self._draw(layer, sequence, 0).mul_(_KEY_SCALE)

    def values(self, layer: int, sequence: int) -> Tensor:
        """[Hkv, N, D] of one sequence."""
        return self._draw(layer, sequence, 1)

    @contextmanager
    def filling(self, caches: int) -> Iterator[None]:
        """Shows how far it is, while so many caches are filled with all of them."""
        total = caches * 2 * self.num_layers * self.batch
        with tqdm(total=total, desc="fill caches", leave=False, disable=None) as self._bar:
            yield
        self._bar = None

    def _draw(self, layer: int, sequence: int, kind: int) -> Tensor:
        generator = torch.Generator(self._like.device).manual_seed(
            self._seeds[layer][sequence][kind]
        )
        size = (self.num_kv_heads, self.context, self.head_dim)
        drawn = self._like.new_empty(size).normal_(generator=generator)
        if self._bar is not None:
            self._bar.update()
        return drawn


def prompts(model: Model, batch: int, context: int, more: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of context + 1 tokens, and `more` tokens that may follow each of them."""
    generator = torch.Generator().manual_seed(context)
    tokens = torch.randint(model.vocab_size, (batch, context + 1), generator=generator)
    given = torch.randint(model.vocab_size, (more,), generator=generator)
    return tokens.tolist(), given.tolist()
