"""`make gpu` can be checked where there is no GPU, and keeps a training state whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from keyhole.bench.headlines import HEADLINES

ROOT = Path(__file__).parents[2]


def test_without_a_device_it_says_what_it_would_run() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": ".", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("no CUDA device here")
    assert "tests collected" in done.stdout
    for module in ("pytest tests/gpu", "keyhole bench decode", "tiny.train", "tiny.export"):
        assert module in done.stdout
    for name in HEADLINES:
        assert f"headlines.jsonl {name}\n" in done.stdout
    assert done.stdout.endswith("a device would run this\n")


def test_every_part_has_a_number_and_a_place_in_the_order() -> None:
    found = gpu.parts(None, ROOT, 100)
    assert (
        sorted(part.number for part in found)
        == sorted(gpu.ORDER)
        == list(range(1, 4 + len(HEADLINES)))
    )


def test_what_there_is_no_time_for_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran: list[tuple[int, float]] = []
    monkeypatch.setattr(gpu, "run", lambda part, limit: ran.append((part.number, limit)) or True)
    clock = iter([0.0, 0.0, 100.0, 480.0])
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(clock))
    assert gpu.run_parts((1, 5, 3), None, tmp_path)
    assert ran == [(1, 270), (5, 430)]  # its own limit, then what is left
    last = "== part 3: training of the bundled model: no time left; `make gpu PART=3`\n"
    assert capsys.readouterr().out == last


def test_an_argument_that_a_part_does_not_know_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "json.tool", "--no-such-thing"]
    part = gpu.Part(number=9, title="wrong", limit_s=1, commands=[command])
    assert not gpu.dry_run([part])
    assert "could not run" in capsys.readouterr().out


def test_a_part_that_fails_or_takes_too_long_is_not_good() -> None:
    def run(code: str, limit_s: float = 60) -> bool:
        command = [sys.executable, "-c", code]
        return gpu.run(gpu.Part(number=9, title="", limit_s=9, commands=[command]), limit_s)

    assert run("pass")
    assert not run("raise SystemExit(3)")
    assert not run("import time; time.sleep(60)", limit_s=1)


def test_a_training_state_is_stored_in_pieces_and_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_PIECE_BYTES", 10)
    run, again, state = (tmp_path / name for name in ("run", "again", "state"))
    run.mkdir()
    again.mkdir()
    for content in (bytes(range(37)), bytes(range(15))):  # fewer pieces the second time
        (run / "training.pt").write_bytes(content)
        (run / "log.jsonl").write_text('{"step": 7, "exact": {"512": {"recall": 0.5}}}\n')
        gpu.keep(run, state)
        gpu.restore(state, again)
        assert (again / "training.pt").read_bytes() == content
        assert (again / "log.jsonl").is_file()
