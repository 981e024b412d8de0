"""`keyhole train-head` trains, stops and goes on, and writes what SpeContext loads."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from keyhole.cli import train_head
from keyhole.cli.common.terminal import Interrupt
from keyhole.retrieval.training.distill import Distiller
from keyhole.retrieval.training.train import TrainingOutcome
from keyhole.retrieval.training.training_config import TrainingConfig
from tests.cli.conftest import Run

OPTIONS = ("--device", "cpu", "--tokens", "600", "--length", "100", "--batch-tokens", "200")
OPTIONS += ("--num-queries", "8")


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data.txt"
    path.write_text("A text of some length. " * 20)
    return str(path)


def test_a_head_is_trained_and_used(path: str, data: str, run: Run, tmp_path: Path) -> None:
    folder = str(tmp_path / "head")
    ran = run("train-head", "--model", path, "--data", data, "--output", folder, *OPTIONS)
    assert ran.status == 0, ran.err
    assert "600 tokens in 3 steps" in ran.out
    assert f"written: {folder}" in ran.out
    policy = ("--policy", f"spe_context:head={folder},token_budget=8")
    assert run("generate", "x" * 40, "--model", path, *policy, "--max-tokens", "2").status == 0
    again = run("train-head", "--model", path, "--data", data, "--output", folder, *OPTIONS)
    assert again.status == 2
    assert "has a finished head" in again.err


def test_ctrl_c_leaves_a_run_that_goes_on(
    path: str, data: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Distiller.train_step

    def interrupted(self: Distiller) -> Any:
        if self.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    command = ("train-head", "--model", path, "--data", data, "--output", str(tmp_path / "head"))
    command += ("--objective", "eagle", "--inputs", "tokens")
    monkeypatch.setattr(Distiller, "train_step", interrupted)
    ran = run(*command, *OPTIONS)
    assert ran.status == 130
    assert "stopped after 400 of 600 tokens; the same command with --resume continues" in ran.err
    monkeypatch.setattr(Distiller, "train_step", step)
    assert "has an unfinished run" in run(*command, *OPTIONS).err
    ran = run(*command, "--resume", "--device", "cpu", "--json")
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    assert (found["finished"], found["tokens"], found["steps"]) == (True, 600, 3)
    assert json.loads((tmp_path / "head/config.json").read_text())["inputs"] == "tokens"


def test_a_head_goes_on_from_another(path: str, data: str, run: Run, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    options = ("--data", data, *OPTIONS)
    assert run("train-head", "--model", path, "--output", first, *options).status == 0
    command = (
        "train-head",
        "--model",
        path,
        "--objective",
        "selection",
        "--output",
        second,
        *options,
    )
    refused = run(*command)
    assert refused.status == 2
    assert "--objective selection requires --start" in refused.err
    ran = run(*command, "--start", first)
    assert ran.status == 0, ran.err
    assert json.loads((tmp_path / "second/config.json").read_text())["objective"] == "selection"


def test_one_step_is_counted_as_one(tmp_path: Path) -> None:
    """It was "1 steps"."""
    outcome = TrainingOutcome(
        finished=True, steps=1, tokens=3865, seconds=8.0, loss=None, recall=None, window=None
    )
    text = train_head._text(outcome, TrainingConfig(), tmp_path)
    assert text.startswith("3,865 tokens in 1 step, 8 s")


def test_other_data_are_refused(
    path: str, data: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run went on with any data, without a word."""
    monkeypatch.setattr(Interrupt, "seen", True)
    command = ("train-head", "--model", path, "--output", str(tmp_path / "head"), *OPTIONS)
    assert run(*command, "--data", data).status == 130
    other = tmp_path / "other.txt"
    other.write_text("Another text of some length. " * 20)
    ran = run(*command, "--data", str(other), "--resume")
    assert ran.status == 2
    assert f"was made with --data {data!r}" in ran.err
    assert f"but --data {str(other)!r}" in ran.err


def test_a_model_needs_data(path: str, run: Run) -> None:
    ran = run("train-head", "--model", path)
    assert ran.status == 2
    assert "give --data FILE with texts for this model" in ran.err


def test_a_wrong_setting_is_named(run: Run) -> None:
    ran = run("train-head", "--objective", "atention")
    assert ran.status == 2
    assert "unknown objective 'atention'; did you mean 'attention'?" in ran.err
