"""The decode benchmark measures what it says, and refuses to report when logits differ."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import decode, measure
from keyhole.models.loading import Model

CONTEXT = 64


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_BANDWIDTH_BYTES", 1 << 16)


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the command appends to its output, in its second run."""
    output = tmp_path / "results" / "decode.jsonl"
    given = (
        "--contexts 48,64 --batch 2 --policies delta,quest --shape smoke --repeat 2 --note small"
    )
    arguments = [*given.split(), "--note", "small", "--device", "cpu", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["decode", *arguments])
    decode.main()
    decode.main()
    first, second = map(json.loads, output.read_text().splitlines())
    assert first.keys() == second.keys()
    return second


def test_a_line_says_how_where_and_when_it_was_measured(line: dict[str, Any]) -> None:
    assert line["benchmark"] == "decode"
    assert line["note"] == "small"
    assert line["command"].startswith("python -m benchmarks.decode --contexts 48,64")
    assert {"cpu", "cores", "memory_gib", "load_average", "device"} <= line["machine"].keys()
    assert set(line["versions"]) == {"python", "torch", "transformers", "keyhole"}
    assert line["settings"]["contexts"] == [48, 64]
    assert line["settings"]["repeat"] == 2
    assert line["read_bytes_per_s"] > 0
    assert {"date", "commit", "parameters", "weight_bytes"} <= line.keys()


def test_a_line_has_a_result_for_every_system_and_context(line: dict[str, Any]) -> None:
    results = line["results"]
    systems = [decode.PEER, "delta", "quest"]  # full attention was compared, but not asked for
    assert [(r["context"], r["system"]) for r in results] == [
        (context, system) for context in (48, 64) for system in systems
    ]
    for result in results:
        assert len(result["all_step_ms"]) == 2
        assert result["step_ms"] > 0
        assert result["gb_per_s"] > 0
        assert result["bandwidth_share"] > 0
        if result["system"] == decode.PEER:
            assert result["ratio_to_peer"] == 1.0
        else:
            assert result["policy"]["name"] == result["system"]
    assert max(line["relative_error"].values()) < 0.05  # bfloat16


@pytest.fixture(scope="module")
def model() -> Model:
    settings = decode.Settings(
        contexts=(CONTEXT,), shape="smoke", dtype="float32", device="cpu", layers=2
    )
    return decode.make_model(settings)


@pytest.fixture
def systems(model: Model) -> tuple[decode.Peer, decode.Ours]:
    """The peer and full attention over the same 64 tokens."""
    peer, ours = decode.Peer(model), decode.Ours("full", model, decode.Settings(), CONTEXT)
    for layer in range(2):
        keys, values = torch.randn(2, 1, 2, CONTEXT, 16)
        for system in (peer, ours):
            system.fill(layer, 3 * keys, values)
    return peer, ours


PROMPTS = [list(range(CONTEXT + 1))]


def test_full_attention_and_the_peer_agree_over_the_same_cache(
    systems: tuple[decode.Peer, decode.Ours],
) -> None:
    peer, ours = systems
    ours.know(PROMPTS)
    assert decode.compare(peer, ours, PROMPTS, [5, 6, 7], 1e-4) < 1e-5
    assert decode.compare(peer, ours, PROMPTS, [5, 6, 7], 1e-4) < 1e-5  # both are as before


def test_a_wrong_page_is_refused(systems: tuple[decode.Peer, decode.Ours]) -> None:
    peer, ours = systems
    ours.engine.cache.keys[1][[1, 2]] = ours.engine.cache.keys[1][[2, 1]]
    ours.engine.cache.keys[1][1, 0, 3] *= -1
    ours.know(PROMPTS)
    with pytest.raises(decode.DisagreementError, match="relative error"):
        decode.compare(peer, ours, PROMPTS, [5, 6, 7], 1e-4)


def test_nothing_is_prefilled_and_every_step_reads_all(
    systems: tuple[decode.Peer, decode.Ours],
) -> None:
    _, ours = systems
    ours.know(PROMPTS)
    ours.start(PROMPTS, 3)
    for _ in range(4):
        ours.step()
    stats = ours.sequences[0].stats()
    assert stats.cached_prompt_tokens == CONTEXT
    token_bytes = ours.engine.geometry.token_bytes
    assert stats.kv_bytes_read == token_bytes * sum(CONTEXT + n for n in (2, 3, 4))
    assert ours.cost()["kv_bytes"] == token_bytes * (CONTEXT + 3)


def test_a_context_that_ends_inside_a_page_is_refused() -> None:
    with pytest.raises(SystemExit, match="multiple of 16"):
        decode.run(decode.Settings(contexts=(50,), shape="smoke", device="cpu"))
