"""The first token after stored documents is timed beside a prompt that is computed whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.document_reuse import many
from benchmarks.document_reuse.prompt_time import ratios
from benchmarks.paper import documents
from benchmarks.paper.settings import DocumentSettings
from keyhole.bench import measure
from keyhole.bench.decode import DisagreementError
from keyhole.errors import ConfigError, UnknownNameError

METHODS = ("transformers_sdpa", "recompute", "cacheblend", "sam_kv")


def settings(**given: Any) -> DocumentSettings:
    usual = {"methods": METHODS, "documents": 3, "tokens": 256, "question": 8, "repeat": 2}
    return DocumentSettings(**usual | {"shape": "smoke", "device": "cpu"} | given)


@pytest.mark.slow
def test_every_method_has_a_time_and_what_it_kept() -> None:
    reported: list[Any] = []
    line = documents.run(settings(), lambda found, _: reported.append(found))
    assert reported == [line["results"]]
    assert line["relative_error"] < 0.05
    found = {result["system"]: result for result in line["results"]}
    assert list(found) == list(METHODS)
    for result in found.values():
        assert len(result["all_ttft_ms"]) == 2
        assert result["ttft_ms"] > 0
        assert result["context"] == 3 * 256 + 8
    assert found["transformers_sdpa"]["store_bytes_read"] is None
    assert found["cacheblend"]["store_bytes_read"] > 0
    assert found["cacheblend"]["sequence_ratio"] == 1
    assert 0 < found["sam_kv"]["sequence_ratio"] < 1


def test_other_logits_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = torch.arange(256.0)
    monkeypatch.setattr(documents, "_next_logits", lambda *_: wrong)
    monkeypatch.setattr(documents, "take_turns", lambda *_: pytest.fail("too late"))
    with pytest.raises(DisagreementError, match="recompute: relative error"):
        documents.run(settings(), lambda *_: None)


def test_what_cannot_be_measured_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "read_bandwidth", lambda _: pytest.fail("too late"))
    with pytest.raises(UnknownNameError, match="did you mean 'cacheblend'"):
        documents.run(settings(methods=("cacheblnd",)), lambda *_: None)
    with pytest.raises(ConfigError, match="tokens 0 must be at least 1"):
        settings(tokens=0)


def test_ratios_are_those_of_the_same_turn() -> None:
    results = [
        {"system": "recompute", "all_ttft_ms": [10.0, 20.0, 40.0]},
        {"system": "reuse", "all_ttft_ms": [1.0, 20.0, 10.0]},
    ]
    assert ratios(results) == {"reuse": 0.25}


@pytest.mark.slow
def test_many_documents_are_timed_by_every_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many, "_SETTLE_S", 0)
    output = tmp_path / "many.jsonl"
    given = ["many", "--sizes", "3x20", "--repeat", "1", "--methods", "sam_kv", "reuse"]
    monkeypatch.setattr(sys, "argv", [*given, "--output", str(output)])
    many.main()
    [size] = json.loads(output.read_text())["sizes"]
    assert (size["documents"], size["tokens"]) == (3, 20)
    assert size["by_recompute"].keys() == {"sam_kv", "reuse"}
    assert size["first_ms"].keys() == {"recompute", "sam_kv", "reuse"}
