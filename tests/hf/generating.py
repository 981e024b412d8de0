"""Transformers' own generate, and a tiny Llama that every test leaves as it was."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keyhole.cache.argument import cache_argument, cache_field
from tests.checkpoints import PAD, make_config, make_network


def prompts(*lengths: int, seed: int = 0) -> dict[str, Tensor]:
    """Random prompts of these lengths, padded on the left."""
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 259, (len(lengths), max(lengths)), generator=numbers)
    there = torch.arange(max(lengths)).flip(0)[None] < torch.tensor(lengths)[:, None]
    return {"input_ids": ids.where(there, PAD), "attention_mask": there.long()}


def named(network: Any, past: Any) -> dict[str, Any]:
    """A cache as an argument of `generate` or of a forward pass; None: without one."""
    return {} if past is None else {cache_argument(network): past}


def past_of(output: Any) -> Any:
    """The cache of an output; None without one."""
    return getattr(output, cache_field(output))


def decode(network: Any, inputs: dict[str, Tensor], past: Any = None, **options: Any) -> Any:
    """What `generate` gives with its logits; greedy, 20 tokens, no end."""
    given = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False} | options
    given |= {"return_dict_in_generate": True, "output_logits": True}
    return network.generate(**inputs, **given, **named(network, past))


def assert_same(got: Any, expected: Any, tolerance: float = 1e-4) -> None:
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        assert torch.allclose(ours, theirs, atol=tolerance)


def state(network: Any) -> dict[str, Any]:
    """All that a block could have left behind."""
    modules = dict(network.named_modules())
    return {
        "config": copy.deepcopy(vars(network.config)),
        "generation": network.generation_config.to_dict(),
        "classes": {name: type(module) for name, module in modules.items()},
        "names": {name: sorted(vars(module)) for name, module in modules.items()},
        "hooks": {name: _hooks(module) for name, module in modules.items()},
    }


def _hooks(module: nn.Module) -> list[int]:
    return [len(table) for name, table in sorted(vars(module).items()) if name.endswith("_hooks")]


@functools.cache
def llama() -> Any:
    return make_network(make_config("llama"))


@pytest.fixture
def network() -> Iterator[Any]:
    """A tiny Llama; every test leaves it as it was."""
    before = state(llama())
    yield llama()
    assert state(llama()) == before


@torch.no_grad()
def forward(network: Any, inputs: dict[str, Tensor], past: Any = None, **options: Any) -> Any:
    return network(**inputs, **options, **named(network, past))
