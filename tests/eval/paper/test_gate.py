"""A model that passed is not checked again; one that failed is not evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keyhole.eval.line_file import LineFile
from keyhole.eval.paper import suite
from keyhole.eval.paper.suite import gate, why_not_evaluated
from keyhole.eval.verify import Check
from keyhole.models.model import Model


def header(commit: str = "abc") -> dict[str, Any]:
    about = {"benchmark": "eval", "commit": commit, "versions": {"torch": "2"}}
    return about | {"machine": {"device": "cpu"}}


def check(error: float, policy: str = "quest") -> Check:
    return Check(
        policy=policy,
        run="ragged batch",
        difference=error,
        error=error,
        tolerance=1e-4,
        same_tokens=1.0,
        replayed=0,
    )


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[list[Check]]:
    """What verify finds, one list for each time that it runs."""
    found: list[list[Check]] = []
    monkeypatch.setattr(suite, "verify", lambda model: found.pop(0))
    return found


def test_a_pass_is_stored_and_found_again(
    model: Model, checks: list[list[Check]], tmp_path: Path
) -> None:
    checks += [[check(0.0), check(1e-5)]]
    file = LineFile(tmp_path / "eval.jsonl")
    line = gate(model, file, header)
    assert why_not_evaluated(line) is None
    assert line["benchmark"] == "eval-verify"
    assert [one["passed"] for one in line["checks"]] == [True, True]
    assert gate(model, LineFile(file.path), header) == line
    with pytest.raises(IndexError):  # another version of the code has passed nothing yet
        gate(model, file, lambda: header("def"))


def test_a_failure_names_the_worst_check_and_is_repeated(
    model: Model, checks: list[list[Check]], tmp_path: Path
) -> None:
    checks += [[check(0.0), check(0.5, "delta"), check(0.1)], [check(0.0)]]
    file = LineFile(tmp_path / "eval.jsonl")
    assert why_not_evaluated(gate(model, file, header)) == (
        "llama-0 does not reproduce the logits of transformers: 2 of 3 checks differ, the worst "
        "under "
        "delta (ragged batch): error 5.0e-01, allowed 1.0e-04; see `keyhole verify`"
    )
    assert why_not_evaluated(gate(model, file, header)) is None
    assert not checks
