"""The shared style of all plots, and the import of matplotlib, which is optional."""

from __future__ import annotations

from pathlib import Path
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
    "text.parse_math": False,  # a name may have dollars in it
}


#: A policy has one colour in all pictures; policies of others take the spare ones, one by one.
POLICY_COLORS = {
    "full": INK,
    "delta": "#e08e4f",
    "quest": "#0b6e75",
    "streaming_llm": "#7a5ea8",
    "spe_context": "#b03a48",
    "tidal_decode": "#4c8c4a",
    "omnikv": "#2f6fb0",
    "infllm": "#8f7a1c",
    "sliding_window": "#b0588f",
}
SPARE_COLORS = ("#5d7183", "#94624a", "#3f8f86")


def matplotlib() -> tuple[Any, Any, Any]:
    """Matplotlib's `pyplot`, `colors` and `patches`, for files; ConfigError if it is not there."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import colors, patches, pyplot
    except ImportError as error:
        raise ConfigError('a picture needs matplotlib: pip install "keyhole[plot]"') from error
    return pyplot, colors, patches


def save(figure: Any, path: str | Path) -> None:
    """Writes a figure, by the ending of its path; ConfigError if it cannot be written."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {str(path)!r}: {error}") from error
