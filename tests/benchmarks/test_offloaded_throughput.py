"""Whole answers with offloaded layers: as many as fit, few misses, the same logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.paper import throughput
from benchmarks.paper.offloaded_throughput import OffloadedSystem, SteadyHead
from benchmarks.paper.settings import ThroughputSettings
from keyhole.bench import measure, model
from keyhole.bench import model as bench_model
from keyhole.bench.decode import DisagreementError
from keyhole.bench.model import RESERVE_BYTES
from keyhole.bench.settings import DecodeSettings
from keyhole.retrieval.head import group_weights

NAME = "spe_context_below"
TOKEN_BYTES = 2 * 4 * 2 * 16 * 2  # keys and values, layers, heads, numbers, bytes of each
TEXT_BYTES = (64 + 448) * TOKEN_BYTES


def settings(**given: Any) -> ThroughputSettings:
    decode = DecodeSettings(
        shape="smoke", device="cpu", repeat=3, token_budget=64, systems=("full", NAME)
    )
    usual = {"prompt": 64, "answer": 448, "points": 2, "memory": 1 << 30, "decode": decode}
    return ThroughputSettings(**usual | given)


@pytest.fixture(scope="module")
def smoke() -> model.Weights:
    return model.make_weights(replace(settings().decode, contexts=(512,)))


def head_bytes(weights: model.Weights) -> int:
    head = SteadyHead.random(weights.keyhole.network)
    return sum(parameter.nbytes for parameter in head.parameters())


def make(weights: model.Weights, room: float, **given: Any) -> OffloadedSystem:
    """room: in texts with everything above."""
    return OffloadedSystem(
        NAME, weights.keyhole, settings(**given), head_bytes(weights) + int(room * TEXT_BYTES)
    )


def test_more_requests_fit_than_without_offloading_and_the_host_bounds_them(
    smoke: model.Weights,
) -> None:
    # Buffers of 80 tokens of 512 in four layers, the head's keys a quarter of one layer's
    # pairs, and its features.
    assert make(smoke, 2).requests > 3
    assert make(smoke, 2, host_memory=3 * TEXT_BYTES).requests == 3
    assert make(smoke, 2, host_memory=TEXT_BYTES - 1).requests == 0
    assert make(smoke, 0.01).requests == 0
    assert make(smoke, -5).requests == 0


@pytest.mark.slow
def test_steps_of_all_requests_are_timed_with_offloaded_layers(smoke: model.Weights) -> None:
    system = make(smoke, 2, host_memory=4 * TEXT_BYTES)
    assert system.requests == 4
    short, long = system.measure(64), system.measure(512)
    assert (short.offloaded_layers, short.hit_rate, short.moved_bytes) == (0, None, 0)
    assert 1 <= long.offloaded_layers <= 4
    assert len(long.step_ms) == 3
    assert long.error < 1e-2
    assert long.hit_rate is not None
    assert 0.5 < long.hit_rate < 1
    # The newest token is written where it is needed; of the other 63 of the budget each is there
    # or is moved, in every request, layer and head.
    missed = (1 - long.hit_rate) * 4 * long.offloaded_layers * 63 * TOKEN_BYTES / 4
    assert long.moved_bytes == pytest.approx(missed)


def test_a_steady_head_chooses_most_tokens_again(smoke: model.Weights) -> None:
    torch.manual_seed(0)
    head, tokens, budget = SteadyHead.random(smoke.keyhole.network).float(), 2048, 512
    keys = torch.randn(tokens // 16, head.config.num_kv_heads, 16, head.config.head_dim)
    table = torch.arange(tokens // 16, dtype=torch.int32)[None]
    chosen = []
    for position in (5000, 5001):
        fused = torch.randn(1, head.config.hidden_size)
        query, _ = head(torch.randint(256, (1,)), torch.tensor([position]), fused)
        lengths = torch.tensor([tokens], dtype=torch.int32)
        weights = group_weights(query, keys, table, lengths, head.config.num_kv_heads, head.scale)
        chosen.append({*weights[0, 0].topk(budget).indices.tolist()})
    assert 0.7 < len(chosen[0] & chosen[1]) / budget < 0.99


def test_other_logits_are_noticed(smoke: model.Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    system = make(smoke, 2, host_memory=TEXT_BYTES)
    monkeypatch.setattr(
        system, "_logits_above", lambda numbers, text: torch.randn(4, smoke.keyhole.vocab_size)
    )
    with pytest.raises(DisagreementError, match=NAME):
        system.measure(64)


@pytest.mark.slow
def test_a_line_tells_what_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_BANDWIDTH_BYTES", 1 << 16)
    monkeypatch.setattr(
        bench_model, "release_memory", lambda: None
    )  # slow, and nothing is large here
    weights = model.make_weights(replace(settings().decode, contexts=(512,)))
    used = sum(parameter.nbytes for parameter in weights.keyhole.network.parameters())
    room = used + RESERVE_BYTES + head_bytes(weights) + 2 * TEXT_BYTES
    line = throughput.run(settings(memory=room, host_memory=4 * TEXT_BYTES), lambda *_: None)
    full, below = line["results"]
    assert (full["system"], below["system"]) == ("full", NAME)
    assert full["requests"] < below["requests"] == 4
    assert "loads" not in full
    assert [load["offloaded_layers"] > 0 for load in below["loads"]] == [False, True]
    assert below["tokens_per_s"] == pytest.approx(4 * 448 / below["answer_s"])
    assert line["relative_error"][NAME] < 1e-2
    nothing = throughput.run(settings(memory=1 << 20), lambda *_: None)["results"][1]
    assert (nothing["requests"], nothing["tokens_per_s"], nothing["loads"]) == (0, None, [])
