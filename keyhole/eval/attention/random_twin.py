"""The random twin of a model: the same architecture with the weights that training begins with.

It has learnt nothing, so whatever its attention shows comes from shapes, positions and chance. A
difference between methods that the twin shows as well says nothing about what a model has learnt.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM

from keyhole.models.attention import NAME
from keyhole.models.fast_layers import speed_up
from keyhole.models.loading import Model

SEED = 0


@contextmanager
def random_twin(model: Model) -> Iterator[Model]:
    """A model of the same config, initialised as transformers does; on the same device.

    It has the model's tokenizer and calibrations; a retrieval head would be another model's. On a
    GPU the model itself is in the memory of the host meanwhile: the two need not fit side by side.
    """
    moved = model.device.type == "cuda"
    if moved:
        model.network.to("cpu")
        torch.cuda.empty_cache()
    try:
        yield _make(model)
    finally:
        if moved:
            torch.cuda.empty_cache()
            model.network.to(model.device)


def _make(model: Model) -> Model:
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(model.device):
        torch.manual_seed(SEED)
        network = AutoModelForCausalLM.from_config(
            copy.deepcopy(model.network.config), attn_implementation=NAME, dtype=model.dtype
        )
    network = network.to(model.device).eval()
    speed_up(network, model.device)
    return dataclasses.replace(model, network=network, watched={})
