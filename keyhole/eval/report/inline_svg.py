"""A matplotlib figure as SVG that is part of an HTML page: its fonts, its colours, its text.

What matplotlib writes is a document of its own: fonts by name, colours by number, ids that other
pictures have too, and a style sheet that would hold for the whole page. All of that is taken out.
Letters stay letters, so they can be selected, and colours become the page's variables.
"""

from __future__ import annotations

import html
import io
import re
import zlib
from collections.abc import Mapping
from typing import Any

from keyhole.drawing import STYLE
from keyhole.eval.report.plot_style import THEME

#: To be in force while a figure is made that `inline_svg` takes.
SVG_STYLE = STYLE | {"svg.fonttype": "none", "svg.hashsalt": "keyhole"}

_HEAD = re.compile(r".*?<svg\b[^>]*?\bviewBox=\"([^\"]*)\"[^>]*>", re.DOTALL)
_NOT_OURS = re.compile(r"<metadata>.*?</metadata>|<style\b.*?</style>|<!--.*?-->", re.DOTALL)
_FONT = re.compile(r"font: ?((?:\w+ )*)([\d.]+)px [^;\"]*|font-family: [^;\"]*; ?")
_IDS = re.compile(r"(\bid=\"|url\(#|href=\"#)")
_IMAGE = re.compile(r"<image\b[^>]*?/>", re.DOTALL)
_ATTRIBUTE = re.compile(r"\b(transform|x|y|width|height)=\"[^\"]*\"")


def inline_svg(
    figure: Any, identity: str, label: str, *, titles: Mapping[str, str], image_color: str = ""
) -> str:
    """The figure as an `<svg>` element.

    identity: before all ids, different for each picture of a page. label: what the picture shows,
    for those who do not see it. titles: by the gid of a matplotlib artist, what is shown when the
    mouse is on it. image_color: a colour of `THEME` for images, of which only the opacity is kept.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    match = _HEAD.match(text)
    assert match is not None
    body = _NOT_OURS.sub("", text[match.end() :]).replace("xlink:href", "href")
    body = _FONT.sub(lambda m: f"{_weight(m[1])}font-size: {m[2]}px" if m[2] else "", body)
    if image_color:
        body = _IMAGE.sub(lambda m: _masked(m[0], image_color), body)
    body = _IDS.sub(rf"\g<1>{identity}-", body)
    for color, (name, _, _) in THEME.items():
        body = body.replace(color, f"var(--{name})")
    for gid, title in titles.items():
        own = f'<g id="{identity}-{gid}">'
        body = body.replace(own, f"{own}<title>{html.escape(title)}</title>")
    _, _, width, _ = match[1].split()
    head = (
        f'<svg viewBox="{match[1]}" role="img" aria-label="{html.escape(label)}" '
        f'style="--width: {float(width) * 4 / 3:.0f}px">'
    )
    return head + re.sub(r"\n\s*", "\n", body).strip()


def _weight(words: str) -> str:
    return f"font-weight: {words.split()[-1]}; " if words.strip() else ""


def _masked(image: str, color: str) -> str:
    """The image as a mask of a rectangle of this colour, so that the page can change it."""
    name = f"mask-{zlib.crc32(image.encode()):x}"
    place = " ".join(match[0] for match in _ATTRIBUTE.finditer(image))
    return (
        f'<mask id="{name}" style="mask-type: alpha">{image}</mask>'
        f'<g mask="url(#{name})"><rect {place} style="fill: {color}"/></g>'
    )
