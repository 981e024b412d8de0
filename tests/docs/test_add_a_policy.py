"""The page that shows how to add a policy works as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import keyhole
from tests.checkpoints import make_model
from tests.docs.markdown import blocks

ROOT = Path(__file__).parents[2]
WRITTEN, RUN = blocks("add-a-policy.md", "python")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder as `pip install` would leave it: the module, and its entry points beside it."""
    (project,) = map(tomllib.loads, blocks("add-a-policy.md", "toml"))
    assert project["project"]["dependencies"] == ["keyhole"]
    points = project["project"]["entry-points"]["keyhole.policies"]
    (tmp_path / "stripes.py").write_text(WRITTEN)
    info = tmp_path / "stripes-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stripes\nVersion: 0.1.0\n")
    lines = [f"{name} = {place}" for name, place in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[keyhole.policies]", *lines, ""]))
    return tmp_path


def test_the_policy_is_short() -> None:
    assert len([line for line in WRITTEN.splitlines() if line.strip()]) <= 15


def test_an_object_runs(
    installed: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path_factory.mktemp("model")
    model = make_model("llama", folder, tokenizer=True, max_position_embeddings=4096)
    monkeypatch.setattr(keyhole, "tiny", lambda: model)  # any model will do
    monkeypatch.syspath_prepend(str(installed))
    exec(RUN, {})
    assert 0 < float(capsys.readouterr().out.split()[-1]) < 1


@pytest.mark.slow
def test_it_enters_the_table_and_passes_the_conformance_tests(installed: Path) -> None:
    (command,) = blocks("add-a-policy.md", "sh")
    python, *arguments = command.split()
    assert python == "python"
    done = subprocess.run(
        [sys.executable, *arguments, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[100%]" in done.stdout
    assert "s" not in done.stdout.partition("[")[0]  # dots only: nothing was skipped
