"""A traced policy behaves as the policy inside, and its record is what the engine read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from keyhole import (
    LLM,
    Delta,
    Full,
    Quest,
    RaaS,
    Result,
    SamplingParams,
    SlidingWindow,
    StreamingLLM,
)
from keyhole.eval.policy_trace import Trace, Traced
from keyhole.models.model import Model
from keyhole.policies.base import Policy

PAGE = 4
PROMPT: Any = {"prompt_token_ids": [3 + 37 * i % 251 for i in range(61)]}
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
POLICIES = [
    Full(),
    SlidingWindow(token_budget=21),
    StreamingLLM(token_budget=23, sink_size=3),
    Quest(token_budget=16, full_layers=(0,)),
    RaaS(token_budget=68, prompt_in_budget=True),
    Delta(token_budget=16, full_layers=(0,), delta_layers=(1,)),
]


def run(model: Model, policy: Policy) -> Result:
    return LLM(model, policy=policy, page_size=PAGE).generate(PROMPT, PARAMS)


def traced(model: Model, policy: Policy) -> tuple[Trace, Result]:
    wrapped = Traced(policy)
    result = run(model, wrapped)
    return wrapped.trace, result


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_tracing_changes_nothing(model: Model, policy: Policy) -> None:
    plain, (_, result) = run(model, policy), traced(model, policy)
    assert result.token_ids == plain.token_ids
    assert result.logprobs == plain.logprobs
    assert result.stats.kv_bytes_read == plain.stats.kv_bytes_read
    assert result.stats.other_bytes_read == plain.stats.other_bytes_read
    wrapped = Traced(policy)
    assert (wrapped.name, wrapped.dense) == (policy.name, policy.dense)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_the_record_agrees_with_the_counters(model: Model, policy: Policy) -> None:
    trace, result = traced(model, policy)
    assert trace.layers == [0, 1, 2, 3]
    assert len(trace.steps) == PARAMS.max_tokens - 1
    shares = [step.tokens(layer).mean() for step in trace.steps for layer in trace.layers]
    assert np.mean(shares) == pytest.approx(result.stats.attended_fraction)
    assert all(step.tokens(layer)[:, -1].all() for step in trace.steps for layer in trace.layers)


def test_layers_after_a_delta_layer_read_its_choice(model: Model) -> None:
    trace, _ = traced(model, POLICIES[-1])
    for step in trace.steps:
        assert step.reads[0] is None
        assert step.reads[1] is None
        read = step.reads[2]
        assert read is not None
        assert read.unit == PAGE
        assert read.indices.shape == (1, 1, 4)
        assert np.array_equal(step.tokens(2), step.tokens(3))


def test_a_page_that_is_not_there_yet_is_nan(model: Model) -> None:
    trace, _ = traced(model, Full())
    shares = trace.pages_read(layer=2)
    assert shares.shape == (18, 11)
    lengths = [61 + 1 + step for step in range(11)]
    for column, length in zip(shares.T, lengths, strict=True):
        pages = -(-length // PAGE)
        assert (column[:pages] == 1).all()
        assert np.isnan(column[pages:]).all()


def test_pages_count_by_the_share_of_their_tokens_and_heads(model: Model) -> None:
    trace, _ = traced(model, SlidingWindow(token_budget=6))
    # 62 tokens, of which positions 56 .. 61 are read: all of page 14, and the 2 tokens of page 15.
    assert trace.pages_read(0)[13:16, 0].tolist() == [0, 1, 1]
    # 64 tokens: 58 .. 63, half of page 14.
    assert trace.pages_read(0)[13:16, 2].tolist() == [0, 0.5, 1]


def test_what_was_evicted_is_not_read(model: Model) -> None:
    """16 pages of the prompt stay, and of pages that nobody looks at for long the newest."""
    trace, _ = traced(model, RaaS(token_budget=68, alpha=0.999, prompt_in_budget=True))
    last = trace.steps[-1]
    assert last.lengths.tolist() == [72]
    for layer in trace.layers:
        assert np.flatnonzero(~last.tokens(layer)[0]).tolist() == [64, 65, 66, 67]


class Pages:
    """Chooses some of what is left, as a policy that evicts might."""

    unit = PAGE
    indices = torch.tensor([[[0, 2, -1], [1, 2, 3]]], dtype=torch.int32)


class Tokens:
    unit = 1
    indices = torch.tensor([[[1, 8, 15, -1]]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("chosen", "wanted"), [(Pages, [[0, 7, -1], [5, 7, 9]]), (Tokens, [[1, 28, 39, -1]])]
)
def test_a_choice_of_what_is_left_is_placed_in_the_text(chosen: Any, wanted: Any) -> None:
    left = SimpleNamespace(entries=np.asarray([[0, 5, 7, 9, -1]]), kept_tokens=None)
    step: Any = SimpleNamespace(retained=left, kept_tokens=None, page_size=PAGE)
    read = Trace().read(0, chosen, step)
    assert read is not None
    assert read.unit == chosen.unit
    assert read.indices.tolist() == [wanted]


def test_only_the_layers_that_are_wanted_are_kept(model: Model) -> None:
    wrapped = Traced(POLICIES[-1], Trace(only=frozenset({1, 3})))
    run(model, wrapped)
    whole = traced(model, POLICIES[-1])[0]
    assert wrapped.trace.layers == [1, 3]
    for step, other in zip(wrapped.trace.steps, whole.steps, strict=True):
        assert np.array_equal(step.tokens(3), other.tokens(3))
