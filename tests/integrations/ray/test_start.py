"""`serve run` with a mistake ends with one clear line and exit status 1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray has an environment of its own: make test-ray")

from keyhole import LLM
from keyhole.integrations.ray.start import with_environment
from tests.checkpoints import make_model

ROOT = Path(__file__).parents[3]


def serve_run(*settings: str) -> subprocess.CompletedProcess[str]:
    """The command, on a cluster of its own if it gets as far as that."""
    serve = Path(sys.executable).with_name("serve")
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "RAY_ADDRESS": "local",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    line = [str(serve), "run", "keyhole.integrations.ray:app", *settings]
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("policy=detla", "Error: unknown policy 'detla'; did you mean 'delta'?"),
        ("token_budget=5", "Error: unknown setting 'token_budget'"),
        ("model=no/where", "Error: unknown model 'no/where'"),
    ],
)
def test_a_mistake_is_one_line_before_a_cluster_starts(setting: str, says: str) -> None:
    done = serve_run(setting)
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("Error"))
    assert line.startswith(says)
    assert "Traceback" not in done.stderr
    assert "ray instance" not in done.stderr


def test_a_store_of_another_model_ends_it_too(tmp_path: Path) -> None:
    one = make_model("llama", tmp_path / "one", tokenizer=True, vocab_size=300)
    other = make_model("llama", tmp_path / "other", tokenizer=True, vocab_size=310)
    store = str(tmp_path / "documents")
    LLM(one, memory="8MiB", documents=store).documents.add("d", "a text")
    done = serve_run(f"model={other}", f"documents={store}", "memory=8MiB", "num_cpus=0.5")
    assert done.returncode == 1
    # Beside what Serve's own processes write.
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("Error: "))
    assert line.startswith(f"Error: none of the 1 documents at '{store}' was encoded by ")


def test_an_actors_own_environment_has_precedence() -> None:
    name = "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"
    runtime = {"working_dir": "here", "env_vars": {name: "1", "MINE": "x"}}
    found = with_environment({"num_cpus": 2, "runtime_env": runtime})
    assert found["num_cpus"] == 2
    assert found["runtime_env"]["working_dir"] == "here"
    variables = found["runtime_env"]["env_vars"]
    assert (variables[name], variables["MINE"]) == ("1", "x")
    assert variables["RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"] == "0"
    assert with_environment({"num_cpus": 0})["runtime_env"]["env_vars"][name] == "0"
