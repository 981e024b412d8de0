"""Draws the diagrams of docs/ as SVG: `python -m benchmarks.diagrams`.

    docs/images/step.svg        one step, from the queue to the sampled tokens
    docs/images/page-table.svg  page tables of two sequences, and what one page holds
    docs/images/tiers.svg       resident and offloaded layers, and what moves between them

A test compares the files with `render()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from keyhole.drawing import INK, POLICY_COLORS

ACCENT = POLICY_COLORS["quest"]
PLAIN = "#eef1f4"
_FONT = "font-family='system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif'"


@dataclass
class Canvas:
    """Shapes on a white card, in pixels from the upper left corner."""

    width: int
    height: int
    title: str
    shapes: list[str] = field(default_factory=list)

    def box(
        self, x: int, y: int, width: int, height: int, text: str = "", fill: str = PLAIN
    ) -> None:
        """A rectangle with centred lines of text."""
        self.shapes.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='5' fill='{fill}' "
            f"stroke='{INK}' stroke-opacity='0.35'/>"
        )
        lines = text.split("\n") if text else []
        top = y + height / 2 - 8.5 * (len(lines) - 1)
        for i, line in enumerate(lines):
            self.text(x + width / 2, top + 17 * i + 4.5, line, bold=i == 0, anchor="middle")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        bold: bool = False,
        anchor: str = "start",
        small: bool = False,
    ) -> None:
        """A line of text whose baseline starts at the point, or is centred there."""
        weight = " font-weight='600'" if bold else ""
        size = 12 if small else 13
        self.shapes.append(
            f"<text x='{x:g}' y='{y:g}' font-size='{size}' text-anchor='{anchor}'{weight}>"
            f"{escape(text)}</text>"
        )

    def arrow(self, *points: tuple[int, int], color: str = INK, dashed: bool = False) -> None:
        """A line through the points, with an arrowhead at its end."""
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self.shapes.append(
            f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='1.6'{dash} "
            f"marker-end='url(#{'accent' if color == ACCENT else 'ink'})'/>"
        )

    def svg(self) -> str:
        """The whole file."""
        heads = "".join(
            f"<marker id='{name}' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' "
            f"markerHeight='7' orient='auto-start-reverse'>"
            f"<path d='M0,0 L10,5 L0,10 z' fill='{color}'/></marker>"
            for name, color in (("ink", INK), ("accent", ACCENT))
        )
        shapes = "\n".join(self.shapes)
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' "
            f"width='{self.width}' height='{self.height}' role='img' {_FONT} fill='{INK}'>\n"
            f"<title>{escape(self.title)}</title>\n<defs>{heads}</defs>\n"
            f"<rect width='{self.width}' height='{self.height}' rx='8' fill='#ffffff'/>\n"
            f"{shapes}\n</svg>\n"
        )


IMAGES = Path(__file__).parents[2] / "docs" / "images"

#: Fill colours: decisions of the policy, selected data, background.
_DECIDES, _SELECTED, _PALE = "#f6dcc6", "#bcdedb", "#f7f9fa"


def render() -> dict[str, str]:
    """The text of each SVG file, by file name."""
    return {
        "step.svg": _step().svg(),
        "page-table.svg": _pages().svg(),
        "tiers.svg": _tiers().svg(),
    }


def _step() -> Canvas:
    canvas = Canvas(860, 400, "The life of one step")
    canvas.box(20, 30, 130, 60, "Requests\nwait in a queue")
    canvas.box(195, 30, 140, 60, "Scheduler\npicks tokens")
    canvas.box(380, 30, 140, 60, "Runner\npacks one row")
    canvas.box(565, 30, 120, 60, "Sampler\nnext tokens")
    canvas.box(730, 30, 110, 60, "Text\nand counters")
    canvas.arrow((150, 60), (195, 60))
    canvas.arrow((335, 60), (380, 60))
    canvas.arrow((520, 60), (565, 60))
    canvas.arrow((685, 60), (730, 60))
    canvas.text(20, 135, "In the forward pass of transformers, for every layer:", bold=True)
    canvas.box(20, 150, 820, 100, fill=_PALE)
    canvas.box(40, 170, 160, 60, "Projections\nqueries, keys, values")
    canvas.box(250, 170, 150, 60, "Append\nkeys, values to pages")
    canvas.box(450, 170, 150, 60, "Select\nwhich pages to read", fill=_DECIDES)
    canvas.box(650, 170, 170, 60, "Attend\nto the selection")
    canvas.arrow((200, 200), (250, 200))
    canvas.arrow((400, 200), (450, 200))
    canvas.arrow((600, 200), (650, 200))
    canvas.arrow((450, 90), (450, 150))
    canvas.text(20, 292, "KV cache: pages of 16 tokens", bold=True)
    for i in range(24):
        read = i in (0, 3, 8, 9, 15, 22, 23)
        canvas.box(20 + 34 * i, 305, 30, 36, fill=_SELECTED if read else _PALE)
    canvas.arrow((325, 230), (325, 268), (817, 268), (817, 303))
    canvas.arrow((783, 303), (783, 232), color=ACCENT)
    canvas.text(
        20,
        368,
        "Coloured pages are read in this step; the others stay in the cache for later steps.",
    )
    canvas.text(
        20,
        388,
        "Orange: the policy decides. Prompt tokens read everything; “Select” is skipped.",
        small=True,
    )
    return canvas


def _pages() -> Canvas:
    canvas = Canvas(860, 400, "Page tables of two sequences, and what one page holds")
    canvas.text(20, 30, "Page tables", bold=True)
    canvas.text(20, 66, "A: 40 tokens")
    canvas.text(20, 116, "B: 18 tokens")
    for i, number in enumerate((3, 8, 5)):
        canvas.box(130 + 54 * i, 44, 48, 34, str(number), fill=_SELECTED if number == 3 else PLAIN)
    for i, number in enumerate((3, 9)):
        canvas.box(130 + 54 * i, 94, 48, 34, str(number), fill=_SELECTED if number == 3 else PLAIN)
    canvas.text(310, 66, "Page 3 is shared: both sequences begin with")
    canvas.text(310, 84, "the same 16 tokens. It has two references.")
    canvas.text(310, 116, "The last page of each is partly filled.")
    canvas.text(20, 172, "Pages of one layer", bold=True)
    for i in range(10):
        used = i in (3, 5, 8, 9)
        fill = (_SELECTED if i == 3 else PLAIN) if used else _PALE
        canvas.box(20 + 82 * i, 184, 74, 34, str(i) if used else "", fill=fill)
    canvas.arrow((303, 218), (303, 250))
    canvas.text(320, 240, "the same page number in every layer", small=True)
    canvas.box(20, 254, 820, 130, fill=_PALE)
    canvas.text(36, 280, "Page 3 of one layer", bold=True)
    canvas.text(36, 304, "per KV head:")
    for i, head in enumerate(("head 0", "head 1")):
        y = 290 + 44 * i
        canvas.box(150, y, 330, 36, f"{head}: keys of 16 tokens", fill=_SELECTED)
        canvas.box(484, y, 340, 36, "values of 16 tokens", fill=_SELECTED)
    return canvas


def _tiers() -> Canvas:
    canvas = Canvas(860, 380, "Resident and offloaded layers")
    canvas.box(20, 20, 820, 180, fill=_PALE)
    canvas.text(36, 46, "Memory of the device (GPU, or RAM on a CPU)", bold=True)
    canvas.box(36, 62, 150, 120, "Weights\nand the tensors\nof a step")
    canvas.box(206, 62, 300, 120, "Resident layers 0 … k\nall their pages")
    canvas.box(
        526,
        62,
        298,
        120,
        "Buffers of layers k+1 … L-1\ntoken_budget tokens per request:\nthe last selection",
        fill=_SELECTED,
    )
    canvas.box(20, 270, 820, 90, fill=_PALE)
    canvas.text(
        36, 296, "Offload memory (host RAM for a GPU, a folder on disk for a CPU)", bold=True
    )
    canvas.box(526, 282, 298, 64, "Offloaded layers k+1 … L-1\nall their pages")
    canvas.text(36, 322, "The last layers are offloaded first, one by one,")
    canvas.text(36, 342, "as sequences grow. They return when memory is free.")
    canvas.arrow((620, 282), (620, 184), color=ACCENT)
    canvas.text(610, 226, "before a layer attends: tokens that are", anchor="end")
    canvas.text(610, 244, "selected now and were not in the last step", anchor="end")
    canvas.arrow((740, 184), (740, 280), dashed=True)
    canvas.text(752, 240, "new tokens")
    return canvas
