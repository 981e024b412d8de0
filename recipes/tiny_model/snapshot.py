"""Snapshots of a run, written beside the old one and renamed, so that one is always whole."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from recipes.tiny_model.optimizers import Optimizers
from recipes.tiny_model.schedule import Schedule
from recipes.tiny_model.shape import llama_config

FILE = "training.pt"


def save(
    folder: Path,
    weights: dict[str, Tensor],
    optimizers: Optimizers,
    *,
    step: int,
    tokens: int,
    seed: int,
    schedule: Schedule,
    rope_theta: float,
) -> None:
    """Write everything that the next step depends on."""
    new = folder / f"{FILE}.new"
    torch.save(
        {
            "weights": {name: weight.detach() for name, weight in weights.items()},
            "optimizers": optimizers.state(),
            "step": step,
            "tokens": tokens,
            "seed": seed,
            "schedule": asdict(schedule),
            "rope_theta": rope_theta,
        },
        new,
    )
    new.replace(folder / FILE)


def load(folder: Path) -> dict[str, Any]:
    """Read what `save` wrote, onto the CPU."""
    state: dict[str, Any] = torch.load(folder / FILE, map_location="cpu", weights_only=True)
    return state


def config_of(state: dict[str, Any]) -> LlamaConfig:
    """Give the configuration of the model in a snapshot."""
    return llama_config(num_layers(state["weights"]), rope_theta=state["rope_theta"])


def num_layers(weights: dict[str, Tensor]) -> int:
    """Count the layers that parameters belong to."""
    return sum(name.endswith("input_layernorm.weight") for name in weights)
