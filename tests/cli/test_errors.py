"""What a user did wrong is one line and exit status 2; nothing is loaded before it is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyhole import cli
from tests.cli.conftest import Run

MISTAKES = [
    ("generat x", "unknown command 'generat'; did you mean 'generate'?"),
    ("generate x --polcy delta", "'--polcy'; did you mean '--policy'?"),
    ("generate x --policy detla", "unknown policy 'detla'; did you mean 'delta'?"),
    ("generate x --policy streaming_llm:delta_layers=0", "'delta_layers'"),
    ("generate x --policy delta:alpha=0.1", "unknown setting of policy delta 'alpha'"),
    ("generate x --policy delta:token_budget=much", "delta:token_budget 'much' must be a whole"),
    ("generate x --policy delta:delta_layers=a", "delta:delta_layers 'a' must be numbers"),
    ("generate x --temperature -1", "temperature -1.0 must be at least 0"),
    ("generate x --memory plenty", "--memory 'plenty' is not a size"),
    ("generate x --prefix-cache", "'--prefix-cache'; did you mean '--no-prefix-cache'?"),
    ("generate x y", "unexpected argument 'y'"),
    ("generate x --file y", "give either a prompt or --file"),
    ("generate --file nowhere.txt", "--file 'nowhere.txt' cannot be read"),
    ("generate x --model nowhere", "unknown model 'nowhere'"),
    ("calibrate --model nowhere", "give --data FILE"),
    ("calibrate --model nowhere --data missing.jsonl", "--data 'missing.jsonl' cannot be read"),
    ("calibrate --method best", "unknown method 'best'"),
    ("calibrate --measure best", "unknown measure 'best'"),
    ("calibrate --method paper --measure mass", "--measure mass goes with --method optimal"),
    ("calibrate --num-delta-layers many", "--num-delta-layers 'many' must be a whole number"),
    ("calibrate --block-size 8", "--block-size needs --stable-layers"),
    ("calibrate --stable-layers --method paper", "--method does not go with --stable-layers"),
    ("calibrate --stable-layers --token-budget 8", "--token-budget does not go with --stable-l"),
    ("calibrate --stable-layers --num-documents 0", "num_documents 0 must be at least 1"),
    ("calibrate --model nowhere --stable-layers", "give --data FILE with documents for this model"),
    ("documents", "the following arguments are required: ACTION; see `keyhole documents --help`"),
    ("documents ad", "unknown action 'ad'; did you mean 'add'?"),
    ("documents add x y --pinned", "unknown option of documents add '--pinned'; did you mean"),
    ("documents list x", "unexpected argument 'x'; a model is named by --model; see"),
    ("documents ask x --documents y --model nowhere", "unknown model 'nowhere'"),
    ("verify --model nowhere", "unknown model 'nowhere'"),
    ("generate x --device mps", "device 'mps' must be one that is here"),
    ("bench decode --device gpu", "device 'gpu' must be one that is here"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_a_mistake_is_one_line(line: str, message: str, run: Run) -> None:
    ran = run(*line.split())
    assert ran.status == 2
    assert ran.out == ""
    assert message in ran.err
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1


def test_a_nearly_right_model_is_offered(path: str, run: Run) -> None:
    ran = run("generate", "x", "--model", path.removesuffix("-0") + "-1")
    assert "did you mean 'llama-0'?" in ran.err


def test_more_logprobs_than_tokens_are_refused(path: str, run: Run) -> None:
    """They ended in a traceback of torch."""
    ran = run("generate", "x", "--model", path, "--device", "cpu", "--logprobs", "100000")
    assert ran.status == 2
    assert "logprobs 100000 must be at most" in ran.err
    assert ran.err.count("\n") == 1


def test_an_error_of_the_system_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "layers.json")

    monkeypatch.setattr("keyhole.cli.flags.make_llm", full)
    ran = run("generate", "x")
    assert ran.status == 2
    assert ran.err == "error: No space left on device 'layers.json'\n"


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

    monkeypatch.setattr("keyhole.cli.flags.make_llm", interrupted)
    monkeypatch.setattr(cli.os, "dup2", lambda *_: None)
    monkeypatch.setattr("sys.stdout.fileno", lambda: 1, raising=False)
    ran = run("generate", "x")
    assert ran.status == status
    assert ran.err.strip() == ""


def test_an_error_that_is_not_the_users_is_not_hidden(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("keyhole.cli.flags.make_llm", broken)
    with pytest.raises(ZeroDivisionError):
        run("generate", "x")
