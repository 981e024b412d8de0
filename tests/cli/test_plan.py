"""`keyhole plan` prints, draws and gives as JSON what the planner says of a model's config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import keyhole
from keyhole import LLM
from keyhole.bench.settings import SHAPES
from keyhole.errors import ConfigError
from keyhole.planner import MemoryModel
from keyhole.policies import available_policies
from tests.checkpoints import make_config
from tests.cli.conftest import Run

#: Llama-3.1-8B, with the longest text that it is made for.
LLAMA = SHAPES["llama-3.1-8b"] | {
    "model_type": "llama",
    "dtype": "bfloat16",
    "max_position_embeddings": 131072,
}


def folder(path: Path, fields: dict[str, Any] = LLAMA) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(fields))
    return str(path)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return folder(tmp_path / "llama-8b")


@pytest.mark.slow
def test_a_table_shows_each_length(llama: str, run: Run, tmp_path: Path) -> None:
    plot = tmp_path / "plan.png"
    options = ("--requests", "4", "--token-budget", "2048", "--lengths", "4096,16384,65536,999999")
    ran = run("plan", "--model", llama, "--total-memory", "24GiB", *options, "--plot", str(plot))
    assert ran.status == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0] == "llama-8b in 24.0 GiB: 4 requests, budget 2,048"
    assert "8,030,261,248 weights counted from the config" in lines[1]
    rows = [line.split() for line in lines if line.startswith((" ", "9")) and "  " in line]
    found = {row[0]: row[1:] for row in rows if row[0] in ("4,096", "16,384", "65,536", "999,999")}
    assert found["4,096"][:2] == ["32", "0"]
    above, below = (int(n) for n in found["65,536"][:2])
    assert above + below == 32
    assert 0 < above < 32
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert lines[-1] == f"written: {plot}"


def test_json_has_thresholds_terms_and_rows(llama: str, run: Run) -> None:
    options = (
        "--requests",
        "4",
        "--token-budget",
        "2048",
        "--lengths",
        "4096,99999999999",
        "--json",
    )
    ran = run("plan", "--model", llama, "--total-memory", "24GiB", *options)
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    assert len(found["thresholds"]) == 33
    assert found["thresholds"] == sorted(found["thresholds"])
    assert found["order"] == list(range(31, -1, -1))
    assert (found["preset"], found["dtype"], found["model"]) == ("measured", "bfloat16", "llama-8b")
    assert found["weight_bytes"] == 2 * 8_030_261_248
    assert found["layers"][0]["token_bytes"] == 2 * 8 * (128 + 128)
    first, last = found["lengths"]
    assert first["offloaded"] == 0
    assert first["resident_bytes"] <= 24 * 2**30
    assert first["largest_batch"] >= first["largest_batch_above"] >= 4
    assert last["offloaded"] is None
    assert last["largest_batch"] == 0


def test_the_papers_preset_is_the_papers_model(llama: str, run: Run) -> None:
    options = ("--requests", "4", "--token-budget", "2048", "--preset", "paper", "--json")
    ran = run("plan", "--model", llama, "--total-memory", "24GiB", *options)
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    paper = MemoryModel.paper(
        model_bytes=2 * 8_030_261_248,
        head_bytes=2 * 218_112_000,
        num_layers=32,
        num_kv_heads=8,
        head_dim=128,
        groups=4,
        requests=4,
        token_budget=2048,
    )
    assert found["thresholds"] == list(paper.thresholds(24 * 2**30))
    assert found["thresholds"][:2] == [7132, 7274]
    assert found["weight_factor"] == 1.3
    assert found["dtype"] == "float16"


def test_the_bundled_model_is_planned_up_to_its_longest_text(run: Run) -> None:
    ran = run("plan", "--total-memory", "64MiB", "--json")
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    assert found["counted_from"] == "the weights' headers"
    assert [row["length"] for row in found["lengths"]] == [1024, 2048, 4096, 8192, 16384]


def test_layers_with_a_window_stay_resident(run: Run, tmp_path: Path) -> None:
    fields = json.loads(make_config("gemma2").to_json_string())
    model = folder(tmp_path / "gemma", fields)
    ran = run("plan", "--model", model, "--total-memory", "64MiB", "--json", "--lengths", "512")
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    assert found["order"] == [3, 1]
    assert len(found["thresholds"]) == 5


@pytest.mark.parametrize("policy", available_policies())
def test_every_policy_is_planned_also_where_an_engine_refuses_offload(
    policy: str, run: Run, tmp_path: Path
) -> None:
    try:
        LLM(keyhole.tiny(), device="cpu", policy=policy, memory=2**24, offload=str(tmp_path))
    except ConfigError:
        offloads = False
    else:
        offloads = True
    ran = run("plan", "--total-memory", "40MiB", "--policy", policy, "--lengths", "1024")
    assert ran.status == 0, ran.err
    assert ("maximum context with no layer offloaded:" in ran.out) != offloads
    assert ran.out.splitlines()[-2].split()[:3] == ["1,024", "6", "0"]


@pytest.mark.parametrize(
    ("policy", "kind"), [("spe_context", "head"), ("seer_attention_r", "gate")]
)
def test_a_head_or_gate_that_the_policy_names_is_counted(
    policy: str, kind: str, run: Run, tmp_path: Path
) -> None:
    """Only the one in the model's folder was, so that a plan with head=FOLDER promised eight times
    the tokens that an engine with this setting holds.
    """
    shutil.copytree(keyhole.tiny(), tmp_path / "model")
    beside = tmp_path / "model" / {"head": "keyhole-head", "gate": "seer-gate"}[kind]
    options = ("plan", "--model", str(tmp_path / "model"), "--memory", "8MiB", "--policy")

    def planned(setting: str = "") -> tuple[Any, str]:
        ran = run(*options, f"{policy}:token_budget=64{setting}", "--json")
        assert ran.status == 0, ran.err
        found = json.loads(ran.out)
        return (found["thresholds"], found["head_weight_bytes"]), ran.err

    right, said = planned()
    assert not said
    beside.rename(tmp_path / "elsewhere")
    assert planned(f",{kind}={tmp_path / 'elsewhere'}") == (right, "")
    without, said = planned()
    assert without != right
    assert f"the data of a {kind} is not counted" in said
    ran = run(*options, f"{policy}:{kind}={tmp_path / 'nothing'}")
    assert ran.status == 2
    assert "nothing" in ran.err


def test_one_length_can_be_drawn(llama: str, run: Run, tmp_path: Path) -> None:
    plot = tmp_path / "plan.png"
    options = ("--lengths", "5000", "--plot", str(plot))
    assert run("plan", "--model", llama, "--total-memory", "24GiB", *options).status == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


MISTAKES = [
    ("", "give --total-memory, for example --total-memory 8GiB"),
    ("--total-memory plenty", "--total-memory 'plenty' is not a size"),
    ("--total-memory 8GiB --token-budget 0", "token_budget 0 must be at least 1"),
    ("--total-memory 8GiB --requests none", "--requests 'none' must be a whole number"),
    ("--total-memory 8GiB --requests 0", "requests 0 must be at least 1"),
    ("--total-memory 8GiB --lengths 5,x", "--lengths '5,x' must be numbers such as 0,1"),
    ("--total-memory 8GiB --lengths 0", "lengths (0,) must be numbers of tokens"),
    ("--total-memory 8GiB --preset papr", "unknown preset 'papr'; did you mean 'paper'?"),
    ("--total-memory 8GiB --dtype float", "unknown dtype 'float'; did you mean 'float32'?"),
    (
        "--total-memory 8GiB --preset paper --dtype float32",
        "preset 'paper' counts 2 bytes per number",
    ),
    ("--total-memory 8GiB", "the weights need 15316.5 MiB, and with the memory of a step"),
    ("--total-memory 8GiB", "the limit is 8192.0 MiB; raise it, or use a smaller dtype or model"),
    ("--total-memory 24GiB --plot nowhere/plan.png", "there is no folder 'nowhere'"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_a_mistake_is_one_line(line: str, message: str, llama: str, run: Run) -> None:
    ran = run("plan", "--model", llama, *line.split())
    assert ran.status == 2
    assert ran.out == ""
    assert message in ran.err
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1


def test_unknown_models_and_latents_are_refused(run: Run, tmp_path: Path) -> None:
    ran = run("plan", "--model", "nowhere", "--total-memory", "8GiB")
    assert "unknown model 'nowhere': it is not a folder" in ran.err
    fields = json.loads(make_config("deepseek_v3").to_json_string())
    model = folder(tmp_path / "deepseek", fields)
    ran = run("plan", "--model", model, "--total-memory", "8GiB", "--preset", "paper")
    assert ran.status == 2
    assert "'deepseek' caches latents; use --preset measured" in ran.err
