"""A canvas of boxes, lines of text and arrows, as SVG."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

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
