"""Generated documents know every command and every policy."""

from __future__ import annotations

import pytest

from keyhole.cli import COMMANDS
from keyhole.cli.docs import render
from keyhole.policy import policies


def test_every_command_and_policy_has_its_section() -> None:
    documents = render()
    for command in COMMANDS:
        assert f"## keyhole {command}\n" in documents["docs/cli.md"]
    for name, cls in policies().items():
        assert f"\n## {name}\n" in documents["docs/methods.md"]
        assert f"`{cls.__name__}`" in documents["docs/methods.md"]


def test_the_terminal_does_not_change_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    narrow = render()
    monkeypatch.setenv("COLUMNS", "200")
    assert render() == narrow
