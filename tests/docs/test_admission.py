"""What architecture.md says of questions that are admitted is what the stored line says."""

from __future__ import annotations

import json
from typing import Any

from keyhole.bench import measure
from tests.docs.markdown import DOCS

TEXT = (DOCS / "architecture.md").read_text()
LINE: dict[str, Any] = json.loads(
    (measure.results() / "admission.jsonl").read_text().splitlines()[-1]
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


def test_the_settings_are_as_told() -> None:
    settings = LINE["settings"]
    assert (settings["documents"], settings["tokens"]) == (4, 3000)
    assert (settings["others"], settings["prompt"]) == (7, 4000)
    assert settings["repeat"] == 15
    machine = LINE["machine"]
    told = f"{machine['threads']} thread of {machine['cores']} cores of an {machine['cpu']}"
    assert told in " ".join(TEXT.split())


def test_nobody_waits_longer_than_twice_the_median() -> None:
    assert [bar["met"] for bar in LINE["bars"]] == [True] * len(LINE["results"])
