"""`keyhole eval --suite paper` from the gate to a settings file, and on after an interruption."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import keyhole
from keyhole import LLM
from keyhole.cli import eval_suites
from keyhole.eval.paper import suite
from keyhole.eval.paper import suite as paper_suite
from keyhole.eval.paper.documents import DocumentEvaluation
from keyhole.eval.paper.suite import LinearTime, Speed
from keyhole.eval.verify import Check
from keyhole.eval.workload import Answered
from tests.checkpoints import make_model
from tests.cli.conftest import Run

#: So much of the suite that it takes seconds.
LITTLE = ("--suite", "paper", "--tasks", "passkey", "--policies", "quest", "--device", "cpu")
LITTLE += ("--limit", "1", "--budgets", "1/8")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights, which answer nothing; long enough for eight documents of bytes."""
    folder = tmp_path_factory.mktemp("reader")
    return make_model("llama", folder, tokenizer=True, max_position_embeddings=4096)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The error that the gate finds; it is verified for itself in another test."""
    errors = [0.0]

    def verify(model: Any) -> list[Check]:
        return [
            Check(
                policy="full",
                run="one request alone",
                difference=errors[0],
                error=errors[0],
                tolerance=1e-4,
                same_tokens=1.0,
                replayed=0,
            )
        ]

    monkeypatch.setattr(paper_suite, "verify", verify)
    return errors


def outputs(folder: Path) -> tuple[str, ...]:
    output, settings = folder / "eval.jsonl", folder / "settings.json"
    return ("--output", str(output), "--settings", str(settings))


def lines(folder: Path, benchmark: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    return [line for line in found if line["benchmark"] == benchmark]


@pytest.mark.slow
def test_a_model_that_answers_nothing_gets_no_recommendation(
    reader: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the gate to the page, with nothing left out; and nothing is measured twice."""
    monkeypatch.setattr(eval_suites, "_DOCUMENTS", "multi_document_2")
    command = ("eval", "--model", reader, *LITTLE, "--lengths", "3000", *outputs(tmp_path))
    ran = run(*command)
    assert ran.status == 0, ran.err
    assert re.match(r"verify: \d+ checks passed\nllama-0, tasks: 5 cells, 0 stored", ran.out)
    assert "documents: 1 question, 0 stored, the rest at most" in ran.out
    (row,) = [row.split("  ") for row in ran.out.splitlines() if row.startswith("quest ")][:1]
    assert row[1].strip() == "cannot tell"
    assert "full attention itself is right in at most 0 % anywhere" in ran.out
    for name in ("reuse", "sam_kv", "cacheblend", "epic", "multi_infllm"):
        assert re.search(rf"^{name} +cannot tell ", ran.out, flags=re.MULTILINE)
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert (settings["policy"], settings["reuse"], settings["num_layers"]) == ("full", None, 4)
    measured = settings["measured"]
    assert measured["verdict"] == "no method to use"
    assert measured["verdicts"]["quest"]["verdict"] == "cannot tell"
    assert measured["lengths"] == [3000]
    assert {"model", "fingerprint", "date", "command", "versions", "machine"} <= set(measured)
    assert LLM(reader, policy=tmp_path / "settings.json", device="cpu").policy.name == "full"
    page = (tmp_path / "eval.html").read_text()
    heads = re.findall(r"<h2[^>]*>([^<]*)</h2>", page)
    assert heads[:4] == ["Verdicts", "Every budget", "Stored documents", "Settings to use"]
    assert "No method was shown to be worth using" in page
    assert len(lines(tmp_path, "eval-verify")) == 1
    cells = lines(tmp_path, "eval")
    assert [line.get("control") for line in cells] == [None, None, "recent", "random", "oracle"]

    def nothing(*_: Any) -> Any:
        raise AssertionError("everything is stored")

    for place, name in (
        (paper_suite, "verify"),
        (suite, "probe"),
        (LLM, "ask"),
        (Answered, "measure"),
    ):
        monkeypatch.setattr(place, name, nothing)
    before = (tmp_path / "eval.jsonl").read_bytes()
    again = run(*command)
    assert again.status == 0, again.err
    assert "tasks: 5 cells, 5 stored; documents: 1 question, 1 stored" in again.out
    assert (tmp_path / "eval.jsonl").read_bytes() == before
    found = json.loads(run(*command, "--json").out)
    assert found["lines"] == cells
    assert found["questions"] == lines(tmp_path, "eval-documents")
    assert found["policy"] == "full"


@pytest.mark.slow
def test_the_bundled_model_from_end_to_end(
    run: Run, tmp_path: Path, checked: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "probe", lambda *_: _speed())
    kinds = "multi_document_1,tiny_documents_needs_each_other"
    monkeypatch.setattr(eval_suites, "_BUNDLED_DOCUMENTS", kinds)
    ran = run("eval", *LITTLE, "--lengths", "1024", *outputs(tmp_path))
    assert ran.status == 0, ran.err
    questions = lines(tmp_path, "eval-documents")
    assert [line["task"] for line in questions] == [
        "tiny_documents_one",
        "tiny_documents_needs_each_other",
    ]
    for line in questions:
        assert set(line["results"]) == {*keyhole.available_reuse_methods(), "no_documents"}
        assert line["results"]["recompute"]["exact"] == 1
    assert {line["task"] for line in lines(tmp_path, "eval")} == {"tiny_passkey"}


@pytest.mark.slow
def test_an_interrupted_run_goes_on_under_the_same_command(
    reader: str,
    run: Run,
    tmp_path: Path,
    checked: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once within the cells and once before the documents."""
    measure, asking, done = Answered.measure, DocumentEvaluation.run, []

    def interrupted(self: Answered, *given: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(given[1].name)
        return measure(self, *given)

    def stopped(self: DocumentEvaluation) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "probe", lambda *_: _speed())
    monkeypatch.setattr(eval_suites, "_DOCUMENTS", "multi_document_1")
    command = ("eval", "--model", reader, *LITTLE, "--lengths", "3000", *outputs(tmp_path))
    monkeypatch.setattr(Answered, "measure", interrupted)
    ran = run(*command)
    assert ran.status == 130
    assert f"stopped; the same command resumes from {tmp_path / 'eval.jsonl'}" in ran.err
    assert [line["policy"] for line in lines(tmp_path, "eval")] == ["full", "quest"]
    assert not (tmp_path / "settings.json").exists()
    monkeypatch.setattr(Answered, "measure", measure)
    monkeypatch.setattr(DocumentEvaluation, "run", stopped)
    ran = run(*command)
    assert ran.status == 130
    assert "tasks: 5 cells, 2 stored" in ran.out
    monkeypatch.setattr(DocumentEvaluation, "run", asking)
    ran = run(*command)
    assert ran.status == 0, ran.err
    assert "tasks: 5 cells, 5 stored; documents: 1 question, 0 stored" in ran.out
    assert len(lines(tmp_path, "eval")) == 5
    assert len(lines(tmp_path, "eval-documents")) == 1


def test_a_model_that_fails_the_gate_is_not_evaluated(
    reader: str, run: Run, tmp_path: Path, checked: list[float]
) -> None:
    checked[0] = 0.5
    ran = run("eval", "--model", reader, *LITTLE, "--lengths", "3000", *outputs(tmp_path))
    assert ran.status == 1
    assert ran.err.startswith(
        "not evaluated: llama-0 does not reproduce the logits of transformers"
    )
    assert ran.out == ""
    assert lines(tmp_path, "eval") == []
    assert not (tmp_path / "settings.json").exists()


def test_a_dry_run_says_what_there_is_to_do_and_stores_nothing(
    reader: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "probe", lambda *_: _speed())
    command = (
        "eval",
        "--model",
        reader,
        *LITTLE,
        "--lengths",
        "3000",
        "--dry-run",
        *outputs(tmp_path),
    )
    ran = run(*command)
    assert ran.status == 0, ran.err
    assert ran.out.startswith("llama-0, tasks: 5 cells, 0 stored, the rest at most ")
    assert not list(tmp_path.iterdir())
    found = json.loads(run(*command, "--json").out)
    assert [(one["name"], one["number"]) for one in found] == [("tasks", 5), ("documents", 2)]


def test_questions_over_documents_that_are_left_out_are_said(
    reader: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page lacked stored documents, and nothing said why."""
    monkeypatch.setattr(suite, "probe", lambda *_: _speed())
    little = ("eval", "--model", reader, *LITTLE, "--dry-run", *outputs(tmp_path))
    ran = run(*little, "--lengths", "512,1024")
    assert ran.status == 0, ran.err
    assert "documents:" not in ran.out
    (line,) = ran.err.splitlines()
    task = r"length 1024 is too short for multi_document_\d: it needs at least (\d+)"
    found = re.fullmatch(f"questions over documents left out: {task}; {task}", line)
    assert found, line
    ran = run(*little, "--lengths", str(max(map(int, found.groups()))))
    assert "documents: 2 questions" in ran.out
    assert ran.err == ""


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--settings", "no/settings.json"), "--settings 'no/settings.json': there is no folder"),
        (("--html", "no/page.html"), "--html 'no/page.html': there is no folder 'no'"),
        (("--lengths", "8192"), "length 8192 is more than the 4096 tokens that llama-0 takes"),
        (("--lengths", "64"), "no task has texts of 64 tokens"),
        (("--tasks", "perplexity"), "task perplexity uses teacher forcing, which this suite"),
        (("--terms", "tuned"), "terms 'tuned' must be given, equal or published"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    reader: str, run: Run, arguments: tuple[str, ...], error: str
) -> None:
    ran = run("eval", "--model", reader, *LITTLE, *arguments)
    assert ran.status == 2
    assert error in ran.err
    assert len(ran.err.splitlines()) == 1


def _speed() -> Speed:
    line = LinearTime(base=0.1, slope=0.0)
    return Speed(chunk_tokens=100, chunk=line, batch=1, step=line)
