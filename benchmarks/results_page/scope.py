"""What the bundled model can and cannot show about a policy, for docs/results/scope.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.results_page.tasks import ASKED, FULL
from benchmarks.results_page.text import paragraph, percent, source, written
from keyhole.config import EngineConfig
from keyhole.eval.line_file import Line
from keyhole.eval.report.cells import Cell, cells

_PAGE_SIZE = EngineConfig().page_size
#: Policies that do not select, and those that read whole pages.
_UNSELECTIVE, _BY_PAGE = ("sliding_window", "streaming_llm"), ("delta", "quest")
#: Settings that list the layers that read everything.
_DENSE = ("full_layers", "delta_layers", "selection_layers", "filter_layers")
_HEADS = (
    "task",
    "policy",
    "dense layers",
    "budget",
    "newest tokens, always read",
    "chosen by score",
    "right, %",
    "95 % interval",
)


def section(lines: Sequence[Line]) -> list[str]:
    """Paragraphs and the table of dense layers; empty without lines of that measurement."""
    if not lines:
        return []
    order = list(ASKED)
    own = [cell for cell in cells(lines) if cell.policy != FULL]
    own.sort(key=lambda cell: (order.index(cell.place.task), cell.policy))
    return [
        "## What `tiny` can and cannot tell",
        paragraph(
            "The first bundled model, `keyhole-tiny`, has 6 layers and 2.2 M parameters, and was "
            "trained on its own small language. Its training started with a look-up mechanism "
            "built into layers 0 to 2 (`recipes/tiny_model/initial.py`), and it still looks "
            "everything up there. A policy that reads these three layers in full, and the newest "
            "16 tokens in the others, therefore answers correctly without selecting anything. "
            "`tidal_decode`, which reads as much in full but has no such window, answers nothing "
            "correctly. "
            f"{_about(lines)}"
        ),
        written(_HEADS, [_row(cell) for cell in own]),
        source(lines),
        "\n".join(_points()),
    ]


def _points() -> list[str]:
    """The conclusions for the reader, as a list."""
    return [
        "It can show:",
        "",
        "- whether the engine computes what a policy specifies: with a budget that covers the "
        "text, the answers are those of full attention;",
        "- how many keys and bytes a configuration reads per step;",
        "- what a configuration loses as its own budget shrinks, with nothing else changed, if "
        "the layers of the look-up are sparse.",
        "",
        "It cannot show:",
        "",
        "- whether DELTA selects good pages. DELTA reads layers 0 to 2 in full here, and a policy "
        "that does so without selecting anything is right as well. If its selection has to find "
        "the facts (layer 0 dense, layer 1 selects), few answers are right;",
        "- which selection rule is better, if settings differ. That needs the same dense layers, "
        "first tokens, window and budget for all, and a control that selects nothing, as in the "
        "tables [at equal terms](tiny.md#equal-terms);",
        "- what a method does in a model whose look-ups are spread over many layers.",
    ]


def dense_layers(settings: Mapping[str, Any]) -> list[int]:
    """Layers that read everything in every step, selection layers included.

    settings: a policy's resolved settings, as stored in a line.
    """
    lists = (settings.get(name) or () for name in _DENSE)
    return sorted({layer for layers in lists for layer in layers})


def _row(cell: Cell) -> list[str]:
    newest = _newest(cell)
    low, high = cell.interval or (0.0, 1.0)
    return [
        f"`{cell.place.task}`",
        f"`{cell.policy}`",
        _layers(dense_layers(cell.settings)),
        f"{cell.budget:,}",
        str(newest),
        str((cell.budget or 0) - newest - int(cell.settings.get("sink_size") or 0)),
        percent(cell.score),
        f"{percent(low)} to {percent(high)}",
    ]


def _newest(cell: Cell) -> int:
    """Newest tokens of the budget that are always read; pages count as full."""
    settings = cell.settings
    if cell.policy in _UNSELECTIVE:
        return (cell.budget or 0) - int(settings.get("sink_size") or 0)
    if cell.policy in _BY_PAGE:
        pages = settings.get("recent_pages") or -(-(settings.get("window_size") or 1) // _PAGE_SIZE)
        return int(pages) * _PAGE_SIZE
    return int(settings.get("window_size") or 1)


def _layers(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"


def _about(lines: Sequence[Line]) -> str:
    full = [cell.score or 0 for cell in cells(lines) if cell.policy == FULL] or [0]
    samples, lengths = ({int(line[name]) for line in lines} for name in ("samples", "length"))
    return (
        f"{_numbers(samples)} samples of {_numbers(lengths)} tokens for each row; full attention "
        f"has {' to '.join(dict.fromkeys((percent(min(full)), percent(max(full)))))} %. Of DELTA's "
        "dense layers the last one selects:"
    )


def _numbers(values: set[int]) -> str:
    """One number, or the smallest and the largest."""
    return " to ".join(f"{value:,}" for value in sorted({min(values), max(values)}))
