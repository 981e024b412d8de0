"""Figures of methods and their controls: scores against bytes, and lengths of answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results_page.controls import HOPS, SCRATCH, TERMS
from keyhole.drawing import picture
from keyhole.errors import ConfigError
from keyhole.eval.comparisons import ORACLE, RANDOM, RECENT
from keyhole.eval.line_file import Line
from keyhole.eval.methods import CONTROL
from keyhole.eval.report.cells import Cell, cells, place_name, places
from keyhole.eval.report.charts import draw_pareto, points
from keyhole.eval.report.plot_style import MethodStyle, method_styles

#: Task of the answers whose lengths are shown, and the budget that each model has at the longest.
_TASK = "tiny_derive"
_LENGTHS = {"equal": 128, HOPS + "equal": 512, SCRATCH + "equal": 512}
_CONTROLS = (RECENT, RANDOM, ORACLE)
#: Size of a panel in inches, and panels per row.
_PANEL, _PANELS_ACROSS = (3.5, 2.7), 3


def names(lines: Mapping[str, Sequence[Line]]) -> dict[str, str]:
    """Name -> file of the figures that these lines give."""
    every = [*TERMS, *(HOPS + name for name in TERMS)]
    found = {name: f"claims-{name}.png" for name in every if lines.get(name)}
    for name in _LENGTHS:
        if shown(lines, name):
            model = name.removesuffix("equal")
            found[f"{model}lengths"] = f"{model}answer-lengths.png"
    return found


def write(lines: Mapping[str, Sequence[Line]], folder: Path) -> None:
    """Draws all figures. Needs matplotlib."""
    for name, file in names(lines).items():
        if name.endswith("lengths"):
            _lengths(shown(lines, name.replace("lengths", "equal")), folder / file)
        else:
            terms = TERMS[name.removeprefix(HOPS)][0].lower()
            title = f"Right answers against bytes read per step: {terms}"
            pareto_chart(cells(lines[name]), folder / file, title=title)


def shown(lines: Mapping[str, Sequence[Line]], part: str) -> dict[tuple[str, str], np.ndarray]:
    """Tokens of each answer of a part to the longest derivations, ascending, by policy and name."""
    own = lines.get(part, ())
    asked = [line for line in own if line["task"] == _TASK and line.get("answer_lengths")]
    longest = max((line["length"] for line in asked), default=0)
    return {
        (line["policy"], str(line.get(CONTROL) or line["method"])): np.sort(
            np.asarray(line["answer_lengths"])
        )
        for line in asked
        if line["length"] == longest and line["budget"] in (_LENGTHS[part], None)
    }


def _lengths(found: Mapping[tuple[str, str], np.ndarray], path: Path) -> None:
    """The cumulative distribution of each method, as steps; controls are dashed. Other forms of a
    method, whose names have a setting, are left out.
    """
    style: dict[str, MethodStyle] = method_styles(found)
    with picture(path, figsize=(7, 4), layout="constrained") as figure:
        axes = figure.subplots()
        for (_, name), lengths in found.items():
            if ":" in name:
                continue
            shares = np.arange(1, len(lengths) + 1) / len(lengths)
            look = {"color": style[name].color, "linestyle": "--" if name in _CONTROLS else "-"}
            axes.step(lengths, shares, where="post", label=name, **look)
        axes.set_xlabel("tokens of an answer")
        axes.set_ylabel("share of answers")
        axes.legend(fontsize=7, ncols=2)


def pareto_chart(cells: Sequence[Cell], path: str | Path, *, title: str) -> None:
    """Writes a figure with a panel per task and length; ConfigError if there is nothing to draw."""
    by_place = {at: own for at, own in places(cells).items() if points(own)}
    if not by_place:
        raise ConfigError("no line has both a score and bytes_per_step; there is nothing to draw")
    columns = min(_PANELS_ACROSS, len(by_place))
    rows = math.ceil(len(by_place) / columns)
    style = method_styles((cell.policy, cell.name) for cell in cells)
    size = (_PANEL[0] * columns, _PANEL[1] * rows + 0.7)
    with picture(path, title, figsize=size, layout="constrained") as figure:
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis in axes.flat[len(by_place) :]:
            axis.set_visible(False)
        handles: dict[str, Any] = {}
        for axis, (at, own) in zip(axes.flat, by_place.items(), strict=False):
            draw_pareto(axis, own, style)
            axis.set_title(place_name(at, by_place))
            handles.update(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False
        )
