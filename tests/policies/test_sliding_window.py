"""The newest tokens and nothing else, in a whole model."""

from __future__ import annotations

from typing import Any

import pytest

from keyhole import SlidingWindow
from tests.oracle import Array, Choice
from tests.policies.models import PROMPTS, twins
from tests.policies.recording import check_against


@pytest.mark.one_in(2)
@pytest.mark.parametrize("budget", [1, 7, 16, 40])
def test_a_whole_model_reads_the_newest_tokens(budget: int) -> None:
    def choose(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> Choice:
        length = keys.shape[1]
        newest = [i for i in range(length) if i > length - 1 - budget]
        return [newest], [newest]

    model, network = twins("llama_group3", num_hidden_layers=4)
    assert check_against(choose, model, network, SlidingWindow(token_budget=budget), PROMPTS)
