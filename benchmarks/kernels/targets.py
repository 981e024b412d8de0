"""Targets of kernels, as ratios within one run (medians, the machine's best path)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.command import RatioTarget
from keyhole.bench.measure import Result


def ratio_targets(results: Sequence[Result], path: str) -> list[dict[str, Any]]:
    """Every target whose operations were measured on `path`."""
    found: list[RatioTarget] = []
    everything = [r for r in results if r["op"] == "attend" and r["selected"] is None]
    longest = max((r["tokens"] for r in everything), default=0)
    times = {r["system"]: r for r in everything if r["tokens"] == longest}
    if path in times:
        ours = times[path]
        who = f"attend, {ours['about']}"
        found.append(RatioTarget(f"{who}: share of read bandwidth", ours["bandwidth_share"], 0.6))
        found.append(
            RatioTarget(f"{who}: times torch sdpa", times["torch sdpa"]["ms"] / ours["ms"], 8)
        )
    found += [
        RatioTarget(f"attend, {r['about']}: share of read bandwidth", r["bandwidth_share"], 0.5)
        for r in results
        if r["op"] == "attend" and r["unit"] == 1 and r["system"] == path
    ]
    scored = {r["system"]: r["ms"] for r in results if r["op"] == "attend_and_score"}
    if path in scored:
        ratio = scored[path] / scored[f"{path} attend"]
        found.append(
            RatioTarget("attend_and_score: time by that of attend", ratio, 1.25, at_least=False)
        )
    return [bar.as_dict() for bar in found]
