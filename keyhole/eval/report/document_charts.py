"""Pictures of stored documents, layer by layer: how much each block matters, and which blocks a
question keeps.

SamKV (arXiv 2508.11661, appendix A.1) ranks the blocks of a layer by how slowly the attention that
their representative token receives decays (alpha), and by the amount of that attention. What a
question keeps is drawn with the documents side by side as in the prompt, one cell per block. Needs
matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyhole.documents.record import LayerStatistics
from keyhole.drawing import FAINT, INK, PALE, matplotlib, picture
from keyhole.engine.documents.filling import Reused
from keyhole.reuse.block_scores import only_middle, outliers
from keyhole.reuse.sam_kv import default_ends

_DARK, _MARK = "#0b6e75", "#e08e4f"
_DOCUMENT_WIDTH = 9.0


def ranks(values: Tensor) -> Tensor:
    """Rank of each number [L, N] in its row, 0 (least) to 1; NaN for infinite ones. float32."""
    places = values.argsort(dim=1, stable=True).argsort(dim=1).float()
    finite = values.isfinite()
    last = (finite.sum(1, keepdim=True) - 1).clamp(min=1)
    return (places / last).masked_fill(~finite, torch.nan)


def document_chart(
    layers: Sequence[LayerStatistics], path: str | Path, *, title: str, subtitle: str = ""
) -> None:
    """Writes a PNG: blocks ranked within their layer, by alpha above, by attention below.

    Dark blocks matter most. Framed blocks are middle blocks that are outliers of alpha: if SamKV
    keeps one, it recomputes a token of it. ConfigError if the file cannot be written.
    """
    colors = matplotlib()[1]
    alpha = torch.stack([layer.alpha for layer in layers])
    received = torch.stack([layer.received for layer in layers])
    body = max(0.06, min(0.2, 3.2 / len(layers))) * len(layers)
    shades = colors.LinearSegmentedColormap.from_list("rank", [PALE, _DARK])
    size = (_DOCUMENT_WIDTH, 2 * body + 1.9)
    with picture(path, title, figsize=size, layout="constrained") as figure:
        axes = figure.subplots(2, 1, sharex=True)
        _map(axes[0], 1 - ranks(alpha).numpy(), shades)
        axes[0].set_title("slowest decay of the received attention (alpha)")
        axes[0].set_title(subtitle, loc="right", fontsize=8, color=FAINT)
        _frame_outliers(axes[0], outliers(only_middle(alpha, default_ends(alpha.shape[1]))).numpy())
        _map(axes[1], ranks(received).numpy(), shades)
        axes[1].set_title("most attention received")
        axes[1].set_xlabel("block")


def _map(axis: Any, shares: np.ndarray, shades: Any) -> None:
    """Draws a map of numbers [L, N] from 0 to 1; white where there is none."""
    axis.imshow(
        np.ma.masked_invalid(shares),
        aspect="auto",
        cmap=shades.with_extremes(bad="white"),
        vmin=0,
        vmax=1,
        extent=(0, shares.shape[1], len(shares), 0),
    )
    numbers = range(0, len(shares), math.ceil(len(shares) / 8))
    axis.set_yticks([number + 0.5 for number in numbers], [str(number) for number in numbers])
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_ylabel("layer")


def _frame_outliers(axis: Any, where: np.ndarray) -> None:
    layers, blocks = where.nonzero()
    if not len(layers):
        return
    marks = {"marker": "s", "s": 22, "facecolors": "none", "linewidths": 1.2}
    axis.scatter(blocks + 0.5, layers + 0.5, edgecolors=_MARK, label="outlier of alpha", **marks)
    place = {"loc": "upper left", "bbox_to_anchor": (0, -0.02), "borderaxespad": 0}
    axis.legend(frameon=False, fontsize=8, **place)


#: As in the other pictures: kept, recomputed, and dropped.
_KEPT, _WRITTEN, _DROPPED = "#0b6e75", "#e08e4f", "#dde3e9"
#: Inches: the width, margins, and the space for names above and shares below a line.
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 9.0, 0.5, 0.1, 0.62, 0.38
_ABOVE, _BELOW = 0.24, 0.2
#: Minimum and maximum cells per line, and maximum number of lines.
_FEWEST, _MOST, _MOST_LINES = 24, 110, 14
#: Gap between two documents, in cells.
_GAP = 0.7
#: Smallest filled share of a cell: one token of 64 would be invisible.
_LEAST_FILL = 0.22
#: Letters per line, font size in points, and fewest letters of a useful label.
_LETTERS, _LETTER_SIZE, _FEWEST_LETTERS = 130, 7, 6


@dataclass(frozen=True, eq=False)
class Cells:
    """One document's blocks: float [L, N], the shares of each block that are kept and
    recomputed.
    """

    name: str
    kept: np.ndarray
    recomputed: np.ndarray


def cells(reused: Reused, lengths: Sequence[int], block_size: int) -> list[Cells]:
    """The blocks of every document of a prompt. lengths: tokens of each, in the same order."""
    edges = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    return [
        Cells(
            name,
            _shares(reused.kept[:, start:stop], block_size),
            _shares(reused.recomputed[:, start:stop], block_size),
        )
        for name, start, stop in zip(reused.documents, edges[:-1], edges[1:], strict=True)
    ]


def _shares(tokens: Tensor, block_size: int) -> np.ndarray:
    """Mean of bool [L, n] over blocks, the last of which may be short, float [L, N]."""
    firsts = np.arange(0, tokens.shape[1], block_size)
    sizes = np.minimum(block_size, tokens.shape[1] - firsts)
    sums: np.ndarray = np.add.reduceat(tokens.numpy().astype(np.float64), firsts, axis=1)
    return sums / sizes


def kept_chart(
    reused: Reused,
    lengths: Sequence[int],
    block_size: int,
    path: str | Path,
    *,
    title: str,
    subtitle: str = "",
) -> None:
    """Writes a PNG; lengths: tokens of each document. ConfigError if the file cannot be written."""
    patches = matplotlib()[2]
    documents = cells(reused, lengths, block_size)
    lines, room = _lines([document.kept.shape[1] for document in documents])
    depth = len(reused.kept)
    body = max(0.07, min(0.17, 2.8 / depth)) * depth
    below = _BELOW if reused.shares is not None else 0
    whole = _TOP + (_ABOVE + body + below) * len(lines) + _BOTTOM
    names = _names(reused.documents, lines, room)
    with picture(path, figsize=(_WIDTH, whole)) as figure:
        for number, line in enumerate(lines):
            low = whole - _TOP - (_ABOVE + body + below) * (number + 1) + below
            size = (_WIDTH - _LEFT - _RIGHT) / _WIDTH, body / whole
            axis = figure.add_axes((_LEFT / _WIDTH, low / whole, *size))
            _frame(axis, depth, room)
            taken = -1.0
            for piece in line:
                _draw(axis, documents[piece.document], piece, thin=room > 3 * _MOST)
                taken = _name(axis, names[piece.document], piece, room, taken)
                if reused.shares is not None:
                    _share(axis, reused.shares[piece.document], piece, room)
        handles = [patches.Patch(color=color, label=text) for color, text in _legend(reused)]
        figure.legend(
            handles=handles, loc="lower left", ncols=3, frameon=False, fontsize=8, borderaxespad=0.2
        )
        left = 0.1 / _WIDTH
        figure.text(left, 1 - 0.12 / whole, title, va="top", fontsize=11, fontweight="bold")
        figure.text(left, 1 - 0.36 / whole, subtitle, va="top", fontsize=8, color=FAINT)
        if any(name.isdigit() for name in names):
            note = "numbers: positions in the prompt"
            figure.text(0.99, 0.1 / whole, note, ha="right", fontsize=8, color=FAINT)


def _legend(reused: Reused) -> Iterator[tuple[str, str]]:
    """Colours and labels of the kinds of cells in the picture."""
    stored = reused.kept & ~reused.recomputed
    again = reused.recomputed
    if bool(stored.any()):
        yield _KEPT, "kept as stored"
    if bool(again.any()):
        yield _WRITTEN, "recomputed (the filled share of a block)"
    if not bool(reused.kept.all()):
        yield _DROPPED, "dropped"


@dataclass(frozen=True)
class _Piece:
    """Blocks `first` to `last` of a document, from cell `place` of a line on."""

    document: int
    first: int
    last: int
    place: float

    @property
    def size(self) -> int:
        return self.last - self.first


def _lines(sizes: Sequence[int]) -> tuple[list[list[_Piece]], float]:
    """Lays out documents of these sizes (in blocks) like words on a page; returns the lines, and
    the cells per line.

    A document that is longer than a line continues in the next one.
    """
    total = sum(sizes) + _GAP * (len(sizes) - 1)
    room = max(_FEWEST, total) if total <= _MOST else max(_MOST, math.ceil(total / _MOST_LINES))
    lines: list[list[_Piece]] = [[]]
    place = 0.0
    for document, size in enumerate(sizes):
        first = 0
        while first < size:
            left = int(room - place + 1e-6)
            if left < min(size, room) and lines[-1] and (left < 1 or size <= room):
                lines.append([])
                place, left = 0.0, int(room)
            last = min(size, first + left)
            lines[-1].append(_Piece(document, first, last, place))
            place += last - first + _GAP
            first = last
    return lines, room


def _frame(axis: Any, depth: int, room: float) -> None:
    axis.set_xlim(0, room)
    axis.set_ylim(depth, 0)
    axis.spines[:].set_visible(False)
    axis.set_xticks([])
    step = max(1, math.ceil(depth / 8))
    numbers = list(range(0, depth, step))
    axis.set_yticks([number + 0.5 for number in numbers], [str(number) for number in numbers])
    axis.tick_params(axis="y", length=0, labelsize=7)
    axis.set_ylabel("layer", fontsize=8)


def _draw(axis: Any, document: Cells, piece: _Piece, *, thin: bool) -> None:
    """Draws the cells of a piece; thin ones without gaps."""
    width, high = (1.0, 1.0) if thin else (0.84, 0.8)
    for layer in range(len(document.kept)):
        top = layer + (1 - high) / 2
        runs: dict[str, list[tuple[float, float]]] = {_KEPT: [], _DROPPED: []}
        for number, kept in enumerate(document.kept[layer, piece.first : piece.last]):
            runs[_KEPT if kept > 0 else _DROPPED].append((piece.place + number, width))
        for color, run in runs.items():
            axis.broken_barh(run, (top, high), facecolors=color, linewidth=0)
        for start, fill in _fills(document.recomputed[layer], piece):
            part = high * fill
            axis.broken_barh(
                [(start, width)], (top + high - part, part), facecolors=_WRITTEN, linewidth=0
            )


def _fills(recomputed: np.ndarray, piece: _Piece) -> Iterator[tuple[float, float]]:
    """The cells that are recomputed, and the share of each that is filled."""
    for number, share in enumerate(recomputed[piece.first : piece.last].tolist()):
        if share > 0:
            yield piece.place + number, max(share, _LEAST_FILL)


def _names(names: Sequence[str], lines: Sequence[Sequence[_Piece]], room: float) -> list[str]:
    """The label above each document: as much of its name as fits, or its position in the prompt
    (from 1) if too little would fit.
    """
    first = {piece.document: piece for line in reversed(lines) for piece in reversed(line)}
    # A folder that all names share is left out, as in handbook/a.md and handbook/b.md.
    folder = f"{names[0].rpartition('/')[0]}/"
    shared = all(name.startswith(folder) for name in names)
    short = [name.removeprefix(folder) if shared else name for name in names]
    letters = [int((first[i].size + _GAP) / room * _LETTERS) - 1 for i in range(len(names))]
    pairs = list(zip(short, letters, strict=True))
    # Names of one kind often differ at their end.
    tried = [[elide(*pair) for pair in pairs] for elide in (_without_middle, _without_start)]
    best = max(tried, key=lambda texts: len(set(texts)))
    meant: dict[str, set[str]] = {}
    for text, name in zip(best, names, strict=True):
        meant.setdefault(text, set()).add(name)
    return [
        text if len(meant[text]) == 1 and (text == name or len(text) >= _FEWEST_LETTERS) else str(i)
        for i, (text, name) in enumerate(zip(best, short, strict=True), start=1)
    ]


def _name(axis: Any, name: str, piece: _Piece, room: float, taken: float) -> float:
    """Writes the label above a document's cells, unless the previous label is in the way.

    taken: end of the previous label of the line, in letters; returns the new one.
    """
    start = piece.place / room * _LETTERS
    if start < taken + 1:
        return taken
    text = f"{name}, from block {piece.first}" if piece.first else name
    _write(axis, text, piece.place, 0, 3, INK)
    return start + len(text)


def _share(axis: Any, share: float, piece: _Piece, room: float) -> None:
    """Writes SamKV's P of a document below its cells, if it fits."""
    text = f"P {share:.2f}"
    if (piece.size + _GAP) / room * _LETTERS >= len(text) and piece.first == 0:
        _write(axis, text, piece.place, axis.get_ylim()[0], -8, FAINT)


def _write(axis: Any, text: str, x: float, y: float, points: float, color: str) -> None:
    """Writes text at cell x, this many points above the line y."""
    axis.annotate(
        text,
        (x, y),
        (0, points),
        textcoords="offset points",
        fontsize=_LETTER_SIZE,
        color=color,
        annotation_clip=False,
    )


def _without_middle(name: str, letters: int) -> str:
    """The two ends of a name, in at most this many letters."""
    if len(name) <= letters:
        return name
    tail = max(0, letters - 1) // 2
    return f"{name[: max(0, letters - 1 - tail)]}…{name[len(name) - tail :]}"


def _without_start(name: str, letters: int) -> str:
    """The end of a name, in at most this many letters."""
    return name if len(name) <= letters else f"…{name[len(name) - max(0, letters - 1) :]}"
