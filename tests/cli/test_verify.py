"""`keyhole verify` prints a line per check, and fails as a whole if one fails."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from keyhole import kernels
from keyhole.eval import verify, weight_error
from keyhole.models.loading import load
from keyhole.models.model import HEAD_FOLDER, Model
from keyhole.retrieval.head import RetrievalHead
from tests.checkpoints import make_model
from tests.cli.conftest import Run

CHECK = verify.Check(
    policy="full",
    run="one request alone",
    difference=1e-6,
    error=1e-6,
    tolerance=1e-4,
    same_tokens=1.0,
    replayed=0,
)
WRONG = dataclasses.replace(
    CHECK, policy="delta", run="ragged batch", difference=3.0, error=0.5, same_tokens=0.5
)


def test_all_exact_is_exit_status_0(path: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "verify", lambda model, length: [CHECK])
    ran = run("verify", "--model", path, "--device", "cpu")
    assert ran.status == 0
    about, _, _, row, end = ran.out.splitlines()
    who = kernels.backend(torch.device("cpu"))
    assert about == (
        f"model llama-0, device cpu, dtype float32, kernels {who}, decode steps launched one by one"
    )
    assert row.split() == "full one request alone exact 1.0e-06 1.0e-04 1.0e-06 100.0%".split()
    assert end == "all checks passed"


def test_a_length_is_handed_on(path: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int | None] = []
    monkeypatch.setattr(verify, "verify", lambda model, length: found.append(length) or [CHECK])
    run("verify", "--model", path, "--device", "cpu", "--length", "300")
    assert found == [300]
    ran = run("verify", "--model", path, "--length", "many")
    assert ran.status == 2
    assert "--length 'many' must be a whole number of tokens" in ran.err


def test_recorded_steps_are_named(path: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [CHECK, dataclasses.replace(CHECK, replayed=3)]
    monkeypatch.setattr(verify, "verify", lambda model, length: found)
    ran = run("verify", "--model", path, "--device", "cpu")
    assert ran.out.splitlines()[0].endswith(", decode steps replayed as CUDA graphs")


def test_one_difference_is_exit_status_1(
    path: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "verify", lambda model, length: [CHECK, WRONG])
    ran = run("verify", "--model", path, "--device", "cpu")
    assert ran.status == 1
    assert "DIFFERS" in ran.out
    assert ran.out.endswith("1 of 2 checks failed\n")
    ran = run("verify", "--model", path, "--device", "cpu", "--json")
    assert ran.status == 1
    found = json.loads(ran.out)
    assert not found["passed"]
    assert [check["passed"] for check in found["checks"]] == [True, False]
    assert found["kernels"] == kernels.backend(torch.device("cpu"))


def test_the_recall_of_a_head_is_printed(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "verify", lambda model, length: [CHECK])
    path = make_model("llama", tmp_path, tokenizer=True, max_position_embeddings=600)
    network = load(path, "cpu").network
    RetrievalHead.random(network).save_pretrained(Path(path) / HEAD_FOLDER)
    assert "give --data FILE to measure" in run("verify", "--model", path, "--device", "cpu").out
    data = tmp_path / "text.txt"
    data.write_text("attention is all you read, and keys are many. " * 40)
    ran = run("verify", "--model", path, "--device", "cpu", "--data", str(data))
    assert ran.status == 0
    heads, _, row = ran.out.splitlines()[-3:]
    assert heads.split() == "tokens budget 64 budget 256".split()
    assert re.fullmatch(r" *512 +\d+\.\d% \(\d+\.\d%\) +\d+\.\d% \(\d+\.\d%\)", row)
    ran = run("verify", "--model", path, "--device", "cpu", "--data", str(data), "--json")
    found = json.loads(ran.out)["head_recall"]
    assert {(c["chooser"], c["length"], c["budget"]) for c in found} >= {
        ("head", 512, 64),
        ("window", 512, 256),
    }
    assert all(0 <= c["recall"] <= 1 for c in found)
    data.write_text("short")
    ran = run("verify", "--model", path, "--device", "cpu", "--data", str(data))
    assert ran.status == 2
    assert "no text of 96 tokens" in ran.err


def test_texts_that_nothing_reads_or_that_cannot_be_read_are_refused_first(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a head and --weights, any --data was ignored, even a file that does not exist; with
    a head, a wrong file, or one of short texts, was found after all checks, whose results were
    lost.
    """

    def verified(model: Model, length: int | None) -> None:
        raise AssertionError("the checks ran")

    monkeypatch.setattr(verify, "verify", verified)
    path = make_model("llama", tmp_path, tokenizer=True)
    options = ("verify", "--model", path, "--device", "cpu", "--data", str(tmp_path / "nowhere"))
    ran = run(*options)
    assert ran.status == 2
    assert "has no retrieval head; leave it out, or give --weights" in ran.err
    RetrievalHead.random(load(path, "cpu").network).save_pretrained(Path(path) / HEAD_FOLDER)
    ran = run(*options)
    assert ran.status == 2
    assert "nowhere' cannot be read: No such file" in ran.err
    data = tmp_path / "short.txt"
    data.write_text("keys are many. " * 10)
    ran = run("verify", "--model", path, "--device", "cpu", "--data", str(data))
    assert ran.status == 2
    assert "the texts of --data are shorter than 256 tokens; give longer ones" in ran.err


def test_a_model_too_short_for_recall_is_named(tmp_path: Path, run: Run) -> None:
    """The texts were said to be too short, whatever their length."""
    path = make_model("llama", tmp_path, tokenizer=True, max_position_embeddings=256)
    RetrievalHead.random(load(path, "cpu").network).save_pretrained(Path(path) / HEAD_FOLDER)
    data = tmp_path / "long.txt"
    data.write_text("keys are many. " * 100)
    ran = run("verify", "--model", path, "--device", "cpu", "--data", str(data))
    assert ran.status == 2
    assert f"512 tokens or more, but {Path(path).name!r} takes 256; leave out --data" in ran.err


def test_what_packing_changes_is_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    folder = make_model("llama", tmp_path, tokenizer=True, **sizes)
    monkeypatch.setattr(verify, "verify", lambda model, length: [CHECK])
    monkeypatch.setattr(weight_error, "_LENGTH", 48)
    monkeypatch.setattr(weight_error, "_TEXTS", 2)
    ran = run("verify", "--model", folder, "--weights", "int4", "--device", "cpu", "--json")
    assert ran.status == 0
    found = json.loads(ran.out)["weight_error"]
    assert found["perplexity"] > 1
    assert found["source"] == "texts that the model as stored sampled"
    data = tmp_path / "text.txt"
    data.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    ran = run(
        *("verify", "--model", folder, "--weights", "int8", "--device", "cpu"),
        *("--data", str(data)),
    )
    assert ran.status == 0
    start = "\nweights int8 compared with those as stored, 94 tokens of "
    _, about, result = ran.out.rpartition(start)
    assert about, ran.out
    assert result.startswith("--data")
    assert "\nperplexity " in result
    assert "; logit error " in result


def test_an_unknown_format_of_weights_is_refused_first(path: str, run: Run) -> None:
    ran = run("verify", "--model", path, "--weights", "int2")
    assert ran.status == 2
    assert "unknown format of weights 'int2'" in ran.err
