"""A picture of how much a document's blocks matter, layer by layer. Needs matplotlib.

SamKV (arXiv 2508.11661, appendix A.1) judges a block by how slowly the attention falls that its
representative token receives (alpha), and by how much that is; it compares blocks of one layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyhole.documents.record import LayerStatistics
from keyhole.drawing import FAINT, PALE, STYLE, matplotlib
from keyhole.errors import ConfigError
from keyhole.reuse.block_scores import outliers

_DARK, _MARK = "#0b6e75", "#e08e4f"
_WIDTH = 9.0


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

    Dark matters most. Blocks that are outliers of alpha, of which SamKV computes a token again
    where it keeps them, are framed. ConfigError if it cannot be written.
    """
    pyplot, colors, _ = matplotlib()
    alpha = torch.stack([layer.alpha for layer in layers])
    received = torch.stack([layer.received for layer in layers])
    body = max(0.06, min(0.2, 3.2 / len(layers))) * len(layers)
    shades = colors.LinearSegmentedColormap.from_list("rank", [PALE, _DARK])
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            2, 1, figsize=(_WIDTH, 2 * body + 1.9), sharex=True, layout="constrained"
        )
        _map(axes[0], 1 - ranks(alpha).numpy(), shades)
        axes[0].set_title("slowest fall of the attention that it receives (alpha)")
        axes[0].set_title(subtitle, loc="right", fontsize=8, color=FAINT)
        _frame_outliers(axes[0], outliers(alpha).numpy())
        _map(axes[1], ranks(received).numpy(), shades)
        axes[1].set_title("most attention received")
        axes[1].set_xlabel("block")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write the picture {str(path)!r}: {error}") from error
        finally:
            pyplot.close(figure)


def _map(axis: Any, shares: np.ndarray, shades: Any) -> None:
    """A map of numbers [L, N] from 0 to 1; white where there is none."""
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
