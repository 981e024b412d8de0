"""Score against bytes read: what each method pays for what it gets, budget by budget.

A point is one method with one budget. It lies on the front if no other reads as little and scores
as much; a point whose recent control is as good as full attention is not. Full attention is the
dashed line: the score that the others are to reach. Grey marks are controls: x the newest tokens,
+ the oracle. Needs matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.drawing import FAINT, INK, STYLE, matplotlib, save
from keyhole.errors import ConfigError
from keyhole.eval.report.plot_style import PAPER, Look, looks, size_text
from keyhole.eval.results.cells import Cell, number, place_name, places
from keyhole.eval.results.comparisons import ORACLE, RECENT

FULL = "full"
#: Inches of a panel, and how many stand side by side.
_PANEL, _COLUMNS = (3.5, 2.7), 3
#: Marks of the controls.
_CONTROLS = {RECENT: "x", ORACLE: "+"}


@dataclass(frozen=True, kw_only=True)
class Point:
    """Bytes read in a decode step, and the score from 0 to 1 with its interval if it has one.

    The score of a perplexity is 1 / perplexity, so that more is better.
    """

    cell: Cell
    bytes_per_step: float
    score: float
    interval: tuple[float, float] | None
    on_front: bool

    @property
    def text(self) -> str:
        """What the point says, in words."""
        low_high = "" if self.interval is None else " ({:.0%} to {:.0%})".format(*self.interval)
        read = size_text(self.bytes_per_step)
        said = f"{self.score:.1%}{low_high}"
        if self.cell.place.is_perplexity:
            said = f"perplexity {1 / self.score:.2f}" if self.score else "no perplexity"
        return f"{self.cell.label}: {said}, {read} a step"


def points(cells: Sequence[Cell]) -> dict[str, list[Point]]:
    """By name the points of one place, small budgets first; cells without both numbers have none.

    A point is on the front unless another has at least its score for at most its bytes, and is
    better in one of them.
    """
    known = [
        (cell, cell.bytes_per_step, cell.score)
        for cell in cells
        if cell.bytes_per_step is not None and cell.bytes_per_step > 0 and cell.score is not None
    ]
    found: dict[str, list[Point]] = {}
    for cell, read, score in known:
        beaten = any(
            less <= read and more >= score and (less, more) != (read, score)
            for other, less, more in known
            if other.tells
        )
        point = Point(
            cell=cell,
            bytes_per_step=read,
            score=score,
            interval=cell.interval,
            on_front=cell.tells and not beaten,
        )
        found.setdefault(cell.name, []).append(point)
    for own in found.values():
        own.sort(key=lambda point: point.bytes_per_step)
    return found


def pareto_chart(cells: Sequence[Cell], path: str | Path, *, title: str) -> None:
    """Writes a picture, a panel for each task and length; ConfigError if nothing is to be drawn."""
    pyplot = matplotlib()[0]
    by_place = {at: own for at, own in places(cells).items() if points(own)}
    if not by_place:
        raise ConfigError("no line has both a score and bytes_per_step; there is nothing to draw")
    columns = min(_COLUMNS, len(by_place))
    rows = math.ceil(len(by_place) / columns)
    style = looks((cell.policy, cell.name) for cell in cells)
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            rows,
            columns,
            figsize=(_PANEL[0] * columns, _PANEL[1] * rows + 0.7),
            squeeze=False,
            layout="constrained",
        )
        for axis in axes.flat[len(by_place) :]:
            axis.set_visible(False)
        handles: dict[str, Any] = {}
        for axis, (at, own) in zip(axes.flat, by_place.items(), strict=False):
            draw(axis, own, style)
            axis.set_title(place_name(at, by_place))
            handles.update(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False
        )
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        save(figure, path)
        pyplot.close(figure)


def draw(axis: Any, cells: Sequence[Cell], style: Mapping[str, Look]) -> dict[str, str]:
    """Draws the cells of one place into an axis; gives what each point says, by its SVG id."""
    found = points(cells)
    texts: dict[str, str] = {}
    for name, own in found.items():
        look = style[name]
        across = [point.bytes_per_step for point in own]
        if own[0].cell.policy == FULL:
            axis.axhline(own[0].score, color=INK, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)
        axis.plot(across, [point.score for point in own], color=look.color, linewidth=1.5)
        for point in own:
            texts[identity := f"point-{len(texts)}"] = point.text
            _mark(axis, point, look, identity)
        axis.plot([], [], look.mark, linestyle="-", color=look.color, label=name, markersize=5)
    every = [point for own in found.values() for point in own]
    beside = control_points(cells)
    for name, read, score in beside:
        axis.plot(read, score, _CONTROLS[name], color=FAINT, markersize=5, zorder=3)
    _scale(axis, [point.bytes_per_step for point in every] + [read for _, read, _ in beside])
    if any(point.cell.place.is_perplexity for point in every):
        axis.set_ylim(0, 1.1 * max(point.score for point in every) or 1.0)
        axis.locator_params(axis="y", nbins=5)
        axis.set_ylabel("1 / perplexity")
    else:
        axis.set_ylim(-0.02, 1.04)
        axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
        axis.set_ylabel("score, %")
    return texts


def control_points(cells: Sequence[Cell]) -> list[tuple[str, float, float]]:
    """Name, bytes and score of the controls beside some cells, each once."""
    found = []
    for cell in cells:
        comparison = cell.comparison
        for name in _CONTROLS:
            if comparison is not None and name in comparison.lines:
                read = number(comparison.lines[name].get("bytes_per_step"))
                if read:
                    found.append((name, read, comparison.controls[name]))
    return list(dict.fromkeys(found))


def _mark(axis: Any, point: Point, look: Look, identity: str) -> None:
    """A mark, filled on the front, and the score's interval."""
    if point.interval is not None:
        x, (low, high) = point.bytes_per_step, point.interval
        axis.plot([x, x], [low, high], color=look.color, linewidth=3, alpha=0.2, zorder=1)
    axis.plot(
        point.bytes_per_step,
        point.score,
        look.mark,
        color=look.color,
        markerfacecolor=look.color if point.on_front else PAPER,
        markersize=6,
        clip_on=False,
        gid=identity,
        zorder=4,
    )


def _scale(axis: Any, read: Sequence[float]) -> None:
    low, high = min(read) / 1.25, max(read) * 1.25
    axis.set_xscale("log", base=2)
    axis.set_xlim(low, high)
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    every = math.ceil(len(powers) / 5)
    ticks = [2.0**power for power in powers if power % every == 0]
    axis.set_xticks(ticks, [_tick(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_axisbelow(True)
    axis.grid(axis="y")
    axis.tick_params(length=0, labelcolor=FAINT)
    axis.set_xlabel("read per decode step")


def _tick(size: float) -> str:
    """A power of two without its decimals: 512 KiB."""
    return size_text(size).replace(".0 ", " ")
