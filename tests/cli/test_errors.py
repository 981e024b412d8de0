"""What a user did wrong is one line and exit status 2; nothing is loaded before it is checked."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from keyhole import cli
from keyhole.cli.common import terminal
from tests.cli.conftest import Run
from tests.cli.mistakes import MISTAKES


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_a_mistake_is_one_line(
    line: str, message: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ran = run(*line.split())
    assert ran.status == 2
    assert ran.out == ""
    assert message in ran.err
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert "[Errno" not in ran.err  # the number, and the path a second time


def test_every_command_has_its_mistakes() -> None:
    lines = [line for line, _ in MISTAKES]
    assert len(set(lines)) == len(lines) >= 197
    for command in cli.COMMANDS:
        assert any(line.startswith(command) for line in lines), command


def test_a_nearly_right_model_is_offered(path: str, run: Run) -> None:
    ran = run("generate", "x", "--model", path.removesuffix("-0") + "-1")
    assert "did you mean 'llama-0'?" in ran.err


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    "line",
    [
        "generate x",
        "chat",
        "serve",
        "verify",
        "eval",
        "eval --suite paper",
        "eval --suite attention",
        "documents ask question --documents one",
    ],
)
def test_an_unknown_model_is_answered_before_torch_is_imported(line: str, tmp_path: Path) -> None:
    """It took 5 s, most of them for imports of what the model was never loaded with."""
    code = (
        "import sys\n"
        "from keyhole.cli import main\n"
        f"assert main({[*line.split(), '--model', 'some/body']!r}) == 2\n"
        "assert not {'torch', 'transformers', 'scipy'} & set(sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "unknown model 'some/body'" in done.stderr
    assert "HF_HUB_OFFLINE is set" in done.stderr


def test_more_logprobs_than_tokens_are_refused(path: str, run: Run) -> None:
    """They ended in a traceback of torch."""
    ran = run("generate", "x", "--model", path, "--json", "--logprobs", "100000")
    assert ran.status == 2
    assert "logprobs 100000 must be at most" in ran.err
    assert ran.err.count("\n") == 1


def test_an_error_of_the_system_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "layers.json")

    monkeypatch.setattr("keyhole.cli.common.flags.make_llm", full)
    ran = run("generate", "x")
    assert ran.status == 2
    assert ran.err == "error: No space left on device 'layers.json'\n"


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (MemoryError(), "error: not enough memory\n"),
        (
            MemoryError("Unable to allocate 23.8 GiB"),
            "error: not enough memory: Unable to allocate 23.8 GiB\n",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory\nat alloc_cpu.cpp"),
            "error: not enough memory: DefaultCPUAllocator: can't allocate memory\n",
        ),
    ],
)
def test_too_little_memory_is_one_line(
    raised: Exception, said: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--max-batch 100000000` ended in a traceback."""

    def too_large(*_: object) -> None:
        raise raised

    monkeypatch.setattr("keyhole.cli.common.flags.make_llm", too_large)
    ran = run("generate", "x")
    assert ran.status == 2
    assert ran.err == said


def test_closed_streams_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`keyhole generate <&-` ended in a traceback, and with stderr closed errors went to stdout."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert cli.main(["generate", "x", "--policy", "detla"]) == 2
    assert cli.main(["methods"]) == 0
    assert sys.stdin.read() == ""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()


def test_what_an_output_cannot_encode_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document named "é" ended `documents list` in a traceback where stdout is ASCII."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    terminal.open_streams()
    print("é \udcff", flush=True)
    assert written.getvalue() == b"\\xe9 \\udcff\n"


def test_debug_shows_where_an_error_came_from(run: Run) -> None:
    ran = run("generate", "x", "--policy", "detla", "--debug")
    assert ran.status == 2
    assert "Traceback" in ran.err
    assert ran.err.splitlines()[-1].startswith("error: unknown policy")


def test_no_command_is_an_error(run: Run) -> None:
    ran = run()
    assert ran.status == 2
    assert "COMMAND" in ran.err


@pytest.mark.parametrize(("raised", "status"), [(KeyboardInterrupt, 130), (BrokenPipeError, 0)])
def test_an_interrupt_and_a_closed_pipe_end_quietly(
    raised: type[BaseException],
    status: int,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise raised

    monkeypatch.setattr("keyhole.cli.common.flags.make_llm", interrupted)
    ran = run("generate", "x")
    assert ran.status == status
    assert ran.err.strip() == ""


def test_a_pipe_that_was_closed_before_the_output_fits_is_quiet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe, redirect_stdout(pipe):
        assert cli.main(["completion", "bash"]) == 0
        pipe.flush()  # as Python does when it exits
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_output_to_a_full_disk_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w") as full, redirect_stdout(full):
        assert cli.main(["methods"]) == 2
        full.flush()
    assert capsys.readouterr().err == "error: No space left on device\n"


def test_an_error_that_is_not_the_users_is_not_hidden(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("keyhole.cli.common.flags.make_llm", broken)
    with pytest.raises(ZeroDivisionError):
        run("generate", "x")
