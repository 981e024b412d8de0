"""What docs/results.md was to show, and whether the stored lines show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keyhole.evaluate.cells import Cell
from keyhole.evaluate.looks import NOTHING
from keyhole.evaluate.results_cells import ASKED, Table, cheapest_as_right, gain_over_fixed, paired
from keyhole.evaluate.results_text import kib, paragraph, percent, ratio, written

_RIVALS = ("quest", "raas", "streaming_llm")
_HEADS = (
    "task",
    "length",
    "policy",
    "`recall`",
    "right, %",
    "keys, %",
    "KiB",
    "to fixed",
    "as right from, KiB",
)
_WITHIN = 2.0
"""Points that DELTA may be below full attention."""


@dataclass(frozen=True)
class Claim:
    """Something that was to be reached, and whether it was."""

    text: str
    is_met: bool

    def __str__(self) -> str:
        return f"- {self.text}{'' if self.is_met else ' (missed)'}"


def claims(own: Sequence[Cell]) -> list[Claim]:
    """DELTA at an eighth of each length beside full attention and others; only what is measured."""
    table, found = Table(own), []
    for length in sorted({cell.place.length for cell in own}):
        delta, full = table.get("delta", length, length // 8), table.full(length)
        where = f"{length:,} tokens, `delta` at {length // 8:,}"
        if delta is None or delta.score is None:
            continue
        if full is not None and full.score is not None:
            points = 100 * (delta.score - full.score)
            text = (
                f"{where}: {points:+.1f} points to full attention, wanted >= -{_WITHIN:g} "
                f"({_alone(delta, full)})"
            )
            found.append(Claim(text, round(points, 6) >= -_WITHIN))
        words = ratio(delta, full)
        if words is not None:
            text = f"{where}: {words:.3f} of the words of full attention, wanted <= 1"
            found.append(Claim(text, words <= 1))
        for name in _RIVALS:
            rival = table.get(name, length, length // 8)
            if rival is None or rival.score is None:
                continue
            text = (
                f"{where}: {100 * (delta.score - rival.score):+.1f} points to `{name}`, wanted > 0 "
                f"({_alone(delta, rival)})"
            )
            found.append(Claim(text, delta.score > rival.score))
    return found


def _alone(one: Cell, other: Cell) -> str:
    alone, others = paired(one, other)
    return f"alone right: {alone} to {others} samples"


def adaptive(found: Sequence[Cell]) -> list[str]:
    """Paragraphs: whether budgets that follow the text are worth it, point by point."""
    order = list(ASKED)
    own = [cell for cell in found if cell.settings.get("recall") is not None]
    own.sort(key=lambda c: (order.index(c.place.task), c.place.length, c.policy))
    if not own:
        return []
    gains = [gain_over_fixed(cell, found) for cell in own]
    rows = [
        [
            f"`{cell.place.task}`",
            f"{cell.place.length:,}",
            f"`{cell.policy}`",
            f"{cell.settings['recall']:g}",
            percent(cell.score),
            percent(cell.read_share),
            kib(cell.bytes_per_step),
            NOTHING if gain is None else f"{100 * gain:+.1f}",
            kib(cheapest_as_right(cell, found)),
        ]
        for cell, gain in zip(own, gains, strict=True)
    ]
    known = [gain for gain in gains if gain is not None]
    below = sum(gain < 0 for gain in known)
    cheaper = sum(
        cell.bytes_per_step is not None
        and (least := cheapest_as_right(cell, found)) is not None
        and least < cell.bytes_per_step
        for cell in own
    )
    verdict = (
        f"Of {len(known)} points that can be compared {len(known) - below} lie on or above the "
        f"curve, {below} below it."
        if known
        else "No point can be compared yet."
    )
    verdict += f" In {cheaper} of {len(own)} a fixed budget is as right for fewer bytes."
    return [
        "### Budgets that follow the text",
        paragraph(
            "With `recall` a policy reads only as much as holds that share of its scores: here "
            "from about a sixteenth to a half of the length. *To fixed* compares with the curve of "
            "the same policy's fixed budgets at as many bytes, in points: on a line between the "
            "two budgets next to it, over the logarithm of bytes; above the largest budget with "
            "that one, below the smallest not at all. *As right from*: what the least fixed "
            f"budget reads that has as many right answers. {verdict}"
        ),
        written(_HEADS, rows),
    ]
