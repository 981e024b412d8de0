"""The section on weights of few bits in docs/results/speed.md."""

from __future__ import annotations

import shlex
from collections.abc import Hashable, Sequence
from typing import Any

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
    return tables.written(["tokens", *(f"`{name}`" for name in systems), *peers], rows)


def _is_peer(result: dict[str, Any]) -> bool:
    beside = result["beside"]
    return beside is not None and bool(result["system"].startswith(f"{beside},"))


def _about(line: Line) -> str:
    settings, machine, versions = (line[name] for name in ("settings", "machine", "versions"))
    layers = "" if settings["layers"] is None else f", {settings['layers']} layers"
    note = f" Note: {line['note']}." if line["note"] else ""
    return (
        f"Shape of {settings['shape']}{layers}, batch {settings['batch']}, medians of "
        f"{settings['repeat']} interleaved steps. {machine['cpu']}, {machine['cores']} cores; "
        f"torch {versions['torch']}{tables.outside(line)}; "
        f"{line['date'][:10]}, commit {line['commit']};\n"
        f"`{shlex.join(tables.command(line))}`.{note}"
    )
