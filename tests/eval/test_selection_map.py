"""Selection maps are what the policies say they read, token by token and step by step."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from keyhole import Full, Quest, StreamingLLM
from keyhole.errors import ConfigError
from keyhole.eval.policy_trace import (
    Read,
    Recorded,
    SelectionMap,
    Trace,
    TracedStep,
    selection_map,
)
from keyhole.models.model import Model
from tests.eval.measured import record

TOKENS, STEPS = 61, 11
PROMPT: Any = {"prompt_token_ids": [3 + 37 * i % 251 for i in range(TOKENS)]}


def recorded(model: Model, policy: Any) -> Recorded:
    return record(model, policy, PROMPT, max_tokens=STEPS + 1, page_size=4)


def test_full_attention_reads_everything(model: Model) -> None:
    found = selection_map(recorded(model, Full()), layer=2)
    assert (found.tokens_per_column, found.steps_per_row) == (1, 1)
    assert (found.prompt_tokens, found.steps, found.tokens) == (TOKENS, STEPS, TOKENS + STEPS)
    for step, row in enumerate(found.shares.tolist()):
        there = TOKENS + 1 + step
        assert row == [255] * there + [0] * (TOKENS + STEPS - there)


@pytest.mark.parametrize("layer", [0, 3])
def test_streaming_llm_reads_sinks_and_a_window(model: Model, layer: int) -> None:
    policy = StreamingLLM(token_budget=23, sink_size=3)
    found = selection_map(recorded(model, policy), layer=layer)
    for step, row in enumerate(found.shares.tolist()):
        there = TOKENS + 1 + step
        read = {0, 1, 2, *range(there - 20, there)}
        assert row == [255 if token in read else 0 for token in range(TOKENS + STEPS)]


def test_a_token_that_one_of_two_kv_heads_reads_counts_half(model: Model) -> None:
    answer = recorded(model, Quest(token_budget=16, full_layers=(0,)))
    found = selection_map(answer, layer=2).shares
    assert set(np.unique(found)) == {0, 128, 255}
    for row, step in zip(found, answer.trace.steps, strict=True):
        one, other = step.tokens(2)
        np.testing.assert_array_equal(row[: len(one)] == 128, one != other)
        np.testing.assert_array_equal(row[: len(one)] == 255, one & other)


def test_long_texts_put_neighbours_together() -> None:
    """2,000 tokens and 130 steps; step s reads token 0 and the newest one."""
    prompt, steps = 2000, 130
    trace = Trace(
        [
            TracedStep(
                np.array([prompt + 1 + step]), 16, {0: Read(np.array([[[0, prompt + step]]]), 1)}
            )
            for step in range(steps)
        ]
    )
    found = selection_map(Recorded(trace, prompt), layer=0)
    assert (found.tokens_per_column, found.steps_per_row) == (5, 3)
    assert found.shares.shape == (44, 426)
    assert found.shares[:, 0].tolist() == [round(255 / 5)] * 44
    # Row 1 is steps 3 to 5, with 2,004 to 2,006 tokens: token 2,003 is the only one read of the
    # four, then five, then five of its column; 2,005 is the only one of its own.
    assert found.shares[1, 400] == round(255 * 2 / 14)
    assert found.shares[1, 401] == 255
    assert found.shares[1, 1:400].max() == 0
    assert len(json.dumps(found.to_json())) < 1500


def test_a_map_survives_being_stored(model: Model) -> None:
    answer = recorded(model, Quest(token_budget=16, full_layers=(0,)))
    found = selection_map(answer, layer=3, marks=[5, 40])
    again = SelectionMap.from_json(json.loads(json.dumps(found.to_json())))
    np.testing.assert_array_equal(again.shares, found.shares)
    for name in ("prompt_tokens", "steps", "layer", "marks", "tokens", "subject"):
        assert getattr(again, name) == getattr(found, name)
    assert again.subject == "layer 3"


@pytest.mark.parametrize(
    "change", [{"shares": "!"}, {"shares": ""}, {"steps": 3}, {"steps": None}, {"steps_per_row": 0}]
)
def test_what_is_no_map_is_refused(change: dict[str, Any]) -> None:
    shares = np.zeros((2, 6), np.uint8)
    stored = SelectionMap(shares=shares, layer=0, prompt_tokens=4, steps=2).to_json()
    assert SelectionMap.from_json(stored).shares.shape == (2, 6)
    with pytest.raises(ConfigError, match="not a stored selection map"):
        SelectionMap.from_json(stored | change)


def test_missing_data_is_an_error(model: Model) -> None:
    answer = recorded(model, Quest(token_budget=16, full_layers=(0,)))
    with pytest.raises(ConfigError, match="layer is 9"):
        selection_map(answer, layer=9)
