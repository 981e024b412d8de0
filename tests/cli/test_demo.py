"""`keyhole demo`, with shorter tasks, on an untrained model that knows the words."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import keyhole
from keyhole.eval import demo
from keyhole.eval.tiny_language.tasks import make
from recipes.tiny_model.export import build_tokenizer
from recipes.tiny_model.network import llama_config
from tests.cli.conftest import Run


@pytest.fixture
def _short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "untrained"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(llama_config(num_layers=3, hidden_size=32)).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    monkeypatch.setattr(keyhole, "tiny", lambda: str(path))
    monkeypatch.setattr(demo, "items", lambda: [make("recall", 288, 0), make("derive", 100, 0)])


@pytest.fixture
def _no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr(demo, "run", run)


@pytest.mark.slow
@pytest.mark.usefixtures("_short")
def test_every_method_and_its_control_run_every_task(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    ran = run("demo", "--output", str(picture))
    assert ran.status == 0, ran.err
    rows = [line.split() for line in ran.out.splitlines()]
    for task in ("recall", "derive"):
        own = [" ".join(row[1:3]) for row in rows if row[:1] == [task] and len(row) > 4]
        names = [name if name == "its control" else name.split()[0] for name in own]
        control = "its control"
        assert names == ["full", "delta", control, "quest", control, "streaming_llm"]
    assert "streaming_llm (token_budget 256, sink_size 4), its own control" in ran.out
    assert "dense layers differ (delta 0,1, quest 0, streaming_llm none)" in ran.out
    assert "full attention itself is wrong on recall" in ran.out
    assert ran.out.endswith(f"pages read by each layer: {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.usefixtures("_short")
def test_json_has_every_outcome(run: Run, tmp_path: Path) -> None:
    picture = str(tmp_path / "demo.png")
    ran = run("demo", "--output", picture, "--json")
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    assert len(found["outcomes"]) == 12
    keys = {"task", "policy", "is_control", "correct", "text", "stats"}
    assert set(found["outcomes"][0]) == keys
    assert found["policies"]["delta"]["token_budget"] == demo.BUDGET
    assert (found["output"], found["no_picture"]) == (picture, None)
    assert found["verdicts"] == []  # full attention is wrong here: there is nothing to compare with


@pytest.mark.slow
@pytest.mark.usefixtures("_short")
def test_a_control_has_the_dense_layers_and_the_budget_of_its_method(
    run: Run, tmp_path: Path
) -> None:
    ran = run("demo", "--output", str(tmp_path / "demo.png"), "--json")
    found = json.loads(ran.out)
    controls = found["controls"]
    assert set(controls) == {"delta", "quest"}
    for method, layers in (("delta", [0, 1]), ("quest", [0])):
        assert controls[method]["name"] == "streaming_llm"
        assert controls[method]["full_layers"] == found["dense_layers"][method] == layers
        assert controls[method]["token_budget"] == demo.BUDGET
        assert controls[method]["sink_size"] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("more", [("--json",), ()])
def test_without_matplotlib_there_is_no_picture_and_all_else(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    """After 73 s of work the command failed, and what it had found was lost."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    picture = tmp_path / "demo.png"
    ran = run("demo", "--output", str(picture), *more)
    assert ran.status == 0, ran.err
    hint = 'a picture needs matplotlib: pip install "keyhole[plot]"'
    if more:
        found = json.loads(ran.out)
        assert (found["output"], found["no_picture"]) == (None, hint)
        assert len(found["outcomes"]) == 12
    else:
        assert "derive    its control" in ran.out
        assert ran.out.endswith(f"{hint}\n")
    assert not picture.exists()


@pytest.mark.usefixtures("_no_work")
def test_the_output_is_checked_before_the_work(run: Run, tmp_path: Path) -> None:
    """A folder that is not there was found out after 27 s."""
    ran = run("demo", "--output", str(tmp_path / "missing/demo.png"))
    assert (ran.status, ran.out) == (2, "")
    assert "there is no folder" in ran.err
