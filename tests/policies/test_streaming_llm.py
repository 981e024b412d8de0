"""Sinks and the newest tokens, in a whole model."""

from __future__ import annotations

from typing import Any

import pytest

from keyhole import ConfigError, StreamingLLM
from tests.oracle import Array, Choice
from tests.policies.models import PROMPTS, twins
from tests.policies.recording import check_against, make_engine


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("budget", "sinks"), [(5, 4), (12, 4), (12, 0), (16, 1), (40, 9)])
def test_a_whole_model_reads_sinks_and_the_newest(budget: int, sinks: int) -> None:
    def choose(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> Choice:
        length = keys.shape[1]
        first_of_window = length - (budget - sinks)
        read = [i for i in range(length) if i < sinks or i >= first_of_window]
        return [read], [read]

    policy = StreamingLLM(token_budget=budget, sink_size=sinks)
    model, network = twins("llama_group3", num_hidden_layers=4)
    assert check_against(choose, model, network, policy, PROMPTS)


def test_four_sinks_unless_said() -> None:
    assert StreamingLLM().sink_size == 4


@pytest.mark.parametrize(
    ("budget", "sinks", "named"),
    [(4, 4, "token_budget"), (3, 4, "token_budget"), (9, -1, "sink_size"), (9, "x", "sink_size")],
)
def test_sinks_that_leave_no_window_are_refused(budget: int, sinks: int, named: str) -> None:
    model, _ = twins("llama", num_hidden_layers=1)
    with pytest.raises(ConfigError, match=named):
        make_engine(model, StreamingLLM(token_budget=budget, sink_size=sinks))
