"""`keyhole bench` adds a line, shows tables, and refuses what does not belong together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keyhole.bench import admission, decode, measure, model
from keyhole.bench.settings import AdmissionSettings
from keyhole.errors import ConfigError
from keyhole.eval.line_file import LineFile
from keyhole.models.loading import load
from tests.checkpoints import make_model
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_BANDWIDTH_BYTES", 1 << 16)
    for module in (decode, model):  # slow, and nothing is large here
        monkeypatch.setattr(module, "release_memory", lambda: None)


SMALL = ("--shape", "smoke", "--contexts", "32,64", "--repeat", "1")


@pytest.mark.slow
def test_admission_prints_the_delay_of_other_requests(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "admission.jsonl"
    given = ("--documents", "2", "--tokens", "200", "--question", "9", "--others", "2")
    more = ("--prompt", "100", "--repeat", "3", "--methods", "epic:num_initial=8,reuse")
    done = run("bench", "admission", *given, *more, "--output", str(output))
    assert done.status == 0, done.err
    assert "longest / median" in done.out
    assert done.out.count("longest step / median while ") == 4
    assert done.out.count("of all questions / median while ") == 2
    line = json.loads(output.read_text())
    assert line["settings"]["methods"] == ["epic:num_initial=8", "reuse"]
    assert len(line["bars"]) == 6
    for number, found in enumerate(line["results"]):
        assert found["stored_tokens"] == 400
        assert len(found["all_rounds"]) == len(found["all_alone_ms"]) == 3
        for one in found["all_rounds"]:
            assert one["steps"] > 1
            assert one["longest_ms"] <= one["ttft_ms"]
            assert one["longest_ratio"] == pytest.approx(one["longest_ms"] / one["step_ms"])
            assert one["longest_cpu_ratio"] > 0
        names = ("longest_ratio", "longest_cpu_ratio")
        for name, bar in zip(names, line["bars"][3 * number :][:2], strict=True):
            middle = sorted(one[name] for one in found["all_rounds"])[1]
            assert found[name] == bar["value"] == middle
            assert bar["met"] == (middle <= 2)
        worst = max(one["longest_cpu_ratio"] for one in found["all_rounds"])
        assert found["worst_cpu_ratio"] == line["bars"][3 * number + 2]["value"] == worst


def test_others_that_end_during_the_measurement_are_an_error(tmp_path: Path) -> None:
    """Their steps were empty, and the ratios were thousands."""
    short = load(make_model("llama", tmp_path, max_position_embeddings=256), "cpu")
    settings = AdmissionSettings(
        methods=("reuse",), documents=1, tokens=32, question=4, others=1, prompt=200, repeat=1
    )
    with pytest.raises(ConfigError, match="prompt 200 must be shorter"):
        admission.run(short, settings, lambda *_: None)


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


def test_contexts_before_ctrl_c_are_stored(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of measurements were lost."""
    measure_context = decode.measure_context

    def stopped(weights: Any, settings: Any, context: int, *more: Any) -> Any:
        if context == 64:
            raise KeyboardInterrupt
        return measure_context(weights, settings, context, *more)

    monkeypatch.setattr(decode, "measure_context", stopped)
    output = tmp_path / "decode.jsonl"
    given = ("--systems", "full", "--device", "cpu", "--output", str(output))
    assert run("bench", "decode", *SMALL, *given).status == 130
    line = json.loads(output.read_text())
    assert line["interrupted"] is True
    assert [r["context"] for r in line["results"]] == [32]
    output.unlink()
    assert run("bench", "decode", "--contexts", "64", *SMALL[:2], *given).status == 130
    assert not output.exists()


def test_results_are_shown_although_the_disk_is_full(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --json a full disk cost all results: they were stored before they were printed."""
    monkeypatch.setattr(LineFile, "add", _full)
    monkeypatch.setattr(decode, "run", lambda *_: {"results": [], "read_bytes_per_s": 1e9})
    done = run("bench", "decode", *SMALL, "--json", "--output", str(tmp_path / "x.jsonl"))
    assert (done.status, done.err) == (2, "error: no room\n")
    assert json.loads(done.out)["read_bytes_per_s"] == 1e9


def _full(file: LineFile, line: object) -> None:
    raise ConfigError("no room")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("decod",), "unknown benchmark 'decod'; did you mean 'decode'?"),
        (("offload",), "unknown benchmark 'offload'"),
        (("admission", "--systems", "full"), "--systems can be used with `keyhole bench decode`"),
        (("admission", "--dtype", "float32"), "--dtype can be used with `keyhole bench decode`"),
        (("decode", "--documents", "2"), "--documents can be used with `keyhole bench admission`"),
        (("decode", "--time-limit", "9"), "--time-limit can be used with `keyhole bench serve`"),
        (("admission", "--documents", "0"), "documents 0 must be at least 1"),
        (("decode", "--contexts", "50"), "contexts (50,) must be multiples of 16"),
        (("decode", "--contexts", "many"), "--contexts 'many' must be numbers such as 0,1"),
        (("decode", "--systems", "qest", *SMALL), "did you mean 'quest'?"),
        (("decode", "--systems", "spe_context:head=none"), "head 'none' must be left out"),
        (("decode", "--systems", "seer_attention_r"), "needs a gate; this benchmark has none"),
        (("decode", "--layers", "9" * 12, *SMALL), "shape 'smoke' with layers 999999999999 has"),
        # These were said once all documents were stored, or as "max_tokens -983617".
        (("admission", "--methods", "nope"), "unknown reuse method 'nope'"),
        (("admission", "--tokens", "9999"), "documents 4 of tokens 9999 and question 24 must be"),
        (("admission", "--prompt", "99999"), "prompt 99999 and others 7 must be less than"),
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
