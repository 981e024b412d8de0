"""How results look on a terminal: colours, tables, closing lines, JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from keyhole.engine.sequence import Stats
    from keyhole.policies.base import Policy
    from keyhole.reuse.base import Reuse


#: What a word of a result means, wherever it stands alone: in a cell, at the start of a line.
MARKS = {
    "met": "green",
    "exact": "green",
    "right": "green",
    "MISSED": "bold red",
    "DIFFERS": "bold red",
    "wrong": "red",
}
HEADING = "bold"
ERROR = "bold red"


def styled(text: str, style: str, stream: TextIO) -> str:
    """The text as it is to be written to a stream: in a style, or as it stands."""
    if not style or not stream.isatty():
        return text
    from rich.console import Console  # only here, so that `documents list` pays nothing for it
    from rich.text import Text

    console = Console(file=stream, soft_wrap=True, highlight=False)
    if console.color_system is None or console.no_color:
        return text
    with console.capture() as captured:
        console.print(Text(text, style), end="")
    return captured.get()


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int = 1,
    stream: TextIO | None = None,
) -> str:
    """Columns as wide as their content; the first `left` are left-aligned, the others right.

    stream: where it will be printed, for colours; None: stdout.
    """
    out = sys.stdout if stream is None else stream
    widths = [max(len(line[i]) for line in [heads, *rows]) for i in range(len(heads))]

    def padded(cells: Sequence[str]) -> list[str]:
        return [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]

    lines = [styled("  ".join(padded(heads)).rstrip(), HEADING, out)]
    for cells in [["-" * width for width in widths], *rows]:
        marked = [
            text.replace(cell, styled(cell, MARKS.get(cell, ""), out))
            for cell, text in zip(cells, padded(cells), strict=True)
        ]
        lines.append("  ".join(marked).rstrip())
    return "\n".join(lines)


def error(text: str) -> None:
    """Prints the line of an error on stderr."""
    print(f"{styled('error:', ERROR, sys.stderr)} {text}", file=sys.stderr)


def status(text: str) -> None:
    """Says on a terminal what the user waits for; nothing where stderr is a pipe or a file."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def to_json(value: Any) -> str:
    """One JSON object; dataclasses become objects with their Python names."""
    return json.dumps(value, indent=2, default=dataclasses.asdict)


def describe(method: Policy | Reuse) -> dict[str, Any]:
    """Name and settings of a policy or reuse method, for JSON."""
    return {"name": method.name, **dataclasses.asdict(method)}


def sentence(method: Policy | Reuse) -> str:
    """Name and settings of a policy or reuse method, for people."""
    settings = dataclasses.asdict(method)
    shown = [
        f"{name} {setting(value)}" for name, value in settings.items() if value not in (None, ())
    ]
    return f"{method.name} ({', '.join(shown)})" if shown else method.name


def closing_line(stats: Stats) -> str:
    """The counters of a request in one line."""
    parts = [f"{stats.generated_tokens} tokens"]
    if stats.step_ms:
        parts.append(f"{1e3 / stats.step_ms:.1f} tokens/s")
    if stats.attended_fraction is not None:
        parts.append(f"{100 * stats.attended_fraction:.1f} % of keys read")
        parts.append(f"{bytes_text(bytes_per_step(stats))} read per token")
    if stats.evicted_pages:
        parts.append(f"{count(stats.evicted_pages, 'page')} evicted")
    if stats.ttft_ms is not None:
        parts.append(f"first token after {stats.ttft_ms:.0f} ms")
    return " | ".join(parts)


def bytes_per_step(stats: Stats) -> float:
    """Bytes read per decode step; the first token comes from the prefill."""
    return (stats.kv_bytes_read + stats.other_bytes_read) / max(1, stats.generated_tokens - 1)


def bytes_text(size: float) -> str:
    """A size for people: 512 B, 1.5 KiB, 3.2 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def count(number: int, noun: str) -> str:
    """A number with its noun: 1 token, 2,048 tokens."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def setting(value: object) -> str:
    """The value of a setting as one would type it: 0,1 for (0, 1)."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
