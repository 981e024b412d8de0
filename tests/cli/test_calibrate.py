"""`keyhole calibrate` prints, writes and draws what it measured."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

import keyhole
from keyhole.policies.selection_layers import Calibration
from keyhole.reuse.sam_kv import STABILITY_FILE, Stability
from tests.cli.conftest import Run
from tests.disks import files_at_most

OPTIONS = ("--num-delta-layers", "1", "--full-layers", "0", "--token-budget", "32")
OPTIONS += ("--max-tokens", "4", "--device", "cpu")


def test_recall_is_printed_and_layers_are_written(path: str, run: Run, tmp_path: Path) -> None:
    data, layers, plot = (tmp_path / name for name in ("data.jsonl", "layers.json", "recall.png"))
    data.write_text(json.dumps("A text of some length. " * 4) + "\n\n" + json.dumps("x" * 70))
    files = ("--data", str(data), "--output", str(layers), "--plot", str(plot))
    ran = run("calibrate", "--model", path, *OPTIONS, *files)
    assert ran.status == 0, ran.err
    assert "llama-0: optimal placement by mass over 6 decode steps, token_budget 32" in ran.out
    for line in (
        "0      everything",
        "1      everything, and selects",
        "2      the selection of layer 1",
    ):
        assert line in ran.out
    assert Calibration.load(layers).delta_layers == (1,)
    assert plot.read_bytes().startswith(b"\x89PNG")
    policy = ("--policy", f"delta:layers={layers}", "--max-tokens", "2")
    assert run("generate", "x", "--model", path, "--device", "cpu", *policy).status == 0


def test_results_are_printed_where_the_file_cannot_be_written(
    path: str, run: Run, tmp_path: Path
) -> None:
    """A full disk cost the whole measurement, and the message did not name the file."""
    data, layers = tmp_path / "data.jsonl", tmp_path / "layers.json"
    data.write_text(json.dumps("A text of some length. " * 4))
    with files_at_most(16):
        ran = run(
            "calibrate", "--model", path, *OPTIONS, "--data", str(data), "--output", str(layers)
        )
    assert ran.status == 2
    assert "optimal placement by mass" in ran.out
    assert f"cannot write the calibration '{layers}': File too large" in ran.err
    assert not layers.exists()


def test_a_whole_file_may_be_the_prompt(path: str, run: Run, tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text("A text\nof some length\n" * 4)
    ran = run(
        "calibrate", "--model", path, *OPTIONS, "--data", str(data), "--method", "paper", "--json"
    )
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    more = {"steps", "shift", "placements"}
    assert set(found) == {f.name for f in dataclasses.fields(Calibration)} | more
    assert (found["method"], found["measure"]) == ("paper", "shift")
    names = [one["placement"] for one in found["placements"]]
    assert names == ["optimal, mass", "optimal, error", "paper", "largest shifts alone"]
    assert set(found["placements"][0]) == {
        "placement",
        "delta_layers",
        "dense_layers",
        "recall",
        "error",
        "keys_read",
    }
    assert found["steps"] == 3


def test_what_each_placement_costs_is_printed(path: str, run: Run, tmp_path: Path) -> None:
    data, layers = tmp_path / "data.txt", tmp_path / "layers.json"
    data.write_text("A text\nof some length\n" * 4)
    files = ("--data", str(data), "--output", str(layers), "--measure", "error")
    ran = run("calibrate", "--model", path, *OPTIONS, *files)
    assert ran.status == 0, ran.err
    assert "optimal placement by error" in ran.out
    for head in ("attention kept", "output error", "keys read", "read all"):
        assert head in ran.out
    for name in ("optimal, mass", "optimal, error", "paper", "largest shifts alone"):
        assert f"\n{name}" in ran.out
    found = Calibration.load(layers)
    assert found.measure == "error"
    assert found.error[:2] == (0.0, 0.0)
    assert min(found.error[2:]) > 0


def test_prompts_within_the_budget_are_refused(path: str, run: Run, tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text("short")
    ran = run("calibrate", "--model", path, *OPTIONS, "--data", str(data))
    assert ran.status == 2
    assert "no decode step had more than token_budget 32 tokens" in ran.err


def test_a_prompt_that_the_model_cannot_take_is_one_of_the_file(
    path: str, run: Run, tmp_path: Path
) -> None:
    data = tmp_path / "data.txt"
    data.write_text("a" * 600)
    ran = run("calibrate", "--model", path, *OPTIONS, "--data", str(data))
    assert ran.status == 2
    assert f"--data {str(data)!r}: the prompt has 601 tokens, but this model takes" in ran.err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "has no text; give a JSON string or list of token ids per line"),
        ('"fine"\n5\n', "line 2 must be a JSON string or list of token ids per line"),
        ('"fine"\n{\n', "line 2 is not JSON"),
    ],
)
def test_data_without_texts_is_refused(lines: str, message: str, run: Run, tmp_path: Path) -> None:
    """Of an empty file the bundled model's texts were measured instead, without a word."""
    data = tmp_path / "data.jsonl"
    data.write_text(lines)
    ran = run("calibrate", "--data", str(data))
    assert ran.status == 2
    assert message in ran.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--full-layers", "9"), "full_layers (9,) must be layers from 0 to"),
        (("--num-delta-layers", "9"), "num_delta_layers 9 must be at least 1, and fewer than"),
    ],
)
def test_layers_that_the_model_lacks_are_refused_before_the_run(
    options: tuple[str, str], message: str, path: str, run: Run, tmp_path: Path
) -> None:
    """A full layer that the model lacks was accepted, too many layers were refused at the end."""
    data = tmp_path / "data.txt"
    data.write_text("too short to measure")
    ran = run("calibrate", "--model", path, *OPTIONS, *options, "--data", str(data))
    assert ran.status == 2
    assert message in ran.err


STABLE = ("--stable-layers", "--block-size", "8", "--num-documents", "3", "--device", "cpu")


@pytest.mark.slow
def test_stable_layers_are_printed_and_stored_in_the_model_folder(
    path: str, run: Run, tmp_path: Path
) -> None:
    model = shutil.copytree(path, tmp_path / "model")
    data = tmp_path / "data.txt"
    data.write_text("A text of some length, and of many sentences. " * 20)
    ran = run(
        "calibrate", "--model", str(model), *STABLE, "--data", str(data), "--num-stable-layers", "2"
    )
    assert ran.status == 0, ran.err
    assert ran.out.startswith("model: 3 documents in blocks of 8; a layer scores where\n")
    assert ran.out.count("  stable\n") == 2
    assert f"written: {model / STABILITY_FILE}" in ran.out
    found = Stability.load(model / STABILITY_FILE)
    assert len(found.stable_layers) == 2
    # From now on the model says so by itself.
    store = ("--store", str(tmp_path / "store"), "--model", str(model), "--device", "cpu")
    assert run("documents", "add", "x", "-", *store, stdin="green").status == 0
    asked = ("ask", "Which?", "--documents", "x", "--max-tokens", "1", "--json")
    reuse = json.loads(run("documents", *asked, *store).out)["reuse"]
    assert reuse["stable_layers"] == list(found.stable_layers)


def test_stable_layers_are_written_to_the_given_file(path: str, run: Run, tmp_path: Path) -> None:
    data, output = tmp_path / "data.jsonl", tmp_path / "stable.json"
    lines = ["A text of some length. " * 8, [5, 6, 7, 8] * 30]
    data.write_text("\n".join(map(json.dumps, lines)))
    ran = run(
        "calibrate",
        "--model",
        path,
        *STABLE,
        "--data",
        str(data),
        "--output",
        str(output),
        "--json",
    )
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    assert set(found) == {f.name for f in dataclasses.fields(Stability)} | {"output"}
    assert found["num_documents"] == 2
    assert Stability.load(output).scores == tuple(found["scores"])
    place = ("--store", str(tmp_path / "store"), "--model", path, "--device", "cpu")
    assert run("documents", "add", "x", "-", *place, stdin="green").status == 0
    asked = ("ask", "Which?", "--documents", "x", "--max-tokens", "1", "--reuse")
    assert run("documents", *asked, f"sam_kv:layers={output}", *place).status == 0


def test_the_bundled_model_brings_its_own_texts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written into the package."""
    monkeypatch.chdir(tmp_path)
    ran = run("calibrate", *STABLE[:-4], "--num-documents", "1", "--device", "cpu")
    assert ran.status == 0, ran.err
    assert ran.out.startswith("keyhole-tiny: 1 document in blocks of 8")
    assert Stability.load(STABILITY_FILE).model == "keyhole-tiny"
    bundled = Stability.load(Path(keyhole.tiny()) / STABILITY_FILE)
    assert bundled.num_documents > 1
