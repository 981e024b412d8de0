"""The control that selects perfectly, in a whole model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from keyhole import ConfigError
from keyhole.policies.controls import Oracle
from tests.oracle import Array, Choice
from tests.policies.models import PROMPTS, twins
from tests.policies.recording import check_against, make_engine


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["llama_group3", "llama_mha", "llama_mqa"])
@pytest.mark.parametrize(("budget", "dense"), [(1, ()), (6, (0,)), (12, (0, 2))])
def test_a_whole_model_reads_the_tokens_of_largest_weight(
    kind: str, budget: int, dense: tuple[int, ...]
) -> None:
    def choose(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> Choice:
        if layer in dense:
            return None
        group, newest = len(query) // len(keys), keys.shape[1] - 1
        read = []
        for head, own in enumerate(keys):
            scores = options["scale"] * query[head * group : (head + 1) * group] @ own.T
            weights = np.exp(scores - scores.max(1, keepdims=True))
            best = (weights / weights.sum(1, keepdims=True)).max(0)
            others = sorted(range(newest), key=lambda i: (-best[i], i))[: budget - 1]
            read.append(sorted([*others, newest]))
        return read, read

    model, network = twins(kind, num_hidden_layers=4)
    policy = Oracle(token_budget=budget, full_layers=dense)
    assert check_against(choose, model, network, policy, PROMPTS)


def test_its_layers_stay_in_memory() -> None:
    model, _ = twins("llama", num_hidden_layers=4)
    assert Oracle().offloadable(model.geometry(4)) == ()


def test_a_budget_of_nothing_is_refused() -> None:
    model, _ = twins("llama", num_hidden_layers=1)
    with pytest.raises(ConfigError, match="token_budget"):
        make_engine(model, Oracle(token_budget=0))
