"""Throughput of whole answers is what the steps along the way add up to, request by request."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.paper import throughput
from benchmarks.paper.settings import ThroughputSettings
from keyhole.bench import measure, model
from keyhole.bench import model as bench_model
from keyhole.bench.model import RESERVE_BYTES
from keyhole.bench.settings import DecodeSettings
from keyhole.errors import ConfigError, UnknownNameError

SYSTEMS = ("transformers_eager", "torch_flash", "full", "spe_context")
TOKEN_BYTES = 2 * 4 * 2 * 16 * 2  # keys and values, layers, heads, numbers, bytes of each


def settings(systems: tuple[str, ...] = SYSTEMS, **given: Any) -> ThroughputSettings:
    decode = DecodeSettings(shape="smoke", device="cpu", repeat=1, token_budget=64, systems=systems)
    usual = {"prompt": 64, "answer": 96, "points": 3, "memory": 600 << 20, "decode": decode}
    return ThroughputSettings(**usual | given)


@pytest.fixture(scope="module")
def smoke() -> model.Weights:
    return model.make_weights(settings().decode)


def weight_bytes(weights: model.Weights) -> int:
    return sum(parameter.nbytes for parameter in weights.keyhole.network.parameters())


def test_lengths_go_from_the_prompt_to_the_whole_text_in_pages() -> None:
    assert throughput.lengths_along(64, 96, 4) == (64, 96, 128, 160)
    assert throughput.lengths_along(50, 100, 3) == (64, 112, 160)


def test_an_answer_takes_the_area_under_its_step_times() -> None:
    lengths = (64, 96, 160)
    # 3 ms + 0.01 ms per token, summed over the answer's tokens one by one.
    spent = [3 + 0.01 * n for n in lengths]
    one_by_one = sum(3 + 0.01 * (64 + i + 0.5) for i in range(96))
    found = throughput.answer_seconds(lengths, spent, 96)
    assert found == pytest.approx(1e-3 * one_by_one)


def test_requests_are_those_that_fit_after_the_weights(smoke: model.Weights) -> None:
    asked = settings()
    text = 160 * TOKEN_BYTES

    def most(name: str, room: int) -> int:
        return throughput.most_requests(name, smoke.keyhole, asked, room)

    # Two of four layers may be twice there for a moment under sdpa, three under eager.
    assert most("transformers_sdpa", 15 * text) == 10
    assert most("transformers_eager", 7 * text) == 4
    # Ten pages, one for new tokens, one in reserve; and one that is nobody's.
    assert most("full", 10 * text) == (10 * 10 - 1) // 12
    page = text // 10
    assert [most("full", pages * page) for pages in (12, 13, 24, 25)] == [0, 1, 1, 2]
    assert most("full", -1) == 0
    # Its head keeps keys of its own.
    assert most("spe_context", 100 * text) < most("full", 100 * text)


def test_our_systems_run_with_every_peer_of_the_same_number() -> None:
    requests = {"transformers_sdpa": 4, "transformers_eager": 3, "full": 4, "delta": 3, "quest": 2}
    assert throughput.joint_runs(requests | {"torch_flash": 0, "streaming_llm": 0}) == [
        (4, ("transformers_sdpa", "full")),
        (3, ("transformers_eager", "delta")),
        (2, ("quest",)),
    ]


@pytest.mark.slow
def test_a_line_has_a_throughput_for_every_system(
    monkeypatch: pytest.MonkeyPatch, smoke: model.Weights
) -> None:
    monkeypatch.setattr(measure, "_BANDWIDTH_BYTES", 1 << 16)
    monkeypatch.setattr(
        bench_model, "release_memory", lambda: None
    )  # slow, and nothing is large here
    room = weight_bytes(smoke) + RESERVE_BYTES + 3 * 160 * TOKEN_BYTES
    reported: list[Any] = []
    asked = settings(memory=room, points=2)
    line = throughput.run(asked, lambda found, _: reported.append(found))
    assert line["lengths"] == (64, 160)
    assert [[r["context"] for r in found] for found in reported] == [[64] * 4, [160] * 4]
    assert [r["system"] for r in line["results"]] == list(SYSTEMS)
    for result in line["results"]:
        assert 1 <= result["requests"] <= 3
        assert len(result["step_ms"]) == 2
        assert set(result["launches"]) == {"replayed_steps", "why_not"}
        seconds = throughput.answer_seconds(line["lengths"], result["step_ms"], 96)
        assert result["answer_s"] == seconds
        assert result["tokens_per_s"] == pytest.approx(result["requests"] * 96 / seconds)
    assert set(line["relative_error"]) == set(SYSTEMS[:2])


def test_a_system_without_memory_has_no_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_BANDWIDTH_BYTES", 1 << 16)
    line = throughput.run(settings(("full",), memory=1 << 20), lambda *_: None)
    (result,) = line["results"]
    assert (result["requests"], result["step_ms"], result["tokens_per_s"]) == (0, [], None)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="answer 16 must be at least 32"):
        settings(answer=16)
    with pytest.raises(UnknownNameError, match="llama_cpp"):
        throughput.run(settings(("llama_cpp",)), lambda *_: None)
