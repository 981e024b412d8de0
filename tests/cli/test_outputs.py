"""Outputs are checked before the work begins, and what is not Keyhole's stays as it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from keyhole.cli.common import terminal
from keyhole.cli.common.terminal import Output, OutputKind
from keyhole.errors import ConfigError
from keyhole.registry import SettingsFile
from tests.cli.conftest import Run

KINDS = [
    terminal.PICTURE,
    terminal.LINES,
    terminal.LAYERS,
    terminal.POLICY,
    terminal.PAGE,
]

#: Commands that write, before the flag and the name of the file.
COMMANDS = [
    "calibrate --output layers.json",
    "calibrate --stable-layers --output layers.json",
    "calibrate --plot recall.png",
    "plan --total-memory 8GiB --plot plan.png",
    "demo --output demo.png",
    "bench decode --output decode.jsonl",
    "eval --output lines.jsonl",
    "eval --html page.html",
    "eval --suite attention --output lines.jsonl",
    "eval --suite attention --html page.html",
    "eval --suite paper --output lines.jsonl",
    "eval --suite paper --html page.html",
    "documents show x --output picture.png",
    "documents show x --question y --output picture.png",
]


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the work began")

    for name in ("load_model", "make_llm"):
        monkeypatch.setattr(f"keyhole.cli.common.flags.{name}", load)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_file_of_others_stays_as_it_is(line: str, run: Run) -> None:
    """`keyhole eval --output FILE` erased a file of one line."""
    name = line.split()[-1]
    Path(name).write_text("a letter")
    ran = run(*line.split())
    assert (ran.status, ran.out) == (2, "")
    assert f"'{name}' exists and is not " in ran.err
    assert Path(name).read_text() == "a letter"


@pytest.mark.parametrize("line", [*COMMANDS, "train-head --output head"])
def test_a_folder_that_cannot_be_written_to_is_refused(
    line: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(terminal.tempfile, "TemporaryFile", refuse)
    ran = run(*line.split())
    assert (ran.status, ran.out) == (2, "")
    assert "is not writable" in ran.err
    assert "Permission denied" in ran.err


@pytest.mark.parametrize("line", COMMANDS)
def test_a_missing_folder_and_a_folder_for_a_file_are_refused(line: str, run: Run) -> None:
    *command, name = line.split()
    ran = run(*command, f"nowhere/{name}")
    assert (ran.status, ran.out) == (2, "")
    assert "there is no folder 'nowhere'" in ran.err
    Path(name).mkdir()
    ran = run(*command, name)
    assert (ran.status, ran.out) == (2, "")
    assert "is a folder; name a file" in ran.err


def test_the_head_needs_a_place_for_its_folder(run: Run) -> None:
    Path("file").write_text("")
    ran = run("train-head", "--output", "file/head")
    assert ran.status == 2
    assert "--output 'file/head': 'file' is a file; it must be a folder" in ran.err


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_file_of_its_kind_is_accepted(kind: OutputKind) -> None:
    for ending, start in kind.starts.items():
        for content in (b"", start[:3], start, start + b" and more"):
            path = Path(f"file{ending}")
            path.write_bytes(content)
            terminal.check_outputs(Output("--output", path, kind))
            assert path.read_bytes() == content


def test_a_pipe_is_refused_with_a_reason() -> None:
    """It "cannot be written: None"."""
    os.mkfifo("pipe")
    with pytest.raises(ConfigError, match=r"'pipe' cannot be written: .*not seekable"):
        terminal.check_outputs(Output("--output", "pipe", terminal.LINES))


def test_what_is_written_is_of_its_kind() -> None:
    SettingsFile(policy="quest").save("policy.json")
    terminal.check_outputs(Output("--settings", "policy.json", terminal.POLICY))
    for name in ("delta", "samkv"):
        path = Path(__file__).parents[2] / f"keyhole/models/tiny/keyhole-tiny/keyhole-{name}.json"
        assert path.read_bytes().startswith(terminal.LAYERS.starts[""])


def test_two_flags_do_not_name_one_file() -> None:
    with pytest.raises(ConfigError, match="--output and --html name the same file, 'a'"):
        terminal.check_outputs(
            Output("--output", "a", terminal.LINES), Output("--html", "a", terminal.PAGE)
        )


@pytest.mark.parametrize(("name", "says"), [("notes.txt", "must end in .png"), ("", "is empty")])
def test_a_name_that_is_no_picture_is_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        terminal.check_outputs(Output("--plot", name, terminal.PICTURE))


def test_the_last_line_of_somebody_else_is_not_taken_for_half_a_line(run: Run) -> None:
    ours = json.dumps({"benchmark": "eval"})
    Path("lines.jsonl").write_text(f"{ours}\nmy notes")
    ran = run("eval", "--output", "lines.jsonl")
    assert ran.status == 2
    assert "'lines.jsonl', line 2 is not a JSON object" in ran.err
    assert Path("lines.jsonl").read_text() == f"{ours}\nmy notes"
