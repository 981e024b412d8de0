"""The page says what the lines say, needs nothing but itself, and survives what lines lack."""

from __future__ import annotations

import functools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole
from keyhole.cli.common.terminal import PAGE
from keyhole.config import bytes_text
from keyhole.errors import ConfigError
from keyhole.eval.policy_trace import SelectionMap
from keyhole.eval.report.page import main, render, write_report
from keyhole.eval.report.plot_style import THEME, size_scale
from keyhole.models.loading import load
from tests.eval import measured
from tests.eval.eval_lines import full, line

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Faults of the nesting, attributes that lead elsewhere, and the cells of all tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.sorts: list[list[list[str | None]]] = []
        self.scopes: list[str | None] = []
        self.svgs: list[dict[str, str | None]] = []
        self.feed(text)
        self.close()
        self.faults += [f"{tag} is never closed" for tag in self.open]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        own = dict(attributes)
        if len(own) != len(attributes):
            self.faults.append(f"{tag} says an attribute twice: {attributes}")
        if tag not in VOID:
            self.open.append(tag)
        self._note(tag, own)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._note(tag, dict(attributes))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes something else at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        if self.tables and self.open and {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    def _note(self, tag: str, own: dict[str, str | None]) -> None:
        self.links += [str(own[name]) for name in ("src", "href", "action", "data") if name in own]
        if "id" in own:
            self.ids.append(str(own["id"]))
        if tag == "svg":
            self.svgs.append(own)
        if tag == "table":
            self.tables.append([])
            self.sorts.append([])
        if tag == "tr":
            self.tables[-1].append([])
            self.sorts[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.sorts[-1][-1].append(own.get("data-sort"))
        if tag == "th":
            self.scopes.append(own.get("scope"))


@functools.cache
def all_in_one() -> str:
    """A page with everything that there is."""
    return render([full(), line(selection_maps=[a_map()]), line(policy="quest"), line(length=2048)])


def page(lines: list[dict[str, Any]]) -> Page:
    return Page(render(lines))


def texts(table: list[list[str]]) -> list[list[str]]:
    return [[" ".join(cell.split()) for cell in row] for row in table]


def a_map() -> dict[str, Any]:
    shares = np.full((2, 12), 255, np.uint8)
    return SelectionMap(shares=shares, prompt_tokens=10, steps=2, layer=1, marks=(3,)).to_json()


def test_the_tables_say_what_the_lines_say() -> None:
    found = page([full(), line()])
    overview, table = texts(found.tables[0]), texts(found.tables[1])
    assert overview[1:] == [["● full", "all", "100.0 (best)"], ["■ delta", "128", "75.0"]]
    assert table[0] == [
        "Method",
        "Budget tokens",
        "Score %",
        "Generated tokens",
        "Keys read %",
        "Read per step MiB",
        "Step ms",
        "Peak memory GiB",
        "Run",
    ]
    assert table[1] == [
        "● full", "all", "100.0 (best) 51–100", "12.5", "100.0", "6.00", "9.87", "7.00", "1",
    ]  # fmt: skip
    assert table[2] == [
        "■ delta", "128", "75.0 30–95", "12.5", "32.1 (best)", "1.50 (best)", "4.56 (best)",
        "7.00", "1",
    ]  # fmt: skip
    numbers = found.sorts[1][2][1:]
    assert [float(str(number)) for number in numbers] == [
        128, 0.75, 12.5, 0.321, 3 * 2**19, 4.56, 7 * 2**30, 1,
    ]  # fmt: skip


@pytest.mark.slow
def test_the_mean_is_of_rows_that_have_all_scores() -> None:
    found = page([full(), line(score=0.5), full(length=2048)])
    rows = texts(found.tables[0])
    assert rows[0][2:] == ["tiny_needle 1,024 tokens", "tiny_needle 2,048 tokens", "mean"]
    assert rows[1] == ["● full", "all", "100.0 (best)", "100.0", "100.0"]
    assert rows[2] == ["■ delta", "128", "50.0", "–", "–"]
    assert found.sorts[0][2][3:] == ["", ""]


def test_a_perplexity_is_shown_unchanged_and_in_no_mean() -> None:
    asked = {"task": "perplexity", "scores": None}
    likely = full() | asked | {"perplexity": 8.0, "score": 1 / 8}
    unlikely = line(**asked, perplexity=1234.5, score=1 / 1234.5)
    found = page([full(), full(length=2048), line(), line(length=2048), likely, unlikely])
    overview, table = texts(found.tables[0]), texts(found.tables[3])
    assert overview[0][4:] == ["perplexity 1,024 tokens", "mean"]
    assert overview[1][4:] == ["8.00 (best)", "100.0 (best)"]
    assert overview[2][4:] == ["1,234.50", "75.0"]
    assert table[0][2] == "Perplexity"
    assert [row[2] for row in table[1:]] == ["8.00 (best)", "1,234.50"]
    assert "Score %" not in table[0]
    labels = [svg["aria-label"] for svg in found.svgs]
    assert any("delta, 128 tokens: perplexity 1234.50, " in str(label) for label in labels)


@pytest.mark.slow
def test_nothing_is_best_where_most_is_as_good() -> None:
    found = page([full(), line(), line(policy="quest", score=1.0), line(policy="infllm", score=1)])
    assert [row[2] for row in texts(found.tables[0])[1:]] == ["100.0", "75.0", "100.0", "100.0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines",
    [
        [],
        [{}],
        [{}, line()],
        [full()],
        [line(**{name: None}) for name in line()],
        [line(**{name: math.nan}) for name in line()],
        [line(scores=[1.0], depths=[0.1, 0.2], settings={"a": math.nan}, selection_maps=[{}, 1])],
        [line(setup="something else", score=0.0, scores=[0.0], recall_per_layer=[0.0])],
    ],
    ids=["all", "empty", "one empty", "one policy", "nulls", "nans", "odd", "zeros"],
)
def test_any_lines_make_a_page(lines: list[dict[str, Any]]) -> None:
    text = render(lines) if lines else all_in_one()
    found = Page(text)
    assert text.encode().startswith(PAGE.starts[""])  # else `--html` would refuse to replace it
    assert not found.faults
    assert len(found.ids) == len(set(found.ids))
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in found.links)
    assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    hidden = r"<style>.*?</style>|<script>.*?</script>|data:[^\"]*"
    not_shown = rf'{hidden}|<section id="settings".*?</section>'
    shown = re.sub(not_shown, "", text, flags=re.DOTALL)
    assert not re.search(r"\b(nan|inf|None)\b", shown)


def test_depths_and_setups_of_a_task_make_a_needle_picture_each_setup() -> None:
    lines = [
        line(task_settings={"depth": at}, depths=[at] * 4, setup=setup, recall_per_layer=None)
        for at in (0.0, 0.5, 1.0)
        for setup in ("prompt", "question")
    ]
    text = render(lines)
    needles = text[text.index('id="needles"') : text.index('id="columns"')]
    assert re.findall("<h3>(.*)</h3>", needles) == [
        "tiny_needle, question dense",
        "tiny_needle, question sparse",
    ]
    assert needles.count("<svg") == 2
    assert needles.count("0 %: 75; 50 %: 75; 100 %: 75") == 2
    assert len(texts(Page(text).tables[0])[0]) == 2 + 6 + 1


def test_it_is_said_what_pictures_show() -> None:
    found = Page(all_in_one())
    assert len(found.svgs) == 2 + 3 + 2 + 1
    for svg in found.svgs:
        assert svg["role"] == "img"
        assert svg["aria-label"]
    assert {*found.scopes} == {"col", "row"}


def test_pictures_have_no_colours_but_those_of_the_page() -> None:
    text = all_in_one()
    inside = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert not re.search(r"(fill|stroke): #", inside)
    names = set(re.findall(r"var\(--([a-z0-9-]+)\)", inside))
    assert names <= {name for name, _, _ in THEME.values()}
    assert "<style" not in inside
    assert "<text" in inside


def contrast(one: str, other: str) -> float:
    """WCAG 2.1, relative luminance and contrast ratio."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_by_day_and_by_night() -> None:
    themes = {name: (day, night) for name, day, night in THEME.values()}
    for at in (0, 1):
        paper = themes["paper"][at]
        for name in ("ink", "faint"):
            assert contrast(themes[name][at], paper) >= 4.5
        for name in set(themes) - {"paper", "pale", "half"}:
            assert contrast(themes[name][at], paper) >= 3, name


def test_names_are_text() -> None:
    evil = "<script>alert(1)</script>"
    lines = [
        full(note=evil, command=evil),
        line(policy=evil, task=evil, model=evil, setup=evil, settings={evil: evil}),
        line(policy=f"{evil}&\"'", machine={evil: evil}, versions={evil: evil}, date=evil),
        line(policy="$x^2$", selection_maps=[a_map()], task="a $ b"),
    ]
    text = render(lines)
    assert evil not in text
    assert text.count("<script") == 1
    assert not Page(text).faults


def test_lines_of_kvpress_are_shown_next_to_ours() -> None:
    text = render([full(), line(), line(policy="kvpress:snapkv", settings={"window_size": 16})])
    assert [row[:2] for row in texts(Page(text).tables[1])[1:]] == [
        ["● full", "all"],
        ["■ delta", "128"],
        ["★ kvpress:snapkv", "128"],
    ]
    assert "the tokens that are kept of a prompt" in text
    assert "kept of a prompt" not in all_in_one()


def test_every_row_leads_to_its_run() -> None:
    lines = [
        full(),
        line(date="2026-11-20T11:30:00+00:00"),
        line(budget=64, command="keyhole eval tiny --budgets 64", date="2026-11-21T09:00:00+00:00"),
    ]
    lines[0]["machine"] = lines[0]["machine"] | {"load_average": 3.0}
    text = render(lines)
    assert [row[-1] for row in texts(Page(text).tables[1])[1:]] == ["1", "1", "2"]
    for said in (
        "2026-11-20 10:00 to 11:30 UTC, 2 rows",
        "keyhole eval tiny --budgets 64",
        "EPYC, cores: 2, torch threads: 2, 23.5 GiB of memory",
        "python 3.11.7, torch 2.13.0, keyhole 0.1.0",
        "abcdef012345",
    ):
        assert said in text


def test_measured_lines_make_a_page(tmp_path: Path) -> None:
    """The way of `keyhole eval`: the bundled model, lines in a file, and the program."""
    lines = measured.lines(load(keyhole.tiny(), "cpu"), budgets=(64,), map_layers=(3,))
    results, report = tmp_path / "eval.jsonl", tmp_path / "eval.html"
    results.write_text("".join(json.dumps(found) + "\n" for found in lines))
    assert main([str(results), str(report)]) == 0
    found = Page(report.read_text(encoding="utf-8"))
    assert not found.faults
    rows = texts(found.tables[1])[1:]
    for row, stored in zip(rows, lines, strict=True):
        assert row[0].endswith(stored["policy"])
        assert row[2].split()[0] == f"{100 * stored['score']:.1f}"
        assert row[4].split()[0] == f"{100 * stored['read_share']:.1f}"
        assert float(row[5].split()[0]) == pytest.approx(stored["bytes_per_step"] / 1024, abs=0.06)


def test_what_cannot_be_done_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no lines to report"):
        write_report([], tmp_path / "x.html")
    with pytest.raises(ConfigError, match="cannot write the report"):
        write_report([full()], tmp_path / "no" / "x.html")
    assert main([str(tmp_path / "no.jsonl"), "x.html"]) == 2
    assert capsys.readouterr().err.startswith("error: there are no lines to report")


def test_sizes_have_the_unit_that_suits_them() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1024, 1536, 2**20 - 1, 2**30, 2**50)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 GiB", "1024.0 TiB",
    ]  # fmt: skip
    for sizes, expected in [
        ([2**20, 3 * 2**19], ("MiB", ["1.00", "1.50"])),
        ([2**10, 2**20], ("KiB", ["1.0", "1,024.0"])),
        ([100, 900], ("B", ["100", "900"])),
        ([0, 2**30], ("GiB", ["0.00", "1.00"])),
        ([], ("B", [])),
    ]:
        unit, text = size_scale(sizes)
        assert (unit, [text(size) for size in sizes]) == expected
