"""Writes the stored lines into the documents: `python -m benchmarks.speed_pages`.

    README.md              a table per device, between two comments
    docs/results/speed.md  step times, memory, weights of few bits, several tokens per step,
                           kernels, products of packed weights, offloaded layers, a million tokens,
                           the papers' settings
    docs/images/           a figure of step time per table, and one of repeat rates

The newest line counts: for decoding per device and batch, for kernels per device, for products of
packed weights per processor and shape, for headline settings per setting on a GPU, for a million
tokens per shape, policy and length, for weights of few bits per length and batch, and for the
others the newest of all. Nothing is written without a line; a test compares the pages with the
lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from benchmarks import ROOT, read_lines, results
from benchmarks.paper import page as headline_page
from benchmarks.results_page.text import between
from benchmarks.speed_pages import few_bits as few_bits_page
from benchmarks.speed_pages import million as million_page
from benchmarks.speed_pages import offload as offload_page
from benchmarks.speed_pages import plot, tables
from benchmarks.speed_pages import speculation as speculation_page

BEGIN, END = "<!-- results: python -m benchmarks.speed_pages -->\n", "<!-- end of results -->"
#: Absolute, so that the package index shows the README's images too.
_IMAGES = "https://raw.githubusercontent.com/keyhole-llm/keyhole/main/docs/images/"
PAGE = "results/speed.md"
_WRITTEN_BY = "<!-- Written by `python -m benchmarks.speed_pages`; measure again instead. -->"

Line = dict[str, Any]


def stored(benchmark: str) -> list[Line]:
    """All lines of a benchmark's results, oldest first."""
    return read_lines(results() / f"{benchmark}.jsonl")


def latest(lines: Sequence[Line], key: Callable[[Line], Hashable]) -> list[Line]:
    """The newest line of each kind."""
    return list({key(line): line for line in lines}.values())


def pictures(lines: Sequence[Line]) -> dict[str, Line]:
    """Figure in docs/images/ -> the line that it shows."""
    return {_picture(line): line for line in latest(lines, _device_and_batch)}


def render(lines: Sequence[Line]) -> str:
    """The README's table and figure, for the smallest batch on a CPU; the page has the rest."""
    last = latest([line for line in lines if _device(line) == "a CPU"], _device_and_batch)
    if not last:
        return ""
    line = min(last, key=lambda line: int(line["settings"]["batch"]))
    return f"{tables.ratios(line)}\n\n{tables.about(line)}\n\n{_image(line, _IMAGES)}\n"


def page(
    decode: Sequence[Line],
    kernels: Sequence[Line],
    offload: Sequence[Line] = (),
    headlines: Sequence[Line] | None = None,
    million: Sequence[Line] = (),
    few_bits: Sequence[Line] = (),
    speculation: Sequence[Line] = (),
    drafts: Sequence[Line] = (),
) -> str:
    """docs/results/speed.md.

    headlines: None leaves that part out; settings without a line are listed as unmeasured.
    """
    parts = [
        f"{_WRITTEN_BY}\n\n# Speed and memory",
    ]
    for line in latest(decode, _device_and_batch):
        batch = line["settings"]["batch"]
        parts += [
            f"## Decode step on {_device(line)}, batch {batch}",
            _image(line, "../images/"),
            "Time of a step in milliseconds, and in brackets the share of the read bandwidth that\n"
            "the run measured:",
            tables.times(line),
            *([tables.targets(line)] if line.get("bars") else []),
            *tables.memory(line),
            tables.about(line),
        ]
    parts += few_bits_page.section(few_bits)
    parts += speculation_page.section(speculation)
    parts += speculation_page.own_drafts(drafts)
    whole = [line for line in kernels if not few_bits_page.is_alone(line)]
    for line in latest(whole, _processor):
        parts += [f"## Kernels on {_processor(line)}", *tables.kernels(line)]
        parts.append(tables.about(line))
    parts += few_bits_page.products(kernels)
    for line in latest(offload, _model):
        parts += offload_page.section(line)
    parts += million_page.section(million)
    if headlines is not None:
        parts += headline_page.section(headlines)
    return "\n\n".join(parts) + "\n"


def current() -> str:
    """docs/results/speed.md from all stored lines."""
    return page(
        stored("decode"),
        stored("kernels"),
        stored("offload"),
        headlines=stored("headlines"),
        million=stored("million"),
        few_bits=stored("few-bits"),
        speculation=stored("speculation"),
        drafts=stored("bundled-draft"),
    )


def main() -> None:
    """Rewrites the pages and figures of the checkout."""
    decode, offload, million = (stored(name) for name in ("decode", "offload", "million"))
    readme, docs = ROOT / "README.md", ROOT / "docs"
    readme.write_text(between(readme.read_text(), BEGIN, END, render(decode)))
    (docs / PAGE).write_text(current())
    for name, line in pictures(decode).items():
        plot.step_times(line, docs / "images" / name)
    for line in latest(offload, _model):
        offload_page.curve(line, docs / "images" / offload_page.picture_name(line))
    if million:
        million_page.curve(million, docs / "images" / million_page.PICTURE)


def _device_and_batch(line: Line) -> Hashable:
    return line["machine"]["device"], line["settings"]["batch"]


def _model(line: Line) -> Hashable:
    return str(line["model"])


def _processor(line: Line) -> str:
    machine = line["machine"]
    return str(machine["cpu"] if machine["device"] == "cpu" else machine["device"])


def _device(line: Line) -> str:
    name = line["machine"]["device"]
    return "a CPU" if name == "cpu" else str(name)


def _picture(line: Line) -> str:
    batch = line["settings"]["batch"]
    device = re.sub(r"[^a-z0-9]+", "-", line["machine"]["device"].lower()).strip("-")
    return f"decode-{device}{'' if batch == 1 else f'-batch-{batch}'}.png"


def _image(line: Line, folder: str) -> str:
    return f"![Time of a decode step against context]({folder}{_picture(line)})"
