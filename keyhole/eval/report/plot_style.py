"""How the pictures of an evaluation look: a colour and a mark for each method, in all of them.

A picture is drawn once, in the colours of `keyhole.drawing`. On a page its SVG names them as CSS
variables instead, so that the page decides what they are by day and by night.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from keyhole.drawing import FAINT, INK, PALE, POLICY_COLORS, SPARE_COLORS

#: What heat-maps are filled with, and numbers in cells that are full and in cells half full. They
#: differ from other colours a little, so that a page can change each by itself.
FILL, PAPER, HALF = "#0b6e76", "#ffffff", "#22303d"
#: Stands where there is no number.
NOTHING = "–"
SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_LEAST_SHOWN = 0.1


@dataclass(frozen=True)
class Look:
    """color: in pictures. mark: of matplotlib, glyph: the same as a character."""

    color: str
    mark: str
    glyph: str


_MARKS = (
    ("o", "●"),
    ("s", "■"),
    ("^", "▲"),
    ("D", "◆"),
    ("v", "▼"),
    ("p", "⬟"),
    ("<", "◀"),
    (">", "▶"),
    ("*", "★"),
)
_POLICIES = {
    name: Look(color, *mark)
    for (name, color), mark in zip(POLICY_COLORS.items(), _MARKS, strict=True)
}

#: Colours that a page may change: hexadecimal in pictures -> name, by day, by night. By day they
#: stand on white with a contrast of at least 3, by night on #14191f.
THEME: dict[str, tuple[str, str, str]] = {
    INK: ("ink", "#1d2933", "#e3e9ee"),
    FAINT: ("faint", "#64727f", "#93a1ad"),
    PALE: ("pale", "#e9eef2", "#27313a"),
    PAPER: ("paper", "#ffffff", "#14191f"),
    FILL: ("fill", "#0b6e75", "#4fb7bd"),
    HALF: ("half", "#1d2933", "#14191f"),
    POLICY_COLORS["delta"]: ("delta", "#c8691f", "#f0a268"),
    POLICY_COLORS["quest"]: ("quest", "#0b6e75", "#4fb7bd"),
    POLICY_COLORS["streaming_llm"]: ("streaming-llm", "#7a5ea8", "#b39ade"),
    POLICY_COLORS["spe_context"]: ("spe-context", "#b03a48", "#ef8490"),
    POLICY_COLORS["tidal_decode"]: ("tidal-decode", "#41803f", "#86c784"),
    POLICY_COLORS["omnikv"]: ("omnikv", "#2f6fb0", "#7db4ec"),
    POLICY_COLORS["infllm"]: ("infllm", "#85711a", "#d0ba55"),
    POLICY_COLORS["sliding_window"]: ("sliding-window", "#b0588f", "#e59cc8"),
    SPARE_COLORS[0]: ("spare-1", "#5d7183", "#a9bccd"),
    SPARE_COLORS[1]: ("spare-2", "#94624a", "#d3a08a"),
    SPARE_COLORS[2]: ("spare-3", "#33807a", "#7fcbc3"),
}


def looks(names: Iterable[tuple[str, str]]) -> dict[str, Look]:
    """A look for each (policy, name): the policy's own for its first name, then spare colours."""
    found: dict[str, Look] = {}
    spare = 0
    for policy, name in dict.fromkeys(names):
        own = _POLICIES.get(policy)
        if own is None or own in found.values():
            mark = _MARKS[-1 - spare % len(_MARKS)]
            own = Look(SPARE_COLORS[spare % len(SPARE_COLORS)], *mark)
            spare += 1
        found[name] = own
    return found


def size_text(size: float) -> str:
    """A size for people: 512 B, 1.5 KiB, 3.2 MiB."""
    unit = 0
    # What would be written as 1024.0 is one of the next unit.
    while unit < len(SIZE_UNITS) - 1 and size >= (1023.5 if unit == 0 else 1023.95):
        size /= 1024
        unit += 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {SIZE_UNITS[unit]}"


def size_scale(sizes: Iterable[float]) -> tuple[str, Callable[[float], str]]:
    """One unit for sizes that stand below each other, and what writes them in it."""
    known = [size for size in sizes if size > 0] or [0.0]
    unit = 0
    while unit < len(SIZE_UNITS) - 1 and max(known) >= 1024 ** (unit + 1):
        unit += 1
    while unit > 0 and min(known) < _LEAST_SHOWN * 1024**unit:
        unit -= 1
    decimals = 0 if unit == 0 else 2 if max(known) < 100 * 1024**unit else 1
    return SIZE_UNITS[unit], lambda size: f"{size / 1024**unit:,.{decimals}f}"
