"""Where results are stored, and how they describe the machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

import benchmarks
import keyhole
from keyhole.bench import measure
from keyhole.bench.measure import Turn, take_turns
from keyhole.errors import ConfigError

CPU = torch.device("cpu")


def test_results_go_to_the_checkout() -> None:
    assert benchmarks.results() == Path(__file__).parents[2] / "benchmarks/results"


def test_a_repository_of_somebody_else_is_no_commit_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measure, "ROOT", tmp_path / "site-packages")
    assert measure.commit() is None


@pytest.mark.parametrize("name", ["gpu", "mps", "cuda:99", "cpu:x", ""])
def test_a_device_that_is_not_here_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="must be one of auto"):
        measure.device(name)


def test_a_modified_commit_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lines and pages of a run that is under way are no change."""

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True)

    places = [tmp_path / name for name in ("pyproject.toml", "benchmarks/results/a", "docs/a")]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    clean = measure.commit()
    assert clean is not None
    assert len(clean) == 12
    for place in places[1:]:
        place.write_text("2")
    assert measure.commit() == clean
    places[0].write_text("2")
    assert measure.commit() == f"{clean}+"


def test_a_line_has_its_command_machine_and_date(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["/some/where/keyhole", "bench", "decode", "--note", "a b"])
    line = measure.header("decode", CPU, "a b")
    assert line["command"] == "keyhole bench decode --note 'a b'"
    assert {"cpu", "cores", "threads", "memory_gib", "load_average"} <= line["machine"].keys()
    assert line["machine"]["device"] == "cpu"
    assert line["versions"]["keyhole"] == keyhole.__version__
    assert {"date", "commit", "note", "benchmark"} <= line.keys()
    for _ in range(2):
        benchmarks.append(tmp_path / "new" / "lines.jsonl", line)
    first, second = map(json.loads, (tmp_path / "new" / "lines.jsonl").read_text().splitlines())
    assert first == second == line


def test_bandwidth_is_measured() -> None:
    assert measure.read_bandwidth(CPU) > 0


def test_everybody_has_a_turn_in_an_order_that_rotates() -> None:
    calls: list[str] = []

    def turn(name: str) -> Turn:
        return Turn(
            call=lambda: calls.append(name),
            before=lambda: calls.append("<"),
            after=lambda: calls.append(">"),
        )

    times = take_turns({name: turn(name) for name in "abc"}, 4, CPU)
    assert "".join(calls) == "".join(f"<{name}>" for name in "abcbcacababc")
    assert {name: len(spent) for name, spent in times.items()} == {"a": 4, "b": 4, "c": 4}
    assert all(ms >= 0 for spent in times.values() for ms in spent)
