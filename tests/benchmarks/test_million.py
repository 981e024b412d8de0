"""Steps over a filled cache, under a limit of the system; in small."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import million, speed_pages
from benchmarks.speed_pages import million as page
from keyhole.kernels.reference.quantised import dequantised

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits and sizes are those of Linux")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("million")
    with pytest.MonkeyPatch.context() as patch:
        flags = ["--shapes", "bundled", "--lengths", "2048,16384", "--repeat", "2"]
        flags += ["--systems", "delta,spe_context:refresh_every=2,token_budget=256"]
        flags += ["--memory", "19MiB", "--folder", str(folder), "--note", "a note"]
        flags += ["--output", str(folder / "lines.jsonl")]
        patch.setattr(sys, "argv", ["million", *flags])
        assert million.main() == 0
        written = (folder / "lines.jsonl").read_text()
        assert million.main() == 0  # everything is there
    assert (folder / "lines.jsonl").read_text() == written
    return [json.loads(line) for line in written.splitlines()]


@LINUX
@pytest.mark.slow
def test_layers_are_offloaded_as_planned_and_the_limit_is_held(lines: list[dict[str, Any]]) -> None:
    found = {(line["settings"]["length"], line["settings"]["system"]): line for line in lines}
    assert [length for length, _ in found] == [2048, 2048, 16384, 16384]
    for (length, system), line in found.items():
        assert (line["offloaded_layers"] > 0) == (length == 16384)
        assert (line["offloaded_bytes"] > 0) == (length == 16384)
        assert line["plan_bytes"] <= line["settings"]["total_memory"]
        assert line["peak_data_bytes"] <= line["limit_bytes"]
        # The single times are rounded to a microsecond.
        assert line["step_ms"] == pytest.approx(np.mean(line["all_ms"]), rel=1e-3)
        assert len(line["all_ms"]) == (2 if system == "delta" else 4)
        if system.startswith("spe_context") and line["offloaded_layers"]:
            # Every second step selects anew; the other one has everything but the newest token.
            assert 0.4 < line["hit_rate"] < 0.9
            assert line["moved_bytes"] > 0


@LINUX
@pytest.mark.slow
def test_the_page_shows_the_newest_lines(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    older = [line | {"step_ms": 1e6} for line in lines]
    text = speed_pages.page([], [], million=[*older, *lines])
    assert "1000000" not in text
    assert text.count("| bundled |") == 4
    assert "19.0 MiB for bundled" in text
    assert "times as long as at 2,048" in text
    assert "Note: a note" in text
    page.curve(lines, tmp_path / page.PICTURE)
    assert (tmp_path / page.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_nothing_is_shown_without_lines() -> None:
    assert "A million tokens" not in speed_pages.page([], [])


def test_made_rows_have_the_wanted_deviation() -> None:
    random = np.random.Generator(np.random.SFC64(0))
    rows = million.made_rows(random, (100, 2, 16, 36), 3.0)
    numbers = dequantised(rows)
    assert rows.dtype is torch.int8
    assert numbers.shape == (100, 2, 16, 32)
    assert abs(float(numbers.std()) - 3) < 0.05
    assert abs(float(numbers.mean())) < 0.03


def test_a_step_is_timed_over_whole_periods() -> None:
    settings = million.MillionSettings(
        shape="bundled", length=8192, system="spe_context:refresh_every=8", total_memory=1, repeat=9
    )
    assert (settings.period, settings.steps) == (8, 16)
    assert replace(settings, repeat=17).steps == 24
    assert replace(settings, system="delta", repeat=3).steps == 3
