"""`keyhole batch`: every line answered once, whatever ends the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.terminal import run_on_terminal

ROOT = Path(__file__).parents[2]


def write(path: Path, count: int, tokens: int = 2) -> Path:
    body = {"prompt": "hello", "max_tokens": tokens, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": body})
        for i in range(count)
    ]
    path.write_text("\n".join(lines))
    return path


def names(path: Path) -> list[Any]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def test_it_says_what_was_answered_and_a_second_run_adds_nothing(
    path: str, run: Run, tmp_path: Path
) -> None:
    source, output = write(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl"
    line = ("batch", str(source), str(output), "--model", path, "--policy", "delta")
    ran = run(*line)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == f"5 lines: 5 answered now, 0 before, 0 with errors; {output}\n"
    assert sorted(names(output)) == [*"01234"]
    ran = run(*line, "--json")
    assert ran.status == 0
    assert json.loads(ran.out) == {"lines": 5, "answered": 0, "kept": 5, "failed": 0}


def test_lines_with_errors_are_counted_in_the_exit_status(
    path: str, run: Run, tmp_path: Path
) -> None:
    source, output = write(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    source.write_text(source.read_text() + "\nno json")
    ran = run("batch", str(source), str(output), "--model", path)
    assert ran.status == 1
    assert ran.out.startswith("3 lines: 3 answered now, 0 before, 1 with errors; ")


def test_a_mistake_in_the_flags_leaves_no_output(run: Run, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl"
    for flags in (("--policy", "qest"), ("--model", "no/where"), ("--memory", "much")):
        assert run("batch", str(source), str(output), *flags).status == 2
    assert not output.exists()


def test_a_terminal_shows_a_bar(path: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", 3)
    shown = run_on_terminal("batch", str(source), str(tmp_path / "out.jsonl"), "--model", path)
    assert "lines: 100%" in shown.err
    assert "3/3" in shown.err
    assert "failed=0" in shown.err


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_answers_every_line_once(
    path: str, tmp_path: Path
) -> None:
    source, output = write(tmp_path / "in.jsonl", 200, tokens=20), tmp_path / "out.jsonl"
    line = [sys.executable, "-m", "keyhole", "batch", str(source), str(output), "--model", path]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    sizes = []
    for _ in range(2):
        before = output.stat().st_size if output.exists() else 0
        with subprocess.Popen(line, env=env, stdout=subprocess.DEVNULL) as running:
            while not output.exists() or output.stat().st_size == before:
                assert running.poll() is None
                time.sleep(0.005)
            running.send_signal(signal.SIGKILL)
        sizes.append(len(names(output)))
    assert 0 < sizes[0] < sizes[1] < 200
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"200 lines: {200 - sizes[1]} answered now, {sizes[1]} before")
    assert sorted(names(output), key=int) == [f"{i}" for i in range(200)]
