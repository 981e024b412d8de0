"""The diagrams of docs/ are what `python -m benchmarks.diagrams` draws, and pages show them."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks import diagrams
from tests.docs.markdown import DOCS


def test_the_files_are_those_of_the_program() -> None:
    rendered = diagrams.render()
    stored = {path.name: path.read_text() for path in diagrams.IMAGES.glob("*.svg")}
    assert rendered == stored, "run python -m benchmarks.diagrams"


def test_they_are_svg_whose_text_stays_inside() -> None:
    for text in diagrams.render().values():
        root = ElementTree.fromstring(text)
        width, height = (float(root.attrib[name]) for name in ("width", "height"))
        found = [item for item in root.iter() if item.tag.endswith("}text")]
        assert found
        for item in found:
            # A letter of these sizes takes about half of its height.
            reach = 0.5 * float(item.attrib["font-size"]) * len(item.text or "")
            before = {"start": 0.0, "middle": 0.5, "end": 1.0}[item.attrib["text-anchor"]] * reach
            left = float(item.attrib["x"]) - before
            assert left >= 0
            assert left + reach <= width
            assert 0 < float(item.attrib["y"]) < height


def test_every_diagram_is_shown() -> None:
    pages = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    for name in diagrams.render():
        assert f"images/{name})" in pages
