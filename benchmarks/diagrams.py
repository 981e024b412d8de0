"""Draws the diagrams of docs/ as SVG: `python -m benchmarks.diagrams`.

    docs/images/step.svg        the life of one step, from the queue to the sampled tokens
    docs/images/page-table.svg  page tables of two sequences, and what one page holds
    docs/images/tiers.svg       resident and offloaded layers, and what moves between them

A test compares the files with `render()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from keyhole.drawing import INK, POLICY_COLORS

IMAGES = Path(__file__).parents[1] / "docs" / "images"

#: Fills: plain boxes, what a policy decides, what is selected, memory that is not attended to.
_PLAIN, _DECIDES, _SELECTED, _PALE = "#eef1f4", "#f6dcc6", "#bcdedb", "#f7f9fa"
_ACCENT = POLICY_COLORS["quest"]
_FONT = "font-family='system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif'"


@dataclass
class Drawing:
    """Shapes on a white card, in pixels from the upper left corner."""

    width: int
    height: int
    title: str
    shapes: list[str] = field(default_factory=list)

    def box(
        self, x: int, y: int, width: int, height: int, text: str = "", fill: str = _PLAIN
    ) -> None:
        """A rectangle, with lines of text in its middle."""
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
        """A line of text, whose base line starts (or has its middle) at the point."""
        weight = " font-weight='600'" if bold else ""
        size = 12 if small else 13
        self.shapes.append(
            f"<text x='{x:g}' y='{y:g}' font-size='{size}' text-anchor='{anchor}'{weight}>"
            f"{escape(text)}</text>"
        )

    def arrow(self, *points: tuple[int, int], color: str = INK, dashed: bool = False) -> None:
        """A line through the points, with a head at its end."""
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self.shapes.append(
            f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='1.6'{dash} "
            f"marker-end='url(#{'accent' if color == _ACCENT else 'ink'})'/>"
        )

    def svg(self) -> str:
        """The whole file."""
        heads = "".join(
            f"<marker id='{name}' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' "
            f"markerHeight='7' orient='auto-start-reverse'>"
            f"<path d='M0,0 L10,5 L0,10 z' fill='{color}'/></marker>"
            for name, color in (("ink", INK), ("accent", _ACCENT))
        )
        shapes = "\n".join(self.shapes)
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' "
            f"width='{self.width}' height='{self.height}' role='img' {_FONT} fill='{INK}'>\n"
            f"<title>{escape(self.title)}</title>\n<defs>{heads}</defs>\n"
            f"<rect width='{self.width}' height='{self.height}' rx='8' fill='#ffffff'/>\n"
            f"{shapes}\n</svg>\n"
        )


def render() -> dict[str, str]:
    """The text of each SVG file, by its name."""
    return {
        "step.svg": _step().svg(),
        "page-table.svg": _pages().svg(),
        "tiers.svg": _tiers().svg(),
    }


def _step() -> Drawing:
    drawing = Drawing(860, 400, "The life of one step")
    drawing.box(20, 30, 130, 60, "Requests\nwait in a queue")
    drawing.box(195, 30, 140, 60, "Scheduler\npicks tokens")
    drawing.box(380, 30, 140, 60, "Runner\npacks one row")
    drawing.box(565, 30, 120, 60, "Sampler\nnext tokens")
    drawing.box(730, 30, 110, 60, "Text\nand counters")
    drawing.arrow((150, 60), (195, 60))
    drawing.arrow((335, 60), (380, 60))
    drawing.arrow((520, 60), (565, 60))
    drawing.arrow((685, 60), (730, 60))
    drawing.text(20, 135, "In the forward pass of transformers, for every layer:", bold=True)
    drawing.box(20, 150, 820, 100, fill=_PALE)
    drawing.box(40, 170, 160, 60, "Projections\nqueries, keys, values")
    drawing.box(250, 170, 150, 60, "Append\nkeys, values to pages")
    drawing.box(450, 170, 150, 60, "Select\nwhich pages to read", fill=_DECIDES)
    drawing.box(650, 170, 170, 60, "Attend\nto the selection")
    drawing.arrow((200, 200), (250, 200))
    drawing.arrow((400, 200), (450, 200))
    drawing.arrow((600, 200), (650, 200))
    drawing.arrow((450, 90), (450, 150))
    drawing.text(20, 292, "KV cache: pages of 16 tokens", bold=True)
    for i in range(24):
        read = i in (0, 3, 8, 9, 15, 22, 23)
        drawing.box(20 + 34 * i, 305, 30, 36, fill=_SELECTED if read else _PALE)
    drawing.arrow((325, 230), (325, 268), (817, 268), (817, 303))
    drawing.arrow((783, 303), (783, 232), color=_ACCENT)
    drawing.text(
        20,
        368,
        "Coloured pages are read in this step; the others stay in the cache for later steps.",
    )
    drawing.text(
        20,
        388,
        "Orange: the policy decides. Prompt tokens read everything; “Select” is skipped.",
        small=True,
    )
    return drawing


def _pages() -> Drawing:
    drawing = Drawing(860, 400, "Page tables of two sequences, and what one page holds")
    drawing.text(20, 30, "Page tables", bold=True)
    drawing.text(20, 66, "A: 40 tokens")
    drawing.text(20, 116, "B: 18 tokens")
    for i, number in enumerate((3, 8, 5)):
        drawing.box(
            130 + 54 * i, 44, 48, 34, str(number), fill=_SELECTED if number == 3 else _PLAIN
        )
    for i, number in enumerate((3, 9)):
        drawing.box(
            130 + 54 * i, 94, 48, 34, str(number), fill=_SELECTED if number == 3 else _PLAIN
        )
    drawing.text(310, 66, "Page 3 is shared: both sequences begin with")
    drawing.text(310, 84, "the same 16 tokens. It has two references.")
    drawing.text(310, 116, "The last page of each is partly filled.")
    drawing.text(20, 172, "Pages of one layer", bold=True)
    for i in range(10):
        used = i in (3, 5, 8, 9)
        fill = (_SELECTED if i == 3 else _PLAIN) if used else _PALE
        drawing.box(20 + 82 * i, 184, 74, 34, str(i) if used else "", fill=fill)
    drawing.arrow((303, 218), (303, 250))
    drawing.text(320, 240, "the same page number in every layer", small=True)
    drawing.box(20, 254, 820, 130, fill=_PALE)
    drawing.text(36, 280, "Page 3 of one layer", bold=True)
    drawing.text(36, 304, "per KV head:")
    for i, head in enumerate(("head 0", "head 1")):
        y = 290 + 44 * i
        drawing.box(150, y, 330, 36, f"{head}: keys of 16 tokens", fill=_SELECTED)
        drawing.box(484, y, 340, 36, "values of 16 tokens", fill=_SELECTED)
    return drawing


def _tiers() -> Drawing:
    drawing = Drawing(860, 380, "Resident and offloaded layers")
    drawing.box(20, 20, 820, 180, fill=_PALE)
    drawing.text(36, 46, "Memory of the device (GPU, or RAM on a CPU)", bold=True)
    drawing.box(36, 62, 150, 120, "Weights\nand the tensors\nof a step")
    drawing.box(206, 62, 300, 120, "Resident layers 0 … k\nall their pages")
    drawing.box(
        526,
        62,
        298,
        120,
        "Buffers of layers k+1 … L-1\ntoken_budget tokens per request:\nthe last selection",
        fill=_SELECTED,
    )
    drawing.box(20, 270, 820, 90, fill=_PALE)
    drawing.text(
        36, 296, "Offload memory (host RAM for a GPU, a folder on disk for a CPU)", bold=True
    )
    drawing.box(526, 282, 298, 64, "Offloaded layers k+1 … L-1\nall their pages")
    drawing.text(36, 322, "The last layers are offloaded first, one by one,")
    drawing.text(36, 342, "as sequences grow. They return when memory is free.")
    drawing.arrow((620, 282), (620, 184), color=_ACCENT)
    drawing.text(610, 226, "before a layer attends: tokens that are", anchor="end")
    drawing.text(610, 244, "selected now and were not in the last step", anchor="end")
    drawing.arrow((740, 184), (740, 280), dashed=True)
    drawing.text(752, 240, "new tokens")
    return drawing


def main() -> None:
    """Writes the files."""
    for name, text in render().items():
        (IMAGES / name).write_text(text)
        print(f"written: docs/images/{name}")


if __name__ == "__main__":
    main()
