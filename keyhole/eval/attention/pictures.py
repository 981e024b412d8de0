"""The suite's page, and its curves as PNG files. Needs matplotlib.

One picture has a panel per method, with its error by layer and that of its controls. The other
shows the overlap with other layers and with later steps, next to chance, the newest entries and the
random twin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from keyhole.drawing import FAINT, INK, PALE, heading, matplotlib
from keyhole.errors import ConfigError
from keyhole.eval.attention import tables
from keyhole.eval.attention.suite import METHOD, RANDOM, TRAINED
from keyhole.eval.attention.tables import (
    AttentionSetting,
    SummaryRow,
    curve,
    places,
)
from keyhole.eval.line_file import Line
from keyhole.eval.report.cells import runs_of
from keyhole.eval.report.page import environment, save_page, style_sheet
from keyhole.eval.report.plot_style import FILL, SVG_STYLE, MethodStyle, inline_svg, method_styles

#: Size of a panel in inches, panels per row, and inches for title and legend.
_PANEL = (2.25, 1.75)
_COLUMNS = 4
_HEAD = 0.75
_DOT = {"marker": ".", "markersize": 4, "linewidth": 1.1}
_CONTROLS: dict[str, tuple[str, dict[str, Any]]] = {
    "recent": ("recent control", {**_DOT, "color": INK, "linestyle": "--"}),
    "random": ("random control", {**_DOT, "color": FAINT, "linestyle": ":"}),
    "oracle": ("oracle", {**_DOT, "color": INK, "linewidth": 0.8}),
}
_METHOD: dict[str, Any] = {"color": FILL, "linewidth": 1.7, "marker": "o", "markersize": 4}
_DENSE: dict[str, Any] = {"color": PALE, "marker": "s", "markersize": 9, "linestyle": ""}
_TWIN: dict[str, Any] = {"color": FILL, "linewidth": 1.7, "alpha": 0.35}
_LISTS = {
    "pages": "pages, one list for all heads",
    "head_tokens": "tokens, a list per KV head",
}


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A picture: name, size in inches, description, and the function `draw(figure)`."""

    name: str
    size: tuple[float, float]
    label: str
    draw: Callable[[Any], None]


def drawings(place: AttentionSetting) -> list[Drawing]:
    """The pictures of one length, budget and terms."""
    found = []
    rows = [row for row, _ in place.measured.values() if row.read]
    if rows:
        lines = math.ceil(len(rows) / _COLUMNS)
        found.append(
            Drawing(
                name="loss",
                size=(_PANEL[0] * min(len(rows), _COLUMNS), _PANEL[1] * lines + _HEAD),
                label="relative error of the attention output by layer, for each method",
                draw=lambda figure: _losses(figure, place, rows),
            )
        )
    if place.overlaps:
        found.append(
            Drawing(
                name="overlap",
                size=(2 * _PANEL[0] * 1.9, 2 * _PANEL[1] * 1.25 + _HEAD),
                label="overlap of top lists with other layers and later steps",
                draw=lambda figure: _overlaps(figure, place),
            )
        )
    return found


def _losses(figure: Any, place: AttentionSetting, rows: list[SummaryRow]) -> None:
    style = method_styles((row.line["policy"], row.name) for row in rows)
    columns = min(len(rows), _COLUMNS)
    lines = math.ceil(len(rows) / columns)
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axis, row in zip(axes.flat, rows, strict=False):
        _loss(axis, row, style[row.name], place.row(row.name, RANDOM))
    for axis in axes.flat[len(rows) :]:
        axis.set_visible(False)
    for number, axis in enumerate(axes.flat[: len(rows)]):
        axis.tick_params(labelbottom=number + columns >= len(rows))  # no panel below
    axes[0, 0].set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xlabel("layer")
    kinds = {"the method": _METHOD, "the method, random weights": _TWIN}
    kinds |= dict(_CONTROLS.values()) | {"dense": _DENSE}
    handles = [axes[0, 0].plot([], [], **style)[0] for style in kinds.values()]
    figure.legend(
        handles, list(kinds), loc="outside lower center", ncols=6, frameon=False, fontsize=8
    )
    heading(
        figure,
        f"{place.model}: relative error of the attention output, {place.length:,} tokens, "
        f"budget {place.budget:,}",
    )


def _loss(axis: Any, row: SummaryRow, look: MethodStyle, twin: SummaryRow | None) -> None:
    layers = row.line["layers"]
    axis.set_title(row.name)
    axis.grid(axis="y")
    axis.set_xticks(layers if len(layers) <= 12 else layers[:: math.ceil(len(layers) / 8)])
    for dense in row.dense_layers:
        axis.axvspan(dense - 0.5, dense + 0.5, color=PALE, linewidth=0)
    for who, (_, style) in _CONTROLS.items():
        if who in row.line["losses"] and not row.reads_more:
            axis.plot(layers, _by_layer(row.line, who), **style)
    if twin is not None:
        axis.plot(layers, _by_layer(twin.line, METHOD), **{**_TWIN, "color": look.color})
    own = {**_METHOD, "color": look.color, "marker": look.mark}
    axis.plot(layers, _by_layer(row.line, METHOD), **own)
    if row.reads_more:
        text = f"reads {row.read[METHOD]:,.0f} tokens:\nno controls of as many"
        axis.text(0.97, 0.93, text, transform=axis.transAxes, ha="right", va="top", fontsize=7)


def _by_layer(line: Line, who: str) -> list[float]:
    """The error of every layer, mean over texts; NaN where the policy is dense."""
    rows = line["losses"][who]["error"]
    return [
        math.nan if layer in line["dense_layers"] else sum(one[i] for one in rows) / len(rows)
        for i, layer in enumerate(line["layers"])
    ]


def _overlaps(figure: Any, place: AttentionSetting) -> None:
    axes = figure.subplots(2, 2, sharey=True, squeeze=False, width_ratios=(1, 1.6))
    for (near, later), (kind, title) in zip(axes, _LISTS.items(), strict=True):
        for weights, style in ((TRAINED, {"color": FILL}), (RANDOM, {"color": FAINT})):
            line = place.overlaps.get(weights)
            if line is None or kind not in line["lists"]:
                continue
            found = line["lists"][kind]
            name = place.model if weights == TRAINED else "random weights"
            far, steps = curve(found["by_distance"]), curve(found["by_steps"])
            near.plot(range(1, len(far) + 1), far, label=name, marker="o", markersize=3, **style)
            places = [i for i, share in enumerate(steps, 1) if share is not None]
            later.plot(places, [steps[i - 1] for i in places], label=name, **style)
            if weights == TRAINED:
                newest = sum(found["newest"]) / len(found["newest"])
                near.axhline(newest, color=INK, linestyle="--", linewidth=1)
                _recency(later, place)
                for axis in (near, later):
                    axis.axhline(found["chance"], color=INK, linestyle=":", linewidth=1)
        for axis in (near, later):
            axis.grid(axis="y")
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        near.set_title(title)
        near.set_ylabel("share found again")
    axes[0, 0].set_ylim(0, 1)
    axes[1, 0].set_xlabel("full-attention layers apart")
    axes[1, 1].set_xlabel("decode steps later")
    colored = axes[0, 0].get_legend_handles_labels()
    dashed = [axes[0, 0].plot([], [], color=INK, linestyle=s, linewidth=1)[0] for s in ("--", ":")]
    figure.legend(
        [*colored[0], *dashed],
        [*colored[1], "the first and the newest entries instead", "chance"],
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8,
    )
    heading(
        figure,
        f"{place.model}: overlap of the largest attention, {place.length:,} tokens, "
        f"lists of {place.budget:,} tokens",
    )


def _recency(axis: Any, place: AttentionSetting) -> None:
    """How much of a window of the newest tokens is in the same window some steps later."""
    assert place.budget is not None
    steps = range(1, 65)
    shares = [max(0.0, 1 - step / place.budget) for step in steps]
    axis.plot(steps, shares, color=INK, linestyle="--", linewidth=1)


def write_page(lines: Sequence[Line], path: str | Path) -> None:
    """Writes the page of the suite's lines; ConfigError without lines, or if it cannot."""
    save_page(render(lines), path)


def render(lines: Sequence[Line]) -> str:
    """The page as text."""
    found = places(lines)
    if not found:
        raise ConfigError("there are no lines to report; run `keyhole eval --suite attention`")
    shown = [
        {
            "title": tables.title(place),
            "tables": tables.tables(place),
            "pictures": _inline(place, i),
        }
        for i, place in enumerate(found)
    ]
    return (
        environment()
        .get_template("attention.html")
        .render(
            style_sheet=Markup(style_sheet()),
            model=", ".join(dict.fromkeys(place.model for place in found)),
            places=shown,
            how_to_read=tables.HOW_TO_READ,
            runs=runs_of(lines)[0],
        )
    )


def _inline(place: AttentionSetting, number: int) -> list[Markup]:
    pyplot, found = matplotlib()[0], []
    for drawing in drawings(place):
        with pyplot.rc_context(SVG_STYLE):
            figure = pyplot.figure(figsize=drawing.size, layout="constrained")
            drawing.draw(figure)
            svg = inline_svg(figure, f"{drawing.name}{number}", drawing.label, titles={})
            pyplot.close(figure)
        # matplotlib escapes text, and inline_svg what it adds.
        found.append(Markup(svg))
    return found
