"""Long commands show a moving progress bar on a terminal, and none in a pipe."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tqdm

from benchmarks.kernels import __main__ as kernels
from benchmarks.offload import __main__ as offload
from keyhole.bench import measure
from keyhole.cli import main
from tests.cli.conftest import Run
from tests.cli.terminal import run_on_terminal

BAR = re.compile(r"(?:(\w[\w ]*): )?\s*(\d+)%\|")
SMALL = ("--shape", "smoke", "--contexts", "32,64", "--repeat", "2", "--device", "cpu")
COMMANDS = {
    "verify": (("verify", "--device", "cpu"), {""}),
    "decode": (
        ("bench", "decode", *SMALL, "--systems", "transformers_sdpa,delta"),
        {"weights", "fill caches", "contexts", "measure"},
    ),
    "kernels": ((*SMALL, "--ops", "append"), {"operations", "measure"}),
    "offload": (
        ("--items", "1", "--words", "96", "--budgets", "64", "--repeat", "8"),
        {"budgets", "compare", "measure"},
    ),
}

PROGRAMS = {"kernels": kernels.main, "offload": offload.main}


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars show every step, as they would if each took long."""
    monkeypatch.setattr(measure, "_BANDWIDTH_BYTES", 1 << 16)
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    for module in (tqdm.std.tqdm, tqdm.auto.tqdm):
        before = module.__init__
        monkeypatch.setattr(module, "__init__", _shown(before))


def _shown(before):  # type: ignore[no-untyped-def]
    def init(self, *given, **named):  # type: ignore[no-untyped-def]
        before(self, *given, **{**named, "mininterval": 0, "miniters": 1, "delay": 0})

    return init


def shares(said: str) -> dict[str, set[int]]:
    """Per bar the shares that it showed, in percent."""
    found: dict[str, set[int]] = {}
    for name, share in BAR.findall(said):
        found.setdefault(name, set()).add(int(share))
    return found


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "kernels")) for name in COMMANDS],
)
def test_a_bar_moves(command: str, path: str, tmp_path: Path) -> None:
    """`bench decode` said nothing while it made weights, a minute for larger shapes."""
    line, bars = COMMANDS[command]
    more = ("--model", path) if command == "verify" else ("--output", str(tmp_path / "lines"))
    program = PROGRAMS.get(command, main)
    ran = run_on_terminal(*line, *more, out=False, program=program)
    assert ran.status == 0, ran.err
    found = shares(ran.err)
    assert bars <= set(found)
    for name in bars:
        assert len(found[name]) > 1, name
    assert "%|" not in ran.out


@pytest.mark.slow
def test_a_command_says_what_it_loads(path: str) -> None:
    """`generate` and `calibrate` were silent for 14 s while torch and transformers came in."""
    ran = run_on_terminal("generate", "a fox", "--model", path, "--device", "cpu", out=False)
    assert ran.status == 0
    assert ran.err.startswith(f"loading {path} ...")


def test_a_long_prompt_moves_a_bar(path: str) -> None:
    options = ("--device", "cpu", "--max-tokens", "4", "--prefill-chunk", "16", "--json")
    ran = run_on_terminal("generate", "fox " * 40, "--model", path, *options, out=False)
    assert ran.status == 0
    assert len(shares(ran.err)["prompt"]) > 5
    assert len(json.loads(ran.out)["token_ids"]) <= 4


@pytest.mark.slow
def test_a_document_moves_a_bar(tmp_path: Path) -> None:
    """A document of 12,000 tokens was encoded for 100 s without a word: bars began at 16,384."""
    text = tmp_path / "long.txt"
    text.write_text("the fox owns lamp . " * 420)
    store = ("--store", str(tmp_path / "store"), "--device", "cpu")
    ran = run_on_terminal("documents", "add", "long", str(text), *store, out=False)
    assert ran.status == 0, ran.err
    assert len(shares(ran.err)["encode"]) > 1
    assert "stored: long" in ran.out


@pytest.mark.slow
def test_a_pipe_gets_no_bars(path: str, run: Run) -> None:
    said = run("verify", "--device", "cpu", "--model", path).err
    assert "%|" not in said
    assert "loading" not in said
