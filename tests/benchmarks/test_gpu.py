"""`make gpu` can be checked where there is no GPU, and keeps a training state whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.paper.settings import HEADLINES

ROOT = Path(__file__).parents[2]


#: A dry run without the tiny shapes, which take minutes and are covered by other tests.
PLAN = """
from benchmarks import gpu
gpu.run = lambda part, limit_s: print("in small:", part.number, *part.commands[0]) or True
gpu.main()
"""


@pytest.mark.slow
def test_without_a_device_it_lists_what_a_device_would_run() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAN],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": ".", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("no CUDA device: dry run")
    assert "tests collected" in done.stdout
    for module in (
        "pytest tests/gpu",
        "keyhole bench decode",
        "tiny_model.train",
        "tiny_model.export",
    ):
        assert module in done.stdout
    for name in HEADLINES:
        assert f"headlines.jsonl {name}\n" in done.stdout
    small = re.findall(r"^in small: (\d+) .* -m (.*)$", done.stdout, re.MULTILINE)
    assert {int(number) for number, _ in small} | {1} == set(gpu.ORDER)  # 1 needs triton
    assert ("4", "benchmarks.headlines --small --device cpu delta_figure_4") in small
    assert done.stdout.endswith("dry run passed\n")


def test_every_part_has_a_number_and_a_place_in_the_order() -> None:
    found = gpu.parts(None, ROOT, 100)
    assert (
        sorted(part.number for part in found)
        == sorted(gpu.ORDER)
        == list(range(1, 4 + len(HEADLINES) + len(gpu.TESTS) - 1))
    )
    assert all(0 < part.least_s <= part.limit_s <= 530 for part in found if part.number != 3)


def test_every_part_is_described() -> None:
    description = (gpu.__doc__ or "").split("\n\n")[1]
    named = {int(number) for number in re.findall(r"^ +(\d+) ", description, re.MULTILINE)}
    assert named | set(gpu.SETTINGS) == set(gpu.ORDER)
    assert f"4  to {max(gpu.SETTINGS)}: " in description


def test_every_test_file_for_a_device_is_in_one_part() -> None:
    there = {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}
    named = [name for _, files in gpu.TESTS.values() for name in files]
    assert len(named) == len(set(named))
    assert set(named) < there
    rest = gpu._tests(17, ROOT / "log")
    assert "tests/gpu" in rest
    assert {arg for arg in rest if arg.startswith("--ignore")} == {
        f"--ignore=tests/gpu/{name}" for name in named
    }


@pytest.mark.slow
def test_a_failure_is_printed_at_once(tmp_path: Path) -> None:
    """Also where a run is stopped in the next test."""
    (tmp_path / "test_two.py").write_text(
        "import os\ndef test_bad():\n    assert 1 == 2\ndef test_end():\n    os._exit(9)\n"
    )
    log = tmp_path / "new" / "tests.log"
    command = [sys.executable, "-m", "pytest", str(tmp_path), "-p", "no:cacheprovider"]
    command += ["-p", "tests.gpu.at_once", "--log", str(log)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 9
    assert "assert 1 == 2" in done.stdout
    assert "assert 1 == 2" in log.read_text()
    assert log.read_text().endswith("test_two.py::test_end\n")


def test_what_there_is_no_time_for_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran: list[tuple[int, float]] = []
    monkeypatch.setattr(gpu, "run", lambda part, limit: ran.append((part.number, limit)) or True)
    clock = iter([0.0, 0.0, 100.0, 200.0, 200.0, 480.0])
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(clock))
    assert gpu.run_parts((1, 15, 5, 2, 3), None, tmp_path)
    assert ran == [(1, 520), (15, 430), (2, 150)]  # its own limit, or what is left
    assert capsys.readouterr().out == (
        "== part 5: spe_context_80gb_long_answer: skipped, no time left; run PART=5\n"
        "== part 3: training of the bundled model: skipped, no time left; run PART=3\n"
    )


def test_an_argument_that_a_part_does_not_know_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "json.tool", "--no-such-thing"]
    part = gpu.GpuPart(number=9, title="wrong", limit_s=1, least_s=1, commands=[command])
    assert not gpu.dry_run([part])
    assert "dry run FAILED" in capsys.readouterr().out


def test_a_dry_run_fails_where_a_part_fails_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_is_understood", lambda *_: True)
    for code, good in (("pass", True), ("raise SystemExit(3)", False)):
        small = [[sys.executable, "-c", code]]
        part = gpu.GpuPart(number=9, title="", limit_s=9, least_s=1, commands=[], small=small)
        assert gpu.dry_run([part]) == good


def test_a_dry_run_reports_a_missing_triton(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda _: None)
    part = gpu.GpuPart(number=1, title="", limit_s=9, least_s=1, commands=[])
    assert gpu._small_tests(1) == []
    assert gpu.dry_run([part])
    assert "triton cannot be imported" in capsys.readouterr().out


def test_a_part_that_fails_or_takes_too_long_is_not_good() -> None:
    def run(code: str, limit_s: float = 60) -> bool:
        command = [sys.executable, "-c", code]
        part = gpu.GpuPart(number=9, title="", limit_s=9, least_s=1, commands=[command])
        return gpu.run(part, limit_s)

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
