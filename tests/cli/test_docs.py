"""Generated documents know every command, every policy and every reuse method."""

from __future__ import annotations

import pytest

from keyhole.cli import COMMANDS
from keyhole.cli.docs import render
from keyhole.cli.documents import ACTIONS
from keyhole.policy import policies
from keyhole.reuse import reuses


def test_every_command_and_method_has_its_section() -> None:
    documents = render()
    for command in COMMANDS:
        assert f"\n## keyhole {command}\n" in documents["docs/cli.md"]
    for action in ACTIONS:
        assert f"\n### keyhole documents {action}\n" in documents["docs/cli.md"]
    for name, cls in [*policies().items(), *reuses().items()]:
        assert f"\n## {name}\n" in documents["docs/methods.md"]
        assert f"`{cls.__name__}`" in documents["docs/methods.md"]


def test_the_terminal_does_not_change_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    narrow = render()
    monkeypatch.setenv("COLUMNS", "200")
    assert render() == narrow
