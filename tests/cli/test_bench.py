"""`keyhole bench` adds a line, shows tables, and refuses what does not belong together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keyhole.bench import measure
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_BANDWIDTH_BYTES", 1 << 16)


SMALL = ("--shape", "smoke", "--contexts", "32,64", "--repeat", "1")


def test_a_decode_step_is_one_json_object(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "decode.jsonl"
    given = ("--systems", "transformers_sdpa,delta", "--layers", "2", "--device", "cpu", "--json")
    done = run("bench", "decode", *SMALL, *given, "--output", str(output))
    assert done.status == 0, done.err
    line = json.loads(done.out)
    assert line == json.loads(output.read_text())
    assert line["settings"]["layers"] == 2
    assert [r["system"] for r in line["results"]] == ["transformers_sdpa", "delta"] * 2
    assert "peak memory" in done.err  # tables, for those who wait


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("decod",), "unknown benchmark 'decod'; did you mean 'decode'?"),
        (("offload",), "unknown benchmark 'offload'"),
        (("serve", "--systems", "full"), "--systems is for `keyhole bench decode`"),
        (("serve", "--token-budget", "9"), "--token-budget is for `keyhole bench decode`"),
        (("decode", "--requests", "2"), "--requests is for `keyhole bench serve`"),
        (("decode", "--contexts", "50"), "contexts (50,) must be multiples of 16"),
        (("decode", "--contexts", "many"), "--contexts 'many' must be numbers such as 0,1"),
        (("decode", "--systems", "qest", *SMALL), "did you mean 'quest'?"),
        ((), "the following arguments are required: BENCHMARK"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    run: Run, arguments: tuple[str, ...], error: str
) -> None:
    done = run("bench", *arguments)
    assert done.status == 2
    assert error in done.err
    assert len(done.err.splitlines()) == 1
