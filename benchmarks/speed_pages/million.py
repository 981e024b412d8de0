"""The section on a million tokens in docs/results/speed.md, and its figure. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results_page.text import written
from benchmarks.speed_pages import tables
from benchmarks.speed_pages.plot import logarithmic_axes
from keyhole.config import bytes_text
from keyhole.drawing import FAINT, POLICY_COLORS, SPARE_COLORS, picture

Line = dict[str, Any]

PICTURE = "million.png"
#: Target: a step at the most tokens takes at most this many times as long as at the fewest.
_TARGET = 2.0
_HEADS = [
    "shape", "policy", "tokens", "step", "relative to shortest", "in memory", "on disk", "hit rate",
    "loaded per step", "peak / plan",
]  # fmt: skip


def measured(lines: Sequence[Line]) -> list[Line]:
    """The newest line of each shape, policy and length, in this order."""
    newest = {_key(line["settings"]): line for line in lines}
    return [newest[key] for key in sorted(newest, key=lambda key: (key[:2], key[2]))]


def section(lines: Sequence[Line]) -> list[str]:
    """Paragraphs, the figure, a table, and the targets; empty without lines."""
    found = measured(lines)
    if not found:
        return []
    # Older plans left out lists of tokens and pages, for which the limit allowed 128 bytes.
    counts_all = all("lists" in line["plan_terms"] for line in found)
    allowed = " and 5 % (at least 32 MiB)"
    if not counts_all:
        allowed = ", 5 % (at least 32 MiB) and 128 bytes per token"
    return [
        "## A million tokens",
        f"![Time of a decode step against tokens](../images/{PICTURE})",
        "A decode step with keys and values in 8 bits. Weights, cache and a step's activations\n"
        f"have a fixed memory ({_memories(found)});\n"
        "layers that do not fit are offloaded to files.\n"
        "The cache holds random numbers, so consecutive selections have nothing in common: the\n"
        "worst case for loading. Each process was limited (RLIMIT_DATA) to the memory of the\n"
        f"program, this memory{allowed}, and finished. The\n"
        "step is a mean over whole periods of `refresh_every`. *Relative to shortest*: divided\n"
        "by the step at the shortest length. *Hit rate*: the share of selected tokens that were\n"
        "in the buffers of offloaded layers. *Peak / plan*: the largest private memory of the\n"
        "process, without that of the program, divided by the largest size that the plan\n"
        "predicts while a sequence grows to this length:",
        written(_HEADS, [_cells(line, found) for line in found]),
        *_targets(found),
        _counted(counts_all),
        f"At least {found[-1]['settings']['repeat']} steps each. {tables.origin(*found)}",
    ]


def _counted(counts_all: bool) -> str:
    """What is in the plan of the lines."""
    size = (
        "Keys and values take 0.9 KiB per\ntoken in the bundled model, and 17 KiB in the 1B shape."
    )
    if counts_all:
        return (
            "The plan counts weights, keys, values, side data, buffers, a step's activations and\n"
            "scores, token ids, page numbers and the index of cached pages. " + size
        )
    return (
        "The plan counts weights, keys, values, side data, buffers and a step's activations. It\n"
        "does not count what else a sequence needs: token ids, entries of the prefix cache\n"
        "and attention scores, 100 to 250 bytes per token. " + size
    )


def curve(lines: Sequence[Line], path: Path) -> None:
    """Writes a PNG of step time against tokens; its description is the newest date."""
    found = measured(lines)
    shapes = list(dict.fromkeys(line["settings"]["shape"] for line in found))
    path.parent.mkdir(parents=True, exist_ok=True)
    date = max(line["date"] for line in found)
    with picture(path, "A decode step", date, figsize=(7.2, 4.0), layout="constrained") as figure:
        axis = figure.subplots()
        for shape, system in dict.fromkeys(_key(line["settings"])[:2] for line in found):
            points = [
                (line["settings"]["length"], line["step_ms"])
                for line in found
                if _key(line["settings"])[:2] == (shape, system)
            ]
            name = system.partition(":")[0]
            dashes = "-" if shape == shapes[-1] else (0, (4, 2))
            color = POLICY_COLORS.get(name, SPARE_COLORS[0])
            look = {"color": color, "linestyle": dashes, "marker": "o", "markersize": 4}
            axis.plot(*zip(*points, strict=True), label=f"{shape}, {system}", linewidth=1.6, **look)
        lengths = sorted({line["settings"]["length"] for line in found})
        logarithmic_axes(axis, lengths)
        axis.set_xlabel("tokens in the cache")
        axis.legend(loc="upper left", frameon=False)
        axis.set_title(f"{found[0]['machine']['cpu']}, {date[:10]}", fontsize=8, color=FAINT)


def _key(settings: dict[str, Any]) -> tuple[str, str, int]:
    return settings["shape"], settings["system"], settings["length"]


def _shortest(line: Line, lines: Sequence[Line]) -> Line:
    """The line of the same shape and policy with the fewest tokens."""
    key = _key(line["settings"])[:2]
    return next(other for other in lines if _key(other["settings"])[:2] == key)


def _ratio(line: Line, lines: Sequence[Line]) -> float:
    return float(line["step_ms"] / _shortest(line, lines)["step_ms"])


def _cells(line: Line, lines: Sequence[Line]) -> list[str]:
    settings, hits = line["settings"], line["hit_rate"]
    below = line["offloaded_layers"]
    return [
        settings["shape"],
        f"`{settings['system']}`",
        f"{settings['length']:,}",
        f"{line['step_ms']:.1f} ms",
        f"{_ratio(line, lines):.2f}",
        bytes_text(line["resident_bytes"]),
        f"{bytes_text(line['offloaded_bytes'])} ({below} layers)" if below else "",
        "" if hits is None else f"{hits:.0%}",
        bytes_text(line["moved_bytes"]) if below else "",
        f"{line['peak_bytes'] / line['plan_bytes']:.2f}",
    ]


def _targets(lines: Sequence[Line]) -> list[str]:
    """For each shape under SpeContext, the step time at the longest length divided by that at the
    shortest, and the target.
    """
    longest = {_key(line["settings"])[:2]: line for line in lines}
    said = [
        f"- {shape}, `{system}`: a step at {line['settings']['length']:,} tokens takes "
        f"{_ratio(line, lines):.2f} times as long as at "
        f"{_shortest(line, lines)['settings']['length']:,}, target <= {_TARGET:g}"
        f"{'' if _ratio(line, lines) <= _TARGET else ' (missed)'}"
        for (shape, system), line in longest.items()
        if system.startswith("spe_context")
    ]
    return ["\n".join(said)] if said else []


def _memories(lines: Sequence[Line]) -> str:
    found = {line["settings"]["shape"]: line["settings"]["total_memory"] for line in lines}
    return ", ".join(f"{bytes_text(size)} for {shape}" for shape, size in found.items())
