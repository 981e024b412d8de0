"""What all pictures have in common: ink, lines, letters, and matplotlib, if it is there."""

from __future__ import annotations

from typing import Any

from keyhole.errors import ConfigError

INK, FAINT, PALE = "#22303c", "#8795a1", "#eef1f4"
DPI = 160
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titlepad": 4,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "grid.color": PALE,
    "figure.dpi": DPI,
}


def matplotlib() -> tuple[Any, Any, Any]:
    """Matplotlib's `pyplot`, `colors` and `patches`, for files; ConfigError if it is not there."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import colors, patches, pyplot
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib: pip install keyhole[plot]") from error
    return pyplot, colors, patches
