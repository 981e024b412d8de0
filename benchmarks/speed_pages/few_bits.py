"""The sections on weights of few bits and on their products in docs/results/speed.md."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from benchmarks.kernels.linear_cases import TORCH_PACKED
from benchmarks.results_page.text import written
from benchmarks.speed_pages import tables

Line = dict[str, Any]


def section(lines: Sequence[Line]) -> list[str]:
    """Tables and targets of the newest line of each processor, length and batch, or nothing."""
    newest = {_key(line): line for line in lines}
    found = [newest[key] for key in sorted(newest, key=str)]
    if not found:
        return []
    parts = [
        "## Weights of few bits on a CPU",
        "Time of a decode step in milliseconds, and in brackets divided by that of `full` with\n"
        "weights in bfloat16 in the same turns. llama.cpp's settings are measured one after the\n"
        "other, each in turns with Keyhole's engines.",
    ]
    for line in found:
        parts += [part for part in (_table(line), tables.targets(line), _about(line)) if part]
    return parts


def _key(line: Line) -> Hashable:
    settings = line["settings"]
    cpu = line["machine"]["cpu"]
    return cpu, settings["batch"], tuple(settings["contexts"]), settings["layers"]


def _table(line: Line) -> str:
    results = line["results"]
    systems = list(dict.fromkeys(result["system"] for result in results if not _is_peer(result)))
    rows = []
    for context, peer in dict.fromkeys((r["context"], r["beside"]) for r in results):
        turn = [r for r in results if (r["context"], r["beside"]) == (context, peer)]
        cells = {r["system"]: f"{r['step_ms']:.0f} ({r['ratio']:.2f})" for r in turn}
        own = [cells[system] for system in systems]
        rows.append(
            [
                f"{context:,}",
                *own,
                *(f"`{peer}`: {cells[r['system']]}" for r in turn if _is_peer(r)),
            ]
        )
    peers = ["llama.cpp, Q4_0"] if any(_is_peer(result) for result in results) else []
    return written(["tokens", *(f"`{name}`" for name in systems), *peers], rows)


def _is_peer(result: dict[str, Any]) -> bool:
    beside = result["beside"]
    return beside is not None and bool(result["system"].startswith(f"{beside},"))


def _about(line: Line) -> str:
    settings = line["settings"]
    layers = "" if settings["layers"] is None else f", {settings['layers']} layers"
    return (
        f"Shape of {settings['shape']}{layers}, batch {settings['batch']}, medians of "
        f"{settings['repeat']} interleaved steps. {tables.origin(line)}"
    )


_HEADS = [
    "tokens x weights", "read", "packed", "torch, packed", "by torch's", "not packed",
    "torch, not packed",
]  # fmt: skip


def is_alone(line: Line) -> bool:
    """Whether the line has nothing but products of packed weights."""
    return {result["op"] for result in line["results"]} == {"packed_linear"}


def products(lines: Sequence[Line]) -> list[str]:
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
        parts += [f"{cpu}, `{path}`:", _product_table(line), tables.about(line)]
    return parts


def _path(line: Line) -> str:
    return str(line["settings"]["paths"][0])


def _product_table(line: Line) -> str:
    path, rows = _path(line), []
    for about in dict.fromkeys(r["about"] for r in line["results"] if r["op"] == "packed_linear"):
        of = {r["system"]: r for r in line["results"] if r["about"] == about}
        if TORCH_PACKED in of:
            systems = path, TORCH_PACKED, f"{path} linear", "torch linear"
            ours, theirs, plain, torch_plain = (_cell(of[system]) for system in systems)
            read = f"{of[path]['moved_bytes'] / 2**20:.1f} MiB"
            ratio = f"{of[path]['ratio_to_peer']:.2f}"
            rows.append([about, read, ours, theirs, ratio, plain, torch_plain])
    return written(_HEADS, rows)


def _cell(result: dict[str, Any]) -> str:
    return f"{result['ms']:.3g} ({result['sum_share']:.0%})"
