"""The papers' settings run, in small, and what is wanted there is counted from their speeds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import headlines as program
from benchmarks.kernels.settings import KernelSettings
from benchmarks.paper import page, setting
from benchmarks.paper.settings import (
    HEADLINES,
    Headline,
    SpeedTarget,
    StepSettings,
    ThroughputSettings,
    judged,
)
from benchmarks.paper.throughput import num_weights, weights_read
from keyhole.bench import model
from keyhole.bench.settings import ALL_BASELINES, DecodeSettings
from keyhole.errors import ConfigError, UnknownNameError


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "release_memory", lambda: None)  # slow, and nothing is large here


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in HEADLINES if "_24gb_" not in n and "prompt" not in n])
def test_a_setting_runs_in_small_and_has_speeds_for_its_bars(name: str) -> None:
    reported = []
    line = setting.measured(name, "cpu", lambda *given: reported.append(given), small=True)
    assert json.loads(json.dumps(line))["headline"] == name
    assert line["small"]
    assert line["bars"] == []
    assert reported
    assert all(speed > 0 for speed in line["speeds"].values())
    # All but those that need the host below a GPU.
    there = {n for target in HEADLINES[name].targets for n in (target.of, target.by) if n}
    assert {n for n in there if not n.endswith("_offloaded")} <= set(line["speeds"])


def test_the_sizes_are_those_of_the_papers() -> None:
    delta = HEADLINES["delta_figure_4"].settings
    assert isinstance(delta, DecodeSettings)
    assert (delta.batch, delta.contexts, delta.token_budget) == (64, (18432,), 1024)
    table = [h.settings for h in HEADLINES.values() if isinstance(h.settings, ThroughputSettings)]
    assert [(t.prompt, t.answer, t.memory) for t in table] == [
        (prompt, answer, model)
        for model in (80 * 10**9, 24 * 10**9)
        for prompt, answer in ((2048, 32768), (32768, 2048))
    ]
    assert [t.points for t in table] == [4, 2, 4, 2]  # short answers hardly change the length
    assert all(t.decode.token_budget == 2048 for t in table)


def test_kernels_are_measured_from_batch_16_on() -> None:
    asked = [h for h in HEADLINES.values() if isinstance(h.settings, KernelSettings)]
    assert [(h.settings.batch, h.settings.repeat) for h in asked] == [(64, 21), (16, 21)]
    assert len({h.targets for h in asked}) == 1


def test_what_is_wanted_is_said_of_systems_that_are_measured() -> None:
    for name, one in HEADLINES.items():
        systems = set(one.theirs)
        if isinstance(one.settings, DecodeSettings):
            systems |= set(one.settings.systems)
        elif isinstance(one.settings, ThroughputSettings):
            systems |= set(one.settings.decode.systems)
        else:
            continue
        for target in one.targets:
            assert {target.of, target.by} <= systems, name
            assert target.of not in ALL_BASELINES


def test_bars_are_ratios_of_speeds() -> None:
    targets = (
        SpeedTarget(of="mine", by="yours", wanted=2.0),
        SpeedTarget(of="mine", wanted=31),
        SpeedTarget(of="mine", by="nobody", wanted=1.0),
    )
    settings = HEADLINES["delta_figure_4"].settings
    one = Headline(source="a", about="b", settings=settings, targets=targets)
    assert judged(one, "tokens/s", {"mine": 30.0, "yours": 15.0}) == [
        {"bar": "mine: tokens/s by those of yours", "value": 2.0, "wanted": ">= 2.0", "met": True},
        {"bar": "mine: tokens/s", "value": 30.0, "wanted": ">= 31", "met": False},
    ]


def test_steps_of_one_sequence_are_judged_by_the_bytes_they_read() -> None:
    """1.4 times the time of weights and keys at the bandwidth of the machine is just allowed."""
    one = HEADLINES["one_sequence_8b"]
    assert isinstance(one.settings, StepSettings)
    assert one.settings.decode.contexts == (2048, 32768, 131072)
    assert one.settings.decode.batch == 1
    labels = dict(zip(one.settings.decode.contexts, one.settings.labels, strict=True))
    weights, bandwidth = 15e9, 3e12

    def result(system: str, context: int, kv_bytes: float, factor: float) -> dict[str, Any]:
        at_best = 1e3 * (weights + kv_bytes + 1e6) / bandwidth
        cost = {"kv_bytes": kv_bytes, "other_bytes": 1e6, "step_ms": factor * at_best}
        return {"system": system, "context": context} | cost

    results = [result("full", 2048, 2e9, 1.39), result("full", 131072, 60e9, 1.0)]
    results += [result("delta", 2048, 1e9, 1.41), result("delta", 131072, 10e9, 1.3)]
    line = {"labels": labels, "step_weight_bytes": weights, "read_bytes_per_s": bandwidth}
    speeds = setting._step_speeds(line | {"results": results})
    met = {bar["bar"]: bar["met"] for bar in judged(one, "steps/s", speeds)}
    assert met == {
        "full at 2k: steps/s by those of bytes of full at 2k": True,
        "delta at 2k: steps/s by those of bytes of delta at 2k": False,
        "full at 128k: steps/s by those of bytes of full at 128k": True,
        "delta at 128k: steps/s by those of bytes of delta at 128k": True,
        "delta at 128k: steps/s by those of full at 128k": True,
    }


def test_a_step_reads_every_weight_but_an_embedding_of_its_own() -> None:
    embedding = 128256 * 4096
    assert weights_read("llama-3.1-8b") == num_weights("llama-3.1-8b") - embedding
    assert weights_read("llama-3.2-1b") == num_weights("llama-3.2-1b")
    with pytest.raises(ConfigError, match="labels"):
        StepSettings(labels=("2k",), decode=DecodeSettings(contexts=(2048, 4096)))


@pytest.mark.parametrize(("rival", "says"), [(0.25, "–"), (2.0, ">= 1.0")])
def test_a_rival_slower_than_computing_everything_is_no_bar(rival: float, says: str) -> None:
    """Being three times as fast as a CacheBlend slower than recomputing was called met."""
    name = "sam_kv_first_token"
    speeds = {"sam_kv": 3.0, "recompute": 1.0, "cacheblend": rival}
    unit = setting.unit(name)
    line = {
        "headline": name,
        "small": False,
        "machine": {"device": "a GPU"},
        "versions": {"torch": "2", "transformers": "5"},
        "note": "",
        "unit": unit,
        "date": "2026-11-23",
        "commit": "abc",
        "command": "a command",
        "speeds": speeds,
        "bars": judged(HEADLINES[name], unit, speeds),
        "results": [],
    }
    text = "\n".join(page.section([line]))
    (row,) = (one for one in text.splitlines() if "`sam_kv` by `cacheblend`" in one)
    assert f"| {says} | {3 / rival:.2f}" in row
    assert ("takes 4.0 times as long as `recompute`" in row) == (rival < 1)


def test_the_command_stores_a_line_in_the_given_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "lines.jsonl"
    words = ["kernels", "--small", "--device", "cpu", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["headlines", *words])
    program.main()
    (line,) = map(json.loads, output.read_text().splitlines())
    assert line["benchmark"] == "headline"
    assert line["command"].startswith("python -m benchmarks.headlines kernels --small")
    assert "share of the copy bandwidth" in capsys.readouterr().out


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'kernels'"):
        setting.measured("kernel", "cpu", lambda *_: None)
