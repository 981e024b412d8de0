"""Every example is short and does what it says, offline, on the bundled model."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[[str], str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example as a program; returns what it printed."""

    def run(name: str) -> str:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_short_and_has_a_test_here() -> None:
    paths = {path.stem: path for path in EXAMPLES.glob("*.py")}
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert paths
    assert paths.keys() <= tested
    assert all(len(path.read_text().splitlines()) <= 40 for path in paths.values())


def test_generate(run: Run) -> None:
    printed = run("generate")
    expected, answered = (
        re.search(rf"^{word} *(.*?)( \(.*)?$", printed, re.MULTILINE)
        for word in ("expected:", "answered:")
    )
    assert expected
    assert answered
    assert expected[1] == answered[1]
    assert answered[2] == " (stop)"


@pytest.mark.slow
def test_stream(run: Run) -> None:
    printed = run("stream")
    assert re.search(r"^right: (True|False)$", printed, re.MULTILINE)
    assert re.search(r"^\d+ tokens, [\d.]+ ms each", printed, re.MULTILINE)


@pytest.mark.slow
def test_compare_policies(run: Run) -> None:
    rows = [line.split() for line in run("compare_policies").splitlines()[1:]]
    found = {row[0]: (int(row[1]), float(row[-1].rstrip("%"))) for row in rows}
    right, read = found["full"]
    assert read == 100
    for few, share in (found[name] for name in ("sliding_window", "streaming_llm", "quest")):
        assert few <= right
        assert share < 60


@pytest.mark.slow
def test_batch(run: Run) -> None:
    printed = run("batch").splitlines()
    assert [line.split()[1] for line in printed[:4]] == ["tokens:"] * 4
    known = [int(line.split()[0]) for line in printed[4:]]
    assert len(known) > 1
    assert min(known) > 900


@pytest.mark.slow
def test_logprobs(run: Run) -> None:
    printed = run("logprobs")
    for name in ("full", "delta", "streaming_llm"):
        assert name in printed.splitlines()
    assert all(float(number) <= 0 for number in re.findall(r" (-?\d+\.\d+)   others", printed))


def test_own_policy(run: Run) -> None:
    printed = run("own_policy")
    assert "answered:" in printed
    share = float(printed.split()[-1].rstrip("%"))
    assert 0 < share < 50


@pytest.mark.slow
def test_beyond_memory(run: Run) -> None:
    printed = run("beyond_memory")
    assert "same answer: True" in printed
    found = re.search(r"^(\d+) layers moved; (\d+)%", printed, re.MULTILINE)
    assert found is not None
    assert int(found[1]) >= 1
    assert int(found[2]) > 50


@pytest.mark.slow
def test_hugging_face(run: Run) -> None:
    printed = run("hugging_face")
    answers = re.findall(r"^expected: (.*)\nanswered: (.*)$", printed, re.MULTILINE)
    assert len(answers) == 2
    assert all(answered == expected for expected, answered in answers)
    share = float(printed.split()[-1].rstrip("%"))
    assert 0 < share < 70


@pytest.mark.slow
def test_documents(run: Run) -> None:
    printed = run("documents")
    expected, answered = (
        re.search(rf"^{word}: *(.*)$", printed, re.MULTILINE) for word in ("expected", "answered")
    )
    assert expected
    assert answered
    assert expected[1] == answered[1]
    kept = re.search(r"^(\d+)% of 2048 tokens kept, (\d+) not computed", printed, re.MULTILINE)
    assert kept
    assert int(kept[1]) < 30
    assert int(kept[2]) > 1500


@pytest.mark.slow
def test_rag_compare(run: Run) -> None:
    found = {}
    for line in run("rag_compare").splitlines():
        name, *cells = line.split()
        if cells[0] == "right":
            kind = name
        else:
            found[kind, name] = int(cells[0]), int(cells[3].rstrip("%"))
    assert {right for (_, name), (right, _) in found.items() if name == "recompute"} == {3}
    assert found["one", "reuse"][0] == 3
    assert found["needs_each_other", "reuse"][0] == 0
    for kind in ("one", "needs_each_other"):
        assert found[kind, "sam_kv"][0] == 3
        assert found[kind, "sam_kv"][1] < 30
