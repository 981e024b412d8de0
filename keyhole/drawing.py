"""The shared style of all plots, and the import of matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keyhole.errors import ConfigError, why

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


@contextmanager
def picture(
    path: str | Path, title: str = "", date: str | None = None, **options: Any
) -> Iterator[Any]:
    """A figure in the shared style; it is written when the block ends, by the ending of `path`.

    title: at the top left. date: the description in the file, which tells whether a picture is
    older than its results. options: of matplotlib's `figure`. ConfigError if it cannot be written.
    """
    pyplot = matplotlib()[0]
    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(**options)
        try:
            if title:
                heading(figure, title)
            yield figure
            _save(figure, path, date)
        finally:
            pyplot.close(figure)


def _save(figure: Any, path: str | Path, date: str | None) -> None:
    metadata = None if date is None else {"Description": date, "Software": None}
    try:
        figure.savefig(path, metadata=metadata)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {str(path)!r}: {why(error)}") from error


def heading(figure: Any, text: str) -> None:
    """Puts the title of a figure at its top left."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold")
