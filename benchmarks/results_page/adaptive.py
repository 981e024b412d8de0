"""The section on adaptive budgets in docs/results/, from the stored lines."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.results_page.cells import ASKED, cheapest_as_right, gain_over_fixed
from benchmarks.results_page.text import kib, paragraph, percent, written
from keyhole.eval.report.cells import Cell
from keyhole.eval.report.plot_style import NOTHING

_HEADS = (
    "task",
    "length",
    "policy",
    "`recall`",
    "right, %",
    "keys, %",
    "KiB",
    "gain on fixed",
    "matched at, KiB",
)


def section(found: Sequence[Cell]) -> list[str]:
    """Paragraphs and a table: the gain of adaptive budgets, point by point."""
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
    verdict += (
        f" In {cheaper} of {len(own)} a fixed budget has as many right answers for fewer bytes."
    )
    return [
        "## Adaptive budgets",
        paragraph(
            "With the setting `recall` a policy reads only as many tokens as hold that share of "
            "its scores: here from about a sixteenth to a half of the length. *Gain on fixed* is "
            "the difference in points to the same policy's fixed budgets at as many bytes: "
            "interpolated between the two neighbouring budgets, over the logarithm of bytes; "
            "compared with the largest budget above it, and missing below the smallest. *Matched "
            "at*: bytes read by the smallest fixed budget with at least as many right answers. "
            f"{verdict} The rows of `delta` show what is read, but not whether the selection "
            "matters: with layers 0 to 2 dense its answers hardly depend on the budget."
        ),
        written(_HEADS, rows),
    ]
