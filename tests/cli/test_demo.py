"""`keyhole demo`, with shorter tasks, on an untrained model that knows the words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import keyhole
from keyhole.evaluate import demo
from keyhole.models.tiny.shape import llama_config
from keyhole.models.tiny.tasks import make
from keyhole.models.tiny.vocabulary import build_tokenizer
from tests.cli.conftest import Run


@pytest.fixture
def _short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "untrained"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(llama_config(num_layers=3, hidden_size=32)).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    monkeypatch.setattr(keyhole, "tiny", lambda: str(path))
    monkeypatch.setattr(demo, "items", lambda: [make("recall", 288, 0), make("derive", 300, 0)])


@pytest.mark.usefixtures("_short")
def test_every_method_does_every_task(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    ran = run("demo", "--output", str(picture))
    assert ran.status == 0, ran.err
    rows = [line.split()[:2] for line in ran.out.splitlines()]
    for task in ("recall", "derive"):
        for policy in ("full", "delta", "quest", "streaming_llm"):
            assert [task, policy] in rows
    assert "full attention itself is wrong on recall" in ran.out
    assert ran.out.endswith(f"pages read by each layer: {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("_short")
def test_json_has_every_outcome(run: Run, tmp_path: Path) -> None:
    ran = run("demo", "--output", str(tmp_path / "demo.png"), "--json")
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    assert len(found["outcomes"]) == 8
    assert set(found["outcomes"][0]) == {"task", "policy", "correct", "text", "stats"}
    assert found["policies"]["delta"]["token_budget"] == demo.BUDGET
    budgets = {p["token_budget"] for p in found["policies"].values() if "token_budget" in p}
    assert budgets == {demo.BUDGET}
