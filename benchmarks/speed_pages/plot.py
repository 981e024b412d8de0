"""A figure of step time against context, from a stored line. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.llama_cpp.system import SYSTEMS
from keyhole.bench.settings import BASELINES, MORE_BASELINES
from keyhole.drawing import FAINT, POLICY_COLORS, SPARE_COLORS, picture

# Ours in colour, with full attention dark; others grey and dashed, distinguished by their markers.
_MARKS = "osD^vPX*"
_OTHERS = (*BASELINES, *SYSTEMS, *MORE_BASELINES)


def step_times(line: dict[str, Any], path: Path) -> None:
    """Writes a PNG whose description is the line's date, which identifies outdated figures."""
    settings, machine = line["settings"], line["machine"]
    found: dict[str, list[tuple[int, float]]] = {}
    for result in line["results"]:
        point = result["context"], result["step_ms"]
        found.setdefault(result["system"], []).append(point)
    title = f"A decode step, {settings['shape']}, {settings['dtype']}, batch {settings['batch']}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with picture(path, title, line["date"], figsize=(7.2, 4.0), layout="constrained") as figure:
        axis = figure.subplots()
        for name, points in found.items():
            axis.plot(*zip(*points, strict=True), label=name, linewidth=1.6, **_look(name, found))
        contexts = sorted({context for points in found.values() for context, _ in points})
        logarithmic_axes(axis, contexts)
        axis.set_xlabel("tokens of context")
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        where = machine["cpu"] if machine["device"] == "cpu" else machine["device"]
        axis.set_title(f"{where}, {line['date'][:10]}", loc="left", fontsize=8, color=FAINT)


def logarithmic_axes(axis: Any, tokens: list[int]) -> None:
    """Scales, ticks and grid for milliseconds per step, which are plotted already, over tokens."""
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(tokens, [f"{n:,}" for n in tokens])
    axis.minorticks_off()
    low, high = axis.get_ylim()
    marks = [m * 10**e for e in range(-3, 7) for m in (1, 2, 5) if low <= m * 10**e <= high]
    axis.set_yticks(marks, [f"{n:g}" for n in marks])
    axis.grid(axis="y")
    axis.set_axisbelow(True)
    axis.set_ylabel("milliseconds per step (logarithmic)")


def _look(name: str, found: dict[str, Any]) -> dict[str, Any]:
    if name in _OTHERS:
        mark = _MARKS[_OTHERS.index(name) % len(_MARKS)]
        return {"color": FAINT, "linestyle": (0, (4, 2)), "marker": mark, "markersize": 4}
    others = [other for other in found if other not in _OTHERS and other not in POLICY_COLORS]
    color = POLICY_COLORS.get(name) or SPARE_COLORS[others.index(name) % len(SPARE_COLORS)]
    return {"color": color, "marker": "o", "markersize": 4}
