"""Writes the table of results in the README from the stored lines.

    python -m benchmarks.report

The last line of `results/decode.jsonl` for each device makes a table, between two comments in the
README; a test compares them.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks/results/decode.jsonl"

BEGIN, END = "<!-- results: python -m benchmarks.report -->\n", "<!-- end of results -->"


def render(lines: list[dict[str, Any]]) -> str:
    """A table, and how it was measured, for the last line of each device."""
    last = {line["machine"]["device"]: line for line in lines}
    return "\n".join(_table(line) for line in last.values())


def inserted(text: str, tables: str) -> str:
    """The text with the tables between the two comments."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return head + BEGIN + tables + END + tail


def stored() -> list[dict[str, Any]]:
    """All lines of results, the oldest first."""
    return [json.loads(text) for text in RESULTS.read_text().splitlines()]


def _table(line: dict[str, Any]) -> str:
    found = {(r["context"], r["system"]): r for r in line["results"]}
    contexts, policies = line["settings"]["contexts"], line["settings"]["policies"]
    heads = ["tokens", *(f"`{name}`" for name in policies)]
    rows = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for context in contexts:
        cells = (_cell(found[context, name]) for name in policies)
        rows.append("| " + " | ".join([f"{context:,}", *cells]) + " |")
    return "\n".join([*rows, "", *_about(line), ""])


def _cell(result: dict[str, Any]) -> str:
    return f"{result['ratio_to_peer']:.2f} ({result['attended_fraction']:.0%})"


def _about(line: dict[str, Any]) -> list[str]:
    settings, machine, versions = (line[name] for name in ("settings", "machine", "versions"))
    batch = "" if settings["batch"] == 1 else f", batch {settings['batch']}"
    device = "" if machine["device"] == "cpu" else f"{machine['device']}, "
    note = f" Note: {line['note']}." if line["note"] else ""
    command = shlex.split(line["command"])
    if "--note" in command:
        place = command.index("--note")
        del command[place : place + 2]
    return [
        f"Shape of {settings['shape']}, {settings['dtype']}{batch}, medians of "
        f"{settings['repeat']} steps in turns. {device}{machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']:.0f} GiB; torch {versions['torch']}, transformers "
        f"{versions['transformers']}; {line['date'][:10]}, commit {line['commit']};",
        f"`{shlex.join(command)}`.{note}",
    ]


def main() -> None:
    """Rewrites the README."""
    README.write_text(inserted(README.read_text(), render(stored())))


if __name__ == "__main__":
    main()
