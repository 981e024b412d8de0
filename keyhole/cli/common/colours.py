"""Colours on a terminal that has them, by rich; not in pipes, under NO_COLOR or TERM=dumb."""

from __future__ import annotations

from typing import TextIO

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
