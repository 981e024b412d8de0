"""Formats the paragraphs, tables and numbers of the evaluation in docs/results/."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from keyhole.eval.comparisons import wilson
from keyhole.eval.report.plot_style import NOTHING

_WIDTH = 100


def paragraph(text: str) -> str:
    """The words wrapped to lines of at most 100 characters."""
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def between(text: str, begin: str, end: str, new: str) -> str:
    """The text with what stands between these two comments replaced."""
    head, rest = text.split(begin)
    return head + begin + new + end + rest.split(end)[1]


def written(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int | None = None) -> str:
    """A table in Markdown. left: how many columns are left-aligned, the others right; None: all."""
    ends = ["---" if left is None else ":--" if i < left else "--:" for i in range(len(heads))]
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(ends)}|", *lines[1:]])


def image(name: str | None, text: str) -> list[str]:
    """A Markdown image; empty if there is none."""
    return [] if name is None else [f"![{text}](../images/{name})"]


def percent(value: float | None, unit: str = "") -> str:
    """Formats a percentage with three digits: 100, 99.5."""
    return NOTHING if value is None else f"{100 * value:.3g}{unit}"


def share(count: int, samples: int) -> str:
    """A share in percent with its Wilson interval."""
    low, high = wilson(count, samples)
    return f"{100 * count / samples:.0f} ({100 * low:.0f} to {100 * high:.0f})"


def kib(value: float | None) -> str:
    """Bytes in KiB."""
    return NOTHING if value is None else f"{value / 1024:,.0f}"


def folded(summary: str, *parts: str) -> str:
    """Paragraphs and tables that open on a click, on the site too, where `markdown` says so."""
    begin = f"<details markdown><summary>{summary}</summary>"
    return "\n\n".join([begin, *parts, "</details>"])


def source(lines: Sequence[Mapping[str, Any]]) -> str:
    """Machines, versions, dates, commits and commands of stored lines, folded away."""
    versions = {
        name: ", ".join(dict.fromkeys(line["versions"][name] for line in lines))
        for name in ("torch", "transformers")
    }
    machines = "; ".join(dict.fromkeys(line["machine"]["cpu"] for line in lines))
    commits = ", ".join(dict.fromkeys(str(line["commit"]) for line in lines))
    days = sorted(str(line["date"])[:10] for line in lines)
    commands = "; ".join(dict.fromkeys(f"`{line['command']}`" for line in lines))
    about = paragraph(
        f"{machines}; torch {versions['torch']}, transformers {versions['transformers']}; "
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, commit {commits}."
    )
    return folded("How it was measured", about, commands)
