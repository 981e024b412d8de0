"""`--prefix-store` and `--prefill-policy` reach the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run

PROMPT = "the old river falls . " * 60 + "Alma keeps 17 . question : Alma keeps ? answer :"


@pytest.mark.slow
def test_a_second_process_reads_the_start_of_the_first(tmp_path: Path) -> None:
    line = f"generate --prefix-store {tmp_path} --max-tokens 2 --temperature 0 --json"
    command = [sys.executable, "-m", "keyhole", *line.split(), PROMPT]
    found = [
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    ]
    cached = [one["stats"]["cached_prompt_tokens"] for one in found]
    assert cached == [0, 256]
    assert found[0]["token_ids"] == found[1]["token_ids"]


def test_a_prefill_policy_is_checked_before_the_model_is_loaded(run: Run) -> None:
    ran = run("generate", "x", "--model", "nowhere", "--prefill-policy", "xattention:mass=2")
    assert ran.status == 2
    assert "mass 2.0 must be above 0" in ran.err
    assert "did you mean" in run("generate", "x", "--prefill-policy", "xatention").err


def test_how_much_a_prompt_read_is_told(run: Run) -> None:
    policy = "xattention:mass=0.5,min_length=0,block_size=32"
    ran = run("generate", PROMPT, "--prefill-policy", policy, "--max-tokens", "1", "--json")
    assert ran.status == 0, ran.err
    assert 0 < json.loads(ran.out)["stats"]["prompt_attended_fraction"] < 1
