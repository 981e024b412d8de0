"""The section on products of packed weights in docs/results/speed.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.kernels.linear_cases import TORCH_PACKED
from benchmarks.speed_pages import tables

Line = dict[str, Any]
_HEADS = [
    "tokens x weights", "read", "packed", "torch, packed", "by torch's", "not packed",
    "torch, not packed",
]  # fmt: skip


def is_alone(line: Line) -> bool:
    """Whether the line has nothing but products of packed weights."""
    return {result["op"] for result in line["results"]} == {"packed_linear"}


def section(lines: Sequence[Line]) -> list[str]:
    """A table for the newest line of each processor, path and shape that has torch's products."""
    found = [line for line in lines if any(r["system"] == TORCH_PACKED for r in line["results"])]
    newest = {
        (line["machine"]["cpu"], _path(line), line["settings"]["shape"]): line for line in found
    }
    if not newest:
        return []
    parts = [
        "## Products of packed weights on a CPU",
        "Milliseconds of Keyhole's products and of torch's (`_weight_int4pack_mm_for_cpu` and\n"
        "`_weight_int8pack_mm`), medians of interleaved calls; in brackets the share of the\n"
        "bandwidth of a sum by torch over 64 MiB in the same turns, which is not the most the\n"
        "memory gives: shares can exceed 100 %. *By torch's*: the median of the ratios of turns.\n"
        "*Read*: codes, scales and minimums. Both multiply the same weights, which no call finds\n"
        "in a cache; in 4 bits 64 of them share a scale. In 8 bits torch has one scale an output,\n"
        "where Keyhole has one for 64 weights. *Not packed*: the same shape, as it is.",
    ]
    for (cpu, path, _), line in newest.items():
        parts += [f"{cpu}, `{path}`:", _table(line), tables.about(line)]
    return parts


def _path(line: Line) -> str:
    return str(line["settings"]["paths"][0])


def _table(line: Line) -> str:
    path, rows = _path(line), []
    for about in dict.fromkeys(r["about"] for r in line["results"] if r["op"] == "packed_linear"):
        of = {r["system"]: r for r in line["results"] if r["about"] == about}
        if TORCH_PACKED in of:
            systems = path, TORCH_PACKED, f"{path} linear", "torch linear"
            ours, theirs, plain, torch_plain = (_cell(of[system]) for system in systems)
            read = f"{of[path]['moved_bytes'] / 2**20:.1f} MiB"
            ratio = f"{of[path]['ratio_to_peer']:.2f}"
            rows.append([about, read, ours, theirs, ratio, plain, torch_plain])
    return tables.written(_HEADS, rows)


def _cell(result: dict[str, Any]) -> str:
    return f"{result['ms']:.3g} ({result['sum_share']:.0%})"
