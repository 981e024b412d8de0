"""transformers' own attention and caches as systems of the decode benchmark, over our weights.

Systems with the same kind of cache share one. `DynamicCache`, a user's default, copies itself at
every step; what a step has added is taken back after it, so that every step has the same past.
`StaticCache` writes in place and reads all of its room under a mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from keyhole.bench.model import Numbers, Weights, without_copying_weights
from keyhole.bench.settings import PAGE_SIZE, PEERS
from keyhole.models.loading import Model


class Past:
    """A cache of transformers. steps: the most that are added to a static one."""

    def __init__(self, kind: str, model: Model, context: int, steps: int) -> None:
        self.static = kind == "static"
        self._config = model.network.config
        self._length = context + steps if self.static else context
        self.cache: Any = (
            StaticCache(config=self._config, max_cache_len=self._length)
            if self.static
            else DynamicCache(config=self._config)
        )

    def fill(self, numbers: Numbers) -> None:
        """Stores keys and values of all prompts."""
        for layer in range(numbers.num_layers):
            keys, values = (
                torch.stack([draw(layer, sequence) for sequence in range(numbers.batch)])
                for draw in (numbers.keys, numbers.values)
            )
            self.cache.update(keys, values, layer)

    def take_back(self, tokens: int) -> None:
        """Forgets the newest tokens, if they are copied away at each step anyway."""
        if not self.static:
            self.cache.crop(-tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(2 * layer.keys.nbytes for layer in self.cache.layers)


class Peer:
    """One way of attention in transformers, over a cache that is filled already."""

    def __init__(self, name: str, weights: Weights, past: Past, context: int) -> None:
        self.name = name
        self._network = without_copying_weights(weights.theirs)
        self._network.set_attn_implementation(PEERS[name][0])
        self._past = past
        self._token_bytes = weights.ours.geometry(PAGE_SIZE).token_bytes
        self._device = weights.ours.device
        self._context = context
        self._next = torch.empty(0)

    def logits(self, prompts: list[list[int]], given: list[int]) -> Tensor:
        """As `Ours.logits`."""
        tokens = [[prompt[-1], *given] for prompt in prompts]
        rows = [self._forward(torch.tensor(column)) for column in zip(*tokens, strict=True)]
        self._past.take_back(len(rows))
        return torch.stack(rows, 1).float().cpu()

    def start(self, prompts: list[list[int]], steps: int) -> None:
        """Sets the token that the next step begins with."""
        self._next = torch.tensor([prompt[-1] for prompt in prompts])

    def step(self) -> None:
        """One token for every sequence, greedy."""
        self._next = self._forward(self._next).argmax(-1)

    def rest(self) -> None:
        """Takes the step back."""
        self._past.take_back(1)

    def cost(self) -> dict[str, Any]:
        """What one step must read; copies, and the room of a static cache, come on top."""
        return {
            "policy": None,
            "kv_bytes": float(len(self._next) * (self._context + 1) * self._token_bytes),
            "other_bytes": 0.0,
            "attended_fraction": 1.0,
        }

    @torch.no_grad()
    def _forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.to(self._device)[:, None]
        out = self._network(input_ids=tokens, past_key_values=self._past.cache, use_cache=True)
        logits: Tensor = out.logits[:, -1]
        return logits
