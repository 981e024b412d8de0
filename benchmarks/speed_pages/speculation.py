"""The section on several tokens per step in docs/results/speed.md."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from benchmarks.speed_pages import tables

Line = dict[str, Any]


def section(lines: Sequence[Line]) -> list[str]:
    """The tables and targets of the newest line of each processor; empty without lines."""
    if not lines:
        return []
    newest = {line["machine"]["cpu"]: line for line in lines}
    settings = lines[-1]["settings"]
    parts = [
        "## Several tokens per step, on a CPU",
        f"A draft of {settings['num_draft_tokens']} tokens with random weights, whose tokens are "
        f"accepted with a probability\nof {settings['accept']}, the same ones for each system "
        "([how](../how-to/draft.md)). Batch 1:",
    ]
    for line in sorted(newest.values(), key=lambda line: str(line["date"]), reverse=True):
        parts += _of_processor(line)
    return parts


def _of_processor(line: Line) -> list[str]:
    settings, machine = line["settings"], line["machine"]
    rows = [
        [f"{result['context']:,}", f"`{name}`", *_cells(found)]
        for result in line["results"]
        for name, found in result["systems"].items()
    ]
    heads = ["tokens", "system", "step in ms", "tokens per step", "tokens/s by those of `full`"]
    return [
        tables.written(heads, rows),
        "\n".join(_target(result) for result in line["results"] if "target" in result),
        f"Shape of {settings['shape']}, bfloat16, medians of {settings['rounds']} turns of "
        f"{settings['steps']} steps. {machine['cpu']}, {machine['cores']} cores; "
        f"{line['date'][:10]}, commit {line['commit']};\n`{shlex.join(tables.command(line))}`.",
    ]


def _cells(found: dict[str, Any]) -> list[str]:
    return [
        f"{found['step_ms']:.0f}",
        f"{found['tokens_per_step']:.2f}",
        f"{found['times_full']:.2f}",
    ]


def _target(result: dict[str, Any]) -> str:
    target, context = result["target"], result["context"]
    value = result["systems"][target["system"]]["times_full"]
    missed = "" if target["met"] else " (missed)"
    return (
        f"- {target['system']}, {context:,} tokens: {value:.2f} times the tokens/s of full, "
        f"target >= {target['times_full']}{missed}"
    )
