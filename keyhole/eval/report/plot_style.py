"""The style of the pictures of an evaluation, and their conversion for an HTML page.

Every method has one colour and one mark in all pictures. A picture is drawn once, in the colours of
`keyhole.drawing`; its SVG refers to them as CSS variables, so that the page can define light and
dark themes.

matplotlib writes a standalone document, with fonts by name, colours by number, ids that other
pictures use as well, and a style sheet that would apply to the whole page. `inline_svg` removes all
of that. Text stays text, so that it can be selected.
"""

from __future__ import annotations

import html
import io
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from keyhole.drawing import FAINT, INK, PALE, POLICY_COLORS, SPARE_COLORS, STYLE

#: Fill of heat maps, and numbers in dark and in half-dark cells. They differ slightly from other
#: colours, so that the page can change each separately.
FILL, PAPER, HALF = "#0b6e76", "#ffffff", "#22303d"
#: Shown where there is no number.
NOTHING = "–"
SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_LEAST_SHOWN = 0.1


@dataclass(frozen=True)
class MethodStyle:
    """The style of a method. color: in pictures. mark: a marker of matplotlib; glyph: the same as a
    character.
    """

    color: str
    mark: str
    glyph: str


#: By the name of a method.
Styles = Mapping[str, MethodStyle]

_MARKS = (
    ("o", "●"),
    ("s", "■"),
    ("^", "▲"),
    ("D", "◆"),
    ("v", "▼"),
    ("p", "⬟"),
    ("<", "◀"),
    (">", "▶"),
    ("*", "★"),
)
_POLICIES = {
    name: MethodStyle(color, *mark)
    for (name, color), mark in zip(POLICY_COLORS.items(), _MARKS, strict=True)
}

#: Colours that a page may change: hexadecimal in pictures -> name, by day, by night. The contrast
#: is at least 3, by day on white and by night on #14191f.
THEME: dict[str, tuple[str, str, str]] = {
    INK: ("ink", "#1d2933", "#e3e9ee"),
    FAINT: ("faint", "#64727f", "#93a1ad"),
    PALE: ("pale", "#e9eef2", "#27313a"),
    PAPER: ("paper", "#ffffff", "#14191f"),
    FILL: ("fill", "#0b6e75", "#4fb7bd"),
    HALF: ("half", "#1d2933", "#14191f"),
    POLICY_COLORS["delta"]: ("delta", "#c8691f", "#f0a268"),
    POLICY_COLORS["quest"]: ("quest", "#0b6e75", "#4fb7bd"),
    POLICY_COLORS["streaming_llm"]: ("streaming-llm", "#7a5ea8", "#b39ade"),
    POLICY_COLORS["spe_context"]: ("spe-context", "#b03a48", "#ef8490"),
    POLICY_COLORS["tidal_decode"]: ("tidal-decode", "#41803f", "#86c784"),
    POLICY_COLORS["omnikv"]: ("omnikv", "#2f6fb0", "#7db4ec"),
    POLICY_COLORS["infllm"]: ("infllm", "#85711a", "#d0ba55"),
    POLICY_COLORS["sliding_window"]: ("sliding-window", "#b0588f", "#e59cc8"),
    SPARE_COLORS[0]: ("spare-1", "#5d7183", "#a9bccd"),
    SPARE_COLORS[1]: ("spare-2", "#94624a", "#d3a08a"),
    SPARE_COLORS[2]: ("spare-3", "#33807a", "#7fcbc3"),
}


def method_styles(names: Iterable[tuple[str, str]]) -> dict[str, MethodStyle]:
    """A style for each (policy, name): the policy's own for its first name, then spare colours."""
    found: dict[str, MethodStyle] = {}
    spare = 0
    for policy, name in dict.fromkeys(names):
        own = _POLICIES.get(policy)
        if own is None or own in found.values():
            mark = _MARKS[-1 - spare % len(_MARKS)]
            own = MethodStyle(SPARE_COLORS[spare % len(SPARE_COLORS)], *mark)
            spare += 1
        found[name] = own
    return found


def size_scale(sizes: Iterable[float]) -> tuple[str, Callable[[float], str]]:
    """One unit for the sizes of a column, and the function that writes them."""
    known = [size for size in sizes if size > 0] or [0.0]
    unit = 0
    while unit < len(SIZE_UNITS) - 1 and max(known) >= 1024 ** (unit + 1):
        unit += 1
    while unit > 0 and min(known) < _LEAST_SHOWN * 1024**unit:
        unit -= 1
    decimals = 0 if unit == 0 else 2 if max(known) < 100 * 1024**unit else 1
    return SIZE_UNITS[unit], lambda size: f"{size / 1024**unit:,.{decimals}f}"


#: Matplotlib settings for figures that are passed to `inline_svg`.
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

    identity: prefix of all ids, different for each picture of a page. label: a description for
    people who do not see the picture. titles: tooltips by the gid of a matplotlib artist.
    image_color: a colour of `THEME` for images, of which only the opacity is kept.
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
    """The image as a mask of a rectangle in this colour, so that the page can change the colour."""
    name = f"mask-{zlib.crc32(image.encode()):x}"
    place = " ".join(match[0] for match in _ATTRIBUTE.finditer(image))
    return (
        f'<mask id="{name}" style="mask-type: alpha">{image}</mask>'
        f'<g mask="url(#{name})"><rect {place} style="fill: {color}"/></g>'
    )
