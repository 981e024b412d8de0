"""The benchmark of a question that is admitted while other requests decode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.document_reuse import admission


def test_admission_prints_the_delay_of_other_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "admission.jsonl"
    given = ("--documents", "2", "--tokens", "200", "--question", "9", "--others", "2")
    more = ("--prompt", "100", "--repeat", "3", "--methods", "epic:num_initial=8,reuse")
    assert admission.main([*given, *more, "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "longest / median" in shown
    assert shown.count("longest step / median while ") == 4
    assert shown.count("of all questions / median while ") == 2
    line = json.loads(output.read_text())
    assert line["settings"]["methods"] == ["epic:num_initial=8", "reuse"]
    assert len(line["bars"]) == 6
    for number, found in enumerate(line["results"]):
        assert found["stored_tokens"] == 400
        assert len(found["all_rounds"]) == len(found["all_alone_ms"]) == 3
        for one in found["all_rounds"]:
            assert one["steps"] > 1
            assert one["longest_ms"] <= one["ttft_ms"]
            assert one["longest_ratio"] == pytest.approx(one["longest_ms"] / one["step_ms"])
            assert one["longest_cpu_ratio"] > 0
        names = ("longest_ratio", "longest_cpu_ratio")
        for name, bar in zip(names, line["bars"][3 * number :][:2], strict=True):
            middle = sorted(one[name] for one in found["all_rounds"])[1]
            assert found[name] == bar["value"] == middle
            assert bar["met"] == (middle <= 2)
        worst = max(one["longest_cpu_ratio"] for one in found["all_rounds"])
        assert found["worst_cpu_ratio"] == line["bars"][3 * number + 2]["value"] == worst


def test_settings_that_measure_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert admission.main(["--documents", "0"]) == 2
    assert "documents 0 must be at least 1" in capsys.readouterr().err
