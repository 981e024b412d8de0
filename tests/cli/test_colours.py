"""Colours stand on a terminal only, and not where the environment says no."""

from __future__ import annotations

import sys

import pytest

from keyhole.cli.common import terminal
from tests.cli.conftest import Run
from tests.cli.terminal import run_on_terminal

ESCAPE = "\x1b["
VERIFY = ("verify", "--device", "cpu", "--model")


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_an_error_is_red_on_a_terminal() -> None:
    ran = run_on_terminal("generate", "x", "--policy", "detla")
    assert ran.status == 2
    assert ran.err.startswith("\x1b[1;31merror:\x1b[0m unknown policy 'detla'; did you mean")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_the_environment_turns_colours_off(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    ran = run_on_terminal("generate", "x", "--policy", "detla")
    listed = run_on_terminal("plan", "--total-memory", "8GiB")
    assert ran.err.startswith("error: unknown policy")
    assert listed.status == 0
    assert ESCAPE not in ran.err + listed.out


def test_each_output_is_looked_at_by_itself() -> None:
    command = ("plan", "--total-memory", "8GiB")
    assert ESCAPE in run_on_terminal(*command, err=False).out
    assert ESCAPE not in run_on_terminal(*command, out=False).out
    wrong = ("generate", "x", "--policy", "detla")
    assert ESCAPE in run_on_terminal(*wrong, out=False).err
    assert ESCAPE not in run_on_terminal(*wrong, err=False).err


@pytest.mark.slow
def test_a_table_says_the_same_with_and_without(path: str, run: Run) -> None:
    plain = run(*VERIFY, path)
    assert ESCAPE not in plain.out
    coloured = run_on_terminal(*VERIFY, path).out.replace("\r\n", "\n")
    assert "\x1b[32mexact\x1b[0m" in coloured
    head = next(line for line in plain.out.splitlines() if line.startswith("policy"))
    assert f"\x1b[1m{head}\x1b[0m" in coloured
    for code in ("\x1b[1m", "\x1b[32m", "\x1b[0m"):
        coloured = coloured.replace(code, "")
    assert coloured == plain.out


def test_json_has_no_colours() -> None:
    ran = run_on_terminal("plan", "--total-memory", "8GiB", "--json")
    assert ran.status == 0
    assert ESCAPE not in ran.out


def test_targets_met_and_missed_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    text = terminal.table(("a", "b"), [("met", "1"), ("MISSED", "unmet")])
    assert "\x1b[32mmet\x1b[0m" in text
    assert "\x1b[1;31mMISSED\x1b[0m" in text
    assert text.endswith("  unmet")
