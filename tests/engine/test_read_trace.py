"""The reads of a traced request are those of its policy, layer by layer; others cost nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
    TidalDecode,
)
from keyhole.engine import read_trace
from keyhole.eval.policy_trace import Traced
from keyhole.models import attention
from keyhole.models.model import Model
from keyhole.policies.base import Policy, Selection
from tests.checkpoints import make_model

PAGE, LENGTH, NEW = 4, 61, 12
PROMPT: Any = {"prompt_token_ids": [3 + 37 * i % 251 for i in range(LENGTH)]}
PARAMS = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
TRACED = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, trace=True)
POLICIES = [
    Full(),
    SlidingWindow(token_budget=21),
    StreamingLLM(token_budget=23, sink_size=3),
    Quest(token_budget=16, full_layers=(0,)),
    Quest(token_budget=16, full_layers=(0,), share_group=False),
    TidalDecode(token_budget=16, full_layers=(0,), selection_layers=(1,)),
    RaaS(token_budget=68, alpha=0.999, prompt_in_budget=True),
    Delta(token_budget=16, full_layers=(0,), delta_layers=(1,)),
]


def named(policy: Policy) -> str:
    return policy.name


def run(model: Model, policy: Policy, params: SamplingParams = TRACED) -> Result:
    return LLM(model, policy=policy, page_size=PAGE).generate(PROMPT, params)


def shares(result: Result, layer: int) -> list[np.ndarray]:
    assert result.reads is not None
    return [read.shares(layer) for read in result.reads]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=named)
def test_every_token_has_its_reads_and_is_the_same_without(model: Model, policy: Policy) -> None:
    result = run(model, policy)
    assert result.reads is not None
    assert [read.length for read in result.reads] == list(range(LENGTH, LENGTH + NEW))
    plain = run(model, policy, PARAMS)
    assert plain.reads is None
    assert plain.token_ids == result.token_ids
    assert plain.stats.kv_bytes_read == result.stats.kv_bytes_read


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=named)
def test_reads_are_those_that_the_policy_selected(model: Model, policy: Policy) -> None:
    """Against a record that looks on at the policy's own hooks, outside of the engine."""
    wrapped = Traced(policy)
    run(model, wrapped, PARAMS)
    result = run(model, policy)
    for layer in range(4):
        found = shares(result, layer)
        assert (found[0] == 1).all()  # a prompt is computed exactly
        for share, step in zip(found[1:], wrapped.trace.steps, strict=True):
            assert np.array_equal(share, step.tokens(layer).mean(0))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=named)
def test_reads_add_up_to_the_counters(model: Model, policy: Policy) -> None:
    result = run(model, policy)
    read = [share.mean() for layer in range(4) for share in shares(result, layer)[1:]]
    assert np.mean(read) == pytest.approx(result.stats.attended_fraction)


@pytest.mark.slow
def test_known_positions_of_windows_and_sinks(model: Model) -> None:
    for layer in range(4):
        for share in shares(run(model, SlidingWindow(token_budget=21)), layer)[1:]:
            assert np.flatnonzero(share).tolist() == list(range(len(share) - 21, len(share)))
        for share in shares(run(model, StreamingLLM(token_budget=23, sink_size=3)), layer)[1:]:
            recent = range(len(share) - 20, len(share))
            assert np.flatnonzero(share).tolist() == [0, 1, 2, *recent]


def test_layers_that_read_the_same_share_an_entry(model: Model) -> None:
    result = run(model, POLICIES[-1])
    assert result.reads is not None
    assert all(read.layers == (0, 0, 1, 1) for read in result.reads[1:])
    assert run(model, Full()).reads[-1].ranges[0].tolist() == [[0, LENGTH + NEW - 1, 1]]  # type: ignore[index]


def test_layers_with_a_window_of_their_own_read_it(tmp_path: Path) -> None:
    llm = LLM(make_model("mistral_sliding", tmp_path), page_size=PAGE)
    result = llm.generate(PROMPT, TRACED)
    for layer in range(llm.engine.geometry.num_layers):
        for share in shares(result, layer):
            assert np.flatnonzero(share).tolist() == list(range(len(share) - 8, len(share)))


def test_the_first_token_has_the_blocks_of_its_prompt(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a prefill policy everything was said to be read."""
    real, chosen = attention.kernels.block_sparse_prefill, []

    def noted(*given: Any, blocks: Selection, **options: Any) -> Any:
        chosen.append(blocks.indices[-1].tolist())
        return real(*given, blocks=blocks, **options)

    monkeypatch.setattr(attention.kernels, "block_sparse_prefill", noted)
    sparse = "xattention:block_size=8,stride=4,min_length=0,mass=0.3"
    result = LLM(model, page_size=PAGE, prefill_policy=sparse).generate(PROMPT, TRACED)
    assert len(chosen) == 4
    for layer, heads in enumerate(chosen):
        wanted = np.mean([[i // 8 in head for i in range(LENGTH)] for head in heads], 0)
        assert wanted.min() == 0.0
        assert np.allclose(shares(result, layer)[0], wanted)


@pytest.mark.slow
def test_what_a_document_dropped_is_not_read(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path, tokenizer=True, num_hidden_layers=4, vocab_size=300)
    llm = LLM(path, documents=tmp_path / "documents")
    for name in "ab":
        llm.documents.add(name, f"document {name} " * 20)
    result = llm.ask("which one?", ["a", "b"], params=TRACED)
    assert result.reused is not None
    assert result.reads is not None
    kept = result.reused.kept.numpy()
    assert not kept.all()
    for read in result.reads:
        for layer in range(4):
            stored = kept[layer]
            before = read.shares(layer)[1 : len(stored) + 1]  # after the BOS
            assert np.array_equal(before, stored)
            assert (read.shares(layer)[len(stored) + 1 :] == 1).all()


def test_streams_hand_out_reads_with_their_tokens(model: Model) -> None:
    llm = LLM(model, policy=POLICIES[1], page_size=PAGE)
    pieces = list(llm.stream(PROMPT, TRACED))
    assert pieces[0].prompt_token_ids == PROMPT["prompt_token_ids"]
    assert all(piece.prompt_token_ids is None for piece in pieces[1:])
    reads = [read for piece in pieces for read in piece.reads or ()]
    assert [read.length for read in reads] == list(range(LENGTH, LENGTH + NEW))
    assert pieces[3].stats is not None
    assert pieces[3].stats.generated_tokens == 4
    plain = list(llm.stream(PROMPT, PARAMS))
    assert all((piece.reads, piece.stats) == (None, None) for piece in plain)


def test_a_trace_ends_when_it_is_full(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_trace, "MOST_RANGES", 5)
    result = run(model, Full())
    assert result.reads is not None
    assert len(result.reads) == 5  # one range each
    assert len(result.token_ids) == NEW


def test_a_request_beside_a_traced_one_keeps_nothing(model: Model) -> None:
    llm = LLM(model, policy=POLICIES[-1], page_size=PAGE)
    traced, plain = llm.generate([PROMPT, PROMPT], [TRACED, PARAMS])
    assert traced.reads is not None
    assert plain.reads is None
    assert traced.token_ids == plain.token_ids
