"""A picture of a plan: layers on each tier against the length of the texts. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from keyhole.drawing import FAINT, PALE, STYLE, matplotlib
from keyhole.errors import ConfigError
from keyhole.planner import MemoryPlan

#: Resident as what reads everything, offloaded as what is chosen from, as in other pictures.
_ABOVE, _BELOW = "#0b6e75", "#e08e4f"
_NAMES = {_ABOVE: "resident", _BELOW: "offloaded (RAM or disk)", PALE: "no room"}


def plan_chart(plan: MemoryPlan, lengths: Sequence[int], path: str | Path, *, title: str) -> None:
    """Writes a PNG: the layers of each tier stacked, from the first to the last of `lengths`."""
    pyplot = matplotlib()[0]
    depth = len(plan.model.layers)
    first, last = min(lengths), max(lengths)
    # A single length still gets a width.
    first, last = (first, last) if first < last else (max(1, first // 2), last * 2)
    with pyplot.rc_context(STYLE):
        figure, axis = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
        shown = set()
        for left, right, offloaded in _spans(plan, first, last):
            above = depth - (offloaded or 0)
            parts = [(_ABOVE, 0, above), (_BELOW, above, depth)]
            for color, low, high in [(PALE, 0, depth)] if offloaded is None else parts:
                if low < high:
                    axis.fill_between([left, right], low, high, color=color, linewidth=0)
                    shown.add(color)
        for color, name in _NAMES.items():
            if color in shown:
                axis.fill_between([], [], color=color, label=name)
        axis.set_xscale("log", base=2)
        ticks = sorted(set(lengths))
        axis.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=30 if len(ticks) > 8 else 0)
        axis.minorticks_off()
        axis.set_xlim(first, last)
        axis.set_ylim(0, depth)
        axis.set_xlabel("tokens of each text")
        axis.set_ylabel("layers")
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        subtitle = f"all layers resident up to {plan.thresholds[0]:,} tokens"
        axis.set_title(subtitle, loc="left", fontsize=8, color=FAINT)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write the picture {str(path)!r}: {error}") from error
        finally:
            pyplot.close(figure)


def _spans(plan: MemoryPlan, first: int, last: int) -> Iterator[tuple[int, int, int | None]]:
    """From length, to length, offloaded layers (None: no room), without gaps from first to last."""
    left = first
    for offloaded, longest in enumerate(plan.thresholds):
        right = min(longest, last)
        if right > left:
            yield left, right, offloaded
            left = right
    if left < last:
        yield left, last, None
