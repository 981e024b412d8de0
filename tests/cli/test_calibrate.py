"""`keyhole calibrate` prints, writes and draws what it measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from keyhole.policy.calibration import Calibration
from tests.cli.conftest import Run

OPTIONS = ("--num-delta-layers", "1", "--full-layers", "0", "--token-budget", "32")
OPTIONS += ("--max-tokens", "4", "--device", "cpu")


def test_recall_is_printed_and_layers_are_written(path: str, run: Run, tmp_path: Path) -> None:
    data, layers, plot = (tmp_path / name for name in ("data.jsonl", "layers.json", "recall.png"))
    data.write_text(json.dumps("A text of some length. " * 4) + "\n\n" + json.dumps("x" * 70))
    files = ("--data", str(data), "--output", str(layers), "--plot", str(plot))
    ran = run("calibrate", path, *OPTIONS, *files)
    assert ran.status == 0, ran.err
    assert "llama-0: optimal placement over 6 decode steps, token_budget 32" in ran.out
    for line in (
        "0      everything",
        "1      everything, and chooses",
        "2      the choice of layer 1",
    ):
        assert line in ran.out
    assert Calibration.load(layers).delta_layers == (1,)
    assert plot.read_bytes().startswith(b"\x89PNG")
    policy = ("--policy", "delta", "--layers", str(layers), "--max-tokens", "2")
    assert run("generate", "x", "--model", path, "--device", "cpu", *policy).status == 0


def test_a_whole_file_may_be_the_prompt(path: str, run: Run, tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text("A text\nof some length\n" * 4)
    ran = run("calibrate", path, *OPTIONS, "--data", str(data), "--method", "paper", "--json")
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    assert set(found) == {f.name for f in dataclasses.fields(Calibration)} | {"steps", "shift"}
    assert found["method"] == "paper"
    assert found["steps"] == 3


def test_prompts_within_the_budget_are_refused(path: str, run: Run, tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text("short")
    ran = run("calibrate", path, *OPTIONS, "--data", str(data))
    assert ran.status == 2
    assert "no decode step had more than token_budget 32 tokens" in ran.err
