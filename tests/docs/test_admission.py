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


def test_the_page_says_which_targets_are_met() -> None:
    met = {bar["bar"]: bar["met"] for bar in LINE["bars"]}
    assert met == {
        "longest step / median while sam_kv is admitted": False,
        "CPU time of the longest step / median while sam_kv is admitted": True,
        "longest step / median while reuse is admitted": True,
        "CPU time of the longest step / median while reuse is admitted": True,
    }
    said = " ".join(TEXT.split())
    assert "By the clock the target is met for `reuse`, and missed for `sam_kv`" in said
    assert "In the median CPU time of the longest step is within the target for both" in said
