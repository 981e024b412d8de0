"""The random twin: the same shapes, other numbers, and the model as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from keyhole.eval.attention.suite import random_twin
from keyhole.models.loading import load
from keyhole.models.model import Model
from tests.checkpoints import make_model


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_the_twin_has_the_shapes_and_nothing_else(kind: str, tmp_path: Path) -> None:
    # The twin draws from seed 0, as checkpoints of tests do.
    model = load(make_model(kind, tmp_path, tokenizer=True, seed=1), "cpu")
    before = {name: x.clone() for name, x in model.network.named_parameters()}
    state = torch.random.get_rng_state()
    with random_twin(model) as twin, random_twin(model) as other:
        own = dict(twin.network.named_parameters())
        assert {name: x.shape for name, x in own.items()} == {
            name: x.shape for name, x in before.items()
        }
        assert all(torch.equal(x, y) for x, y in pairs(twin, other))
        drawn = [name for name, x in own.items() if x.dim() > 1 and "bias" not in name]
        assert drawn
        assert not any(torch.equal(own[name], before[name]) for name in drawn)
        assert twin.tokenizer is model.tokenizer
        assert twin.geometry(4) == model.geometry(4)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(before[name], x) for name, x in model.network.named_parameters())


def pairs(one: Model, other: Model) -> zip[tuple[torch.Tensor, torch.Tensor]]:
    return zip(one.network.parameters(), other.network.parameters(), strict=True)
