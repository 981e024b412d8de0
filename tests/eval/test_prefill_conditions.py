"""Prefill policies in an evaluation: their cells, their controls, and what is stored."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from keyhole.cli import main
from keyhole.errors import ConfigError
from keyhole.eval.methods import prefill_conditions
from keyhole.policies.prefill import make_prefill_policy
from tests.policies.models import twins

LABEL = "xattention:mass=0.8,min_length=0,block_size=16"


def test_controls_have_the_settings_of_their_method() -> None:
    geometry = twins("llama")[0].geometry(4)
    method, recent, random = prefill_conditions([LABEL], geometry, with_controls=True)
    assert [one.control for one in (method, recent, random)] == [None, "recent", "random"]
    assert method.measured == make_prefill_policy(LABEL)
    for control in (recent, random):
        assert control.policy.dense
        own = dataclasses.asdict(control.measured)
        assert dataclasses.asdict(method.measured).items() <= own.items()
        assert make_prefill_policy(control.prefill.text) == control.measured
    named = method.about["controls"]
    assert {name: one["policy"] for name, one in named.items()} == {
        "recent": "recent_blocks",
        "random": "random_blocks",
    }
    (alone,) = prefill_conditions([LABEL], geometry, with_controls=False)
    assert "controls" not in alone.about


def test_a_wrong_prefill_policy_is_named() -> None:
    geometry = twins("llama")[0].geometry(4)
    with pytest.raises(ConfigError, match="mass 2"):
        prefill_conditions(["xattention:mass=2"], geometry, with_controls=False)


def test_cells_tell_how_much_prompts_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "lines.jsonl"
    line = f"eval --tasks tiny_recall --lengths 256 --limit 2 --policies full --output {file}"
    command = [*line.split(), "--prefill-policies", LABEL, "--controls"]
    assert main(command) == 0
    assert "prompt read" in capsys.readouterr().out
    lines = {one["policy"]: one for one in map(json.loads, file.read_text().splitlines())}
    assert lines.keys() == {"full", "xattention", "recent_blocks", "random_blocks"}
    shares = {name: one.pop("prompt_read_share") for name, one in lines.items()}
    assert shares["full"] is None
    assert 0 < shares["xattention"] < 1
    # Later layers see other queries, so that as many blocks hold the mass of another estimate.
    assert shares["random_blocks"] == pytest.approx(shares["xattention"], abs=0.2)
    assert main(command) == 0  # nothing is measured again
    assert "0 cells measured, 4 stored before" in capsys.readouterr().out
