"""Help texts are what they were: `UPDATE_GOLDEN=1 pytest tests/cli` writes them anew."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import keyhole
from keyhole.cli import COMMANDS, main
from keyhole.cli.documents import ACTIONS

GOLDEN = Path(__file__).parents[1] / "golden"


def help_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["", *COMMANDS, *(f"documents {name}" for name in ACTIONS)])
def test_help_is_what_it_was(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    text = help_of([*command.split(), "--help"], capsys)
    path = GOLDEN / f"{'-'.join(['help', *command.split()])}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("command", ["", *COMMANDS, *(f"documents {name}" for name in ACTIONS)])
def test_help_names_every_argument_and_ends_no_default_empty(command: str) -> None:
    """`keyhole models --help` had "[None ...]", and `eval` ended "default: none; default:"."""
    text = (GOLDEN / f"{'-'.join(['help', *command.split()])}.txt").read_text()
    assert "None" not in text
    assert not re.search(r"default:\s*\n\s*-", text)


def test_listing_documents_loads_no_model_by_default() -> None:
    """The help said "default: tiny"."""
    text = " ".join((GOLDEN / "help-documents-list.txt").read_text().split())
    assert "the bundled demonstration model; default: none" in text


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of(["--version"], capsys) == f"keyhole {keyhole.__version__}\n"


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keyhole", "--version"],
        cwd=GOLDEN.parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"keyhole {keyhole.__version__}\n"
