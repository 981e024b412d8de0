"""Pictures by layer: pages read, the recall of a calibration, and a memory plan. Needs
matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.drawing import DPI, FAINT, INK, PALE, matplotlib, picture
from keyhole.eval.calibrate import Measurement
from keyhole.eval.policy_trace import Trace
from keyhole.planner import MemoryPlan
from keyhole.policies.selection_layers import Calibration

#: Colour and description of each role of a layer: see `calibrate.Role`.
_COLORS = {"full": "#b4c3d2", "selects": "#e08e4f", "sparse": "#0b6e75", "window": "#d5dce3"}
_DOES = {
    "full": "reads everything",
    "selects": "reads everything and selects",
    "sparse": "reads {:.0%}",
}
_WIDTH = 9.0
#: Inches of a panel, and how panels are laid out.
_FLAT, _TALL = 0.55, 1.6
_MOST_STACKED, _GRID_COLUMNS = 6, 4


def page_map(
    trace: Trace,
    path: str | Path,
    *,
    title: str,
    prompt_tokens: int,
    delta_layers: tuple[int, ...] = (),
) -> None:
    """Writes a picture of the pages that each layer read: one panel per layer, steps to the right.

    Pages that were read in full are dark, existing pages that were not read are pale, pages that do
    not exist yet are white. Up to six layers are stacked, with flat panels for those that read
    everything; more layers form a grid.
    """
    colors = matplotlib()[1]
    layers = trace.layers
    shares = {layer: trace.pages_read(layer) for layer in layers}
    kinds = {layer: _kind(layer, shares[layer], delta_layers) for layer in layers}
    size = trace.steps[0].page_size
    columns = 1 if len(layers) <= _MOST_STACKED else _GRID_COLUMNS
    rows = math.ceil(len(layers) / columns)
    heights = [
        _FLAT if columns == 1 and kinds[layers[i]] != "sparse" else _TALL for i in range(rows)
    ]
    inches = (_WIDTH, sum(heights) + 0.3 * rows + 0.8)
    with picture(path, title, figsize=inches, layout="constrained") as figure:
        axes = figure.subplots(
            rows, columns, height_ratios=heights, sharex=True, sharey=True, squeeze=False
        )
        for axis in axes.flat[len(layers) :]:
            axis.set_visible(False)
        for layer, axis in zip(layers, axes.flat, strict=False):
            kind = kinds[layer]
            shades = colors.LinearSegmentedColormap.from_list(kind, [PALE, _COLORS[kind]])
            shades = shades.with_extremes(bad="white")
            num_pages, num_steps = shares[layer].shape
            axis.imshow(
                _binned(shares[layer], _WIDTH * DPI / columns),
                origin="lower",
                aspect="auto",
                interpolation="nearest",
                cmap=shades,
                vmin=0,
                vmax=1,
                extent=(0, num_steps, 0, num_pages),
            )
            axis.axhline(prompt_tokens / size, color=INK, linewidth=0.7, linestyle=(0, (4, 3)))
            axis.set_title(f"layer {layer}")
            text = _DOES[kind].format(np.nanmean(shares[layer]))
            axis.set_title(text, loc="right", color=FAINT if kind == "full" else _COLORS[kind])
        last = axes.flat[len(layers) - 1]
        last.text(
            0.995,
            prompt_tokens / size,
            "generated ↑\nprompt ↓",
            transform=last.get_yaxis_transform(),
            ha="right",
            va="center",
            fontsize=7,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
        )
        figure.supxlabel("decode step", fontsize=9)
        figure.supylabel(f"page of {size} tokens", fontsize=9)


def _binned(shares: np.ndarray, pixels: float) -> np.ndarray:
    """Averages neighbouring steps, so that each bin has two pixels and none is lost to
    rasterising.
    """
    per_bin = math.ceil(2 * shares.shape[1] / pixels)
    pad = -shares.shape[1] % per_bin
    padded = np.pad(shares, ((0, 0), (0, pad)), mode="edge")
    bins = padded.reshape(len(shares), -1, per_bin)
    exists = ~np.isnan(bins)
    total = np.where(exists, bins, 0).sum(2)
    count = exists.sum(2)
    mean: np.ndarray = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    return mean


def recall_chart(found: Measurement, placed: Calibration, path: str | Path) -> None:
    """Writes a picture of a calibration: the expected recall of each layer, and all that was
    measured.

    Left: bars per layer. Right: share of layer b's attention (column) on the pages that layer a
    (row) would select; the placement in use is framed.
    """
    _, colors, patches = matplotlib()
    depth = placed.num_layers
    title = f"DELTA on {placed.model}: {placed.method} placement, budget {placed.token_budget}"
    widths = (4.6 + 0.17 * depth, 3.6)
    with picture(path, title, figsize=(sum(widths), 3.7), layout="constrained") as figure:
        bars, square = figure.subplots(1, 2, width_ratios=widths)
        roles = [role.kind for role in found.roles(placed.full_layers, placed.delta_layers)]
        bars.bar(range(depth), placed.recall, color=[_COLORS[role] for role in roles], width=0.72)
        for role in dict.fromkeys(roles):
            bars.bar(0, 0, color=_COLORS[role], label=_LEGEND[role])
        bars.set_ylim(0, 1)
        bars.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        bars.set_xlim(-0.6, depth - 0.4)
        bars.set_xticks(range(0, depth, 1 if depth <= 16 else 4))
        bars.set_xlabel("layer")
        bars.set_title("attention kept by each layer")
        bars.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=3, frameon=False, fontsize=8)
        _recall_square(square, found, placed, colors, patches)


_LEGEND = {
    "full": "reads everything",
    "selects": "and selects",
    "sparse": "reads a selection",
    "window": "has its own window",
}


def _recall_square(
    axis: Any, found: Measurement, placed: Calibration, colors: Any, patches: Any
) -> None:
    """The matrix recall[a, b] of the full-attention layers, with the cells in use framed."""
    layers = list(found.layers)
    values = np.array(found.recall)[np.ix_(layers, layers)]
    values[np.tril_indices(len(layers), -1)] = np.nan
    shades = colors.LinearSegmentedColormap.from_list("recall", ["#ffffff", _COLORS["sparse"]])
    image = axis.imshow(values, cmap=shades, vmin=0, vmax=1)
    ticks = range(0, len(layers), 1 if len(layers) <= 16 else 4)
    for axis_of in (axis.xaxis, axis.yaxis):
        axis_of.set_ticks(list(ticks), [str(layers[i]) for i in ticks])
    roles = found.roles(placed.full_layers, placed.delta_layers)
    for b, layer in enumerate(layers):
        chooser = roles[layer].chooser
        if chooser is not None:
            corner = (b - 0.5, layers.index(chooser) - 0.5)
            axis.add_patch(
                patches.Rectangle(corner, 1, 1, fill=False, ec=_COLORS["selects"], lw=1.4)
            )
    axis.set_xlabel("read by layer")
    axis.set_ylabel("selected by layer")
    axis.set_title("every pair, measured")
    axis.spines[:].set_visible(False)
    axis.figure.colorbar(image, ax=axis, shrink=0.7, format=lambda value, _: f"{value:.0%}")


def _kind(layer: int, shares: np.ndarray, delta_layers: tuple[int, ...]) -> str:
    """The role of a layer: "selects", "full" or "sparse"."""
    if layer in delta_layers:
        return "selects"
    return "full" if np.nanmin(shares) == 1 else "sparse"


#: Colours of resident and offloaded layers.
_RESIDENT, _OFFLOADED = "#0b6e75", "#e08e4f"
_NAMES = {_RESIDENT: "resident", _OFFLOADED: "offloaded (RAM or disk)", PALE: "no room"}


def plan_chart(plan: MemoryPlan, lengths: Sequence[int], path: str | Path, *, title: str) -> None:
    """Writes a PNG: the layers of each tier stacked, from the first to the last of `lengths`."""
    depth = len(plan.model.layers)
    first, last = min(lengths), max(lengths)
    # A single length still gets a width.
    first, last = (first, last) if first < last else (max(1, first // 2), last * 2)
    with picture(path, title, figsize=(7.2, 3.6), layout="constrained") as figure:
        axis = figure.subplots()
        shown = set()
        for left, right, offloaded in _spans(plan, first, last):
            resident = depth - (offloaded or 0)
            parts = [(_RESIDENT, 0, resident), (_OFFLOADED, resident, depth)]
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
        axis.set_xlabel("tokens of each sequence")
        axis.set_ylabel("layers")
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        subtitle = f"all layers resident up to {plan.thresholds[0]:,} tokens"
        axis.set_title(subtitle, loc="left", fontsize=8, color=FAINT)


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
