"""Shares and bytes in the tables of differences are those of the stored lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keyhole.eval.comparisons import wilson

ROOT = Path(__file__).parents[2]
LINES = [
    line
    for text in (ROOT / "benchmarks/results/differences.jsonl").read_text().splitlines()
    if (line := json.loads(text))["method"] != "full"
]


def percent(share: float) -> str:
    """One digit behind the point, none for a whole number."""
    return f"{100 * abs(share):.1f}".removesuffix(".0")


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line['method']}@{line['budget']}")
def test_a_stored_share_is_in_the_methods_section(line: dict[str, object]) -> None:
    page = (ROOT / "docs/methods.md").read_text()
    name = str(line["policy"])
    section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
    scores, size = line["scores"], line["bytes_per_step"]
    assert isinstance(scores, list)
    assert isinstance(size, float)
    right = sum(score == 1 for score in scores)
    assert len(scores) == 48
    low, high = wilson(right, len(scores))
    # 86.0 keeps its digit where the other end has one.
    ends = (f"{100 * abs(low):.1f}", f"{100 * high:.1f}")
    wanted = f"{percent(right / len(scores))} % ({ends[0]} to {ends[1]})"
    plain = f"{percent(right / len(scores))} % ({percent(low)} to {percent(high)})"
    assert wanted in section or plain in section
    # TidalDecode's two lines at 128 are both 0 %; their bytes are left out.
    assert f"{size / 1024:,.0f} KiB" in section or right == 0


REUSED = [
    (line["group"].split(" at ")[0], line["results"])
    for text in (ROOT / "benchmarks/results/reuse-differences.jsonl").read_text().splitlines()
    if (line := json.loads(text))
]


@pytest.mark.parametrize(("name", "results"), REUSED, ids=[name for name, _ in REUSED])
def test_a_share_that_a_variant_changes_is_in_the_methods_section(
    name: str, results: list[dict[str, list[int]]]
) -> None:
    page = (ROOT / "docs/methods.md").read_text()
    section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
    for one in results:
        right, count = sum(one["right"]), len(one["right"])
        if right != sum(results[0]["right"]) or one is results[0]:
            low, high = (f"{100 * abs(end):.1f}" for end in wilson(right, count))
            high = high.removesuffix(".0") if high == "100.0" else high
            assert f"{percent(right / count)} % ({low} to {high})" in section, one
