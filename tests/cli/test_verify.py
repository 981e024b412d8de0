"""`keyhole verify` prints a line per check, and fails as a whole if one fails."""

from __future__ import annotations

import json

import pytest
import torch

from keyhole import kernels
from keyhole.evaluate import verify
from tests.cli.conftest import Run

CHECK = verify.Check(
    policy="full",
    run="one request alone",
    difference=1e-6,
    error=1e-6,
    tolerance=1e-4,
    same_tokens=1.0,
)
WRONG = verify.Check(
    policy="delta", run="ragged batch", difference=3.0, error=0.5, tolerance=1e-4, same_tokens=0.5
)


def test_all_exact_is_exit_status_0(path: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "verify", lambda model: [CHECK])
    ran = run("verify", path, "--device", "cpu")
    assert ran.status == 0
    about, _, _, row, end = ran.out.splitlines()
    who = kernels.backend(torch.device("cpu"))
    assert about == f"model llama-0, device cpu, dtype float32, kernels {who}"
    assert row.split() == "full one request alone exact 1.0e-06 1.0e-04 1.0e-06 100.0%".split()
    assert end == "all checks passed"


def test_one_difference_is_exit_status_1(
    path: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "verify", lambda model: [CHECK, WRONG])
    ran = run("verify", path, "--device", "cpu")
    assert ran.status == 1
    assert "DIFFERS" in ran.out
    assert ran.out.endswith("1 of 2 checks failed\n")
    ran = run("verify", path, "--device", "cpu", "--json")
    assert ran.status == 1
    found = json.loads(ran.out)
    assert not found["passed"]
    assert [check["passed"] for check in found["checks"]] == [True, False]
    assert found["kernels"] == kernels.backend(torch.device("cpu"))
