"""What architecture.md says of questions that are admitted is what the stored line says."""

from __future__ import annotations

import json
from typing import Any

import benchmarks
from tests.docs.markdown import DOCS

TEXT = (DOCS / "architecture.md").read_text()
LINE: dict[str, Any] = json.loads(
    (benchmarks.results() / "admission.jsonl").read_text().splitlines()[-1]
)


def test_the_table_is_the_stored_line() -> None:
    for found in LINE["results"]:
        cells = [
            f"`{found['method']}`",
            f"{found['step_ms']:.1f} ms",
            f"{found['longest_ms']:.1f} ms",
            f"{found['longest_ratio']:.2f}",
            f"{found['noise_ratio']:.2f}",
            f"{found['longest_cpu_ratio']:.2f}",
            f"{found['ttft_ms']:.0f} ms",
            f"{found['alone_ms']:.0f} ms",
        ]
        assert f"| {' | '.join(cells)} |" in TEXT


def test_the_settings_are_as_documented() -> None:
    settings = LINE["settings"]
    assert (settings["documents"], settings["tokens"]) == (4, 3000)
    assert (settings["others"], settings["prompt"]) == (7, 4000)
    assert settings["repeat"] == 15
    machine = LINE["machine"]
    told = f"{machine['threads']} thread of {machine['cores']} cores of an {machine['cpu']}"
    assert told in " ".join(TEXT.split())


def test_the_page_says_that_the_targets_are_met() -> None:
    assert all(bar["met"] for bar in LINE["bars"])
    said = " ".join(TEXT.split())
    assert "The target is met for both, in the median and in the worst of 15 questions" in said
    worst = [found["worst_cpu_ratio"] for found in LINE["results"]]
    assert f"is {worst[0]:.2f} under `sam_kv` and {worst[1]:.2f} under `reuse`, in CPU" in said


def test_the_line_of_a_busy_machine_is_shown_too() -> None:
    lines = (benchmarks.results() / "admission.jsonl").read_text().splitlines()
    [busy] = [x for x in map(json.loads, lines) if x["machine"]["load_average"] > 10]
    found = busy["results"][0]
    assert found["method"] == "sam_kv"
    told = f"{found['longest_ratio']:.2f}, against {found['noise_ratio']:.2f} without any question"
    assert told in " ".join(TEXT.split())
