"""The cells of an evaluation beside their controls, as a table for people.

A row is a method; its controls are columns. A row that says "cannot tell" is of a place where the
recent control is within 5 points of full attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keyhole.eval.results.comparisons import ORACLE, RANDOM, RECENT, Comparison, compared, wilson_of
from keyhole.eval.results.conditions import CONTROL
from keyhole.eval.results.line_file import Line
from keyhole.eval.results.paired import Gain
from keyhole.eval.results.table import NOT_EQUAL, EvalTable, Text, grouped, laid_out, of

#: Smaller p values are written so.
_LEAST_P = 0.001


def table(measured: Sequence[Line], refused: Sequence[Line]) -> EvalTable:
    """A row for each method; `refused` come last in their group of task, length and setup.

    Shares and gains are in points of a hundred. A value that a cell does not have is "-".
    """
    beside = dict(zip(map(id, measured), compared(measured), strict=True))
    lines = grouped([line for line in (*measured, *refused) if line.get(CONTROL) is None])

    def seen(text: Callable[[Comparison], str]) -> Text:
        def cell(line: Line) -> str:
            found = beside.get(id(line))
            return "-" if found is None else text(found)

        return cell

    def right(line: Line) -> str:
        if "error" in line:
            return NOT_EQUAL if line.get("unequal") else "refused"
        found = beside.get(id(line))
        share = line["score"] if found is None else found.score
        interval = wilson_of(line.get("scores")) if found is None else found.interval
        text = (
            "" if interval is None else " ({:.0f} to {:.0f})".format(*(100 * x for x in interval))
        )
        return f"{100 * share:.1f}{text}"

    return laid_out(
        lines,
        {
            "budget": of("budget", "{:,}".format),
            "right, %": right,
            RECENT: seen(lambda found: _share(found.controls.get(RECENT))),
            RANDOM: seen(lambda found: _share(found.controls.get(RANDOM))),
            ORACLE: seen(lambda found: _share(found.controls.get(ORACLE))),
            "gain on recent": seen(lambda found: gain_text(found.gain)),
            "p": seen(lambda found: p_text(found.gain)),
            "to oracle": seen(lambda found: _share(found.distance)),
            "keys read": of("read_share", "{:.1%}".format),
            "KiB/step": of("bytes_per_step", lambda size: f"{size / 1024:,.1f}"),
            "ms": of("step_ms", "{:.1f}".format),
            "note": lambda line: note(line, beside.get(id(line))),
        },
    )


def note(line: Line, found: Comparison | None) -> str:
    """What a reader has to know of a row: whether it tells anything, and what the budget lacks."""
    parts = []
    if found is not None and found.can_tell is False:
        parts.append("cannot tell")
    if line.get("outside_budget"):
        parts.append(f"beside the budget: {line['outside_budget']}")
    if line.get("terms_note"):
        parts.append(line["terms_note"])
    return "; ".join(parts)


def gain_text(gain: Gain | None) -> str:
    """Points and their interval: +12.0 (4.1 to 20.3)."""
    if gain is None:
        return "-"
    return f"{100 * gain.points:+.1f} ({100 * gain.low:.1f} to {100 * gain.high:.1f})"


def p_text(gain: Gain | None) -> str:
    """Three decimals."""
    if gain is None:
        return "-"
    return f"<{_LEAST_P}" if gain.p < _LEAST_P else f"{gain.p:.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
