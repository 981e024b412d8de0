"""Ctrl-C ends an answer after the step that runs, and what there is stays."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest

from keyhole.cli.common import terminal
from keyhole.cli.common.terminal import Interrupt
from keyhole.engine.engine import Engine
from tests.cli.conftest import Run

OPTIONS = ("--max-tokens", "12", "--ignore-eos", "--device", "cpu", "--temperature", "0")
PROMPT = "Tell me about foxes."


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`ctrl_c(3, 4)`: Ctrl-C is pressed during the third and the fourth step."""

    def at(*steps: int) -> None:
        step, taken = Engine.step, []

        def interrupted(self: Engine) -> Any:
            taken.append(None)
            if len(taken) in steps:
                signal.raise_signal(signal.SIGINT)
            return step(self)

        monkeypatch.setattr(Engine, "step", interrupted)

    return at


def test_json_has_what_there_is(path: str, run: Run, ctrl_c: Callable[..., None]) -> None:
    whole = json.loads(run("generate", PROMPT, "--model", path, *OPTIONS, "--json").out)
    ctrl_c(4)
    ran = run("generate", PROMPT, "--model", path, *OPTIONS, "--json")
    assert ran.status == 130
    found = json.loads(ran.out)
    assert found["finish_reason"] == "abort"
    assert found["token_ids"] == whole["token_ids"][:4]


def test_all_completions_end(path: str, run: Run, ctrl_c: Callable[..., None]) -> None:
    given = ("--n", "3", "--json", "--seed", "1", "--temperature", "1")
    ctrl_c(4)
    ran = run("generate", PROMPT, "--model", path, *OPTIONS, *given)
    assert ran.status == 130
    found = json.loads(ran.out)
    completions = [found, *found["others"]]
    assert [one["finish_reason"] for one in completions] == ["abort"] * 3
    assert all(len(one["token_ids"]) <= 4 for one in completions)


def test_a_text_ends_with_its_counters(path: str, run: Run, ctrl_c: Callable[..., None]) -> None:
    ctrl_c(4)
    ran = run("generate", PROMPT, "--model", path, *OPTIONS)
    assert ran.status == 130
    assert ran.out.strip()
    assert ran.err.startswith("4 tokens |")


def test_chat_goes_on_after_an_interrupt(path: str, run: Run, ctrl_c: Callable[..., None]) -> None:
    ctrl_c(3)
    ran = run("chat", "--model", path, *OPTIONS, stdin=f"{PROMPT}\nAnd about dogs?\n")
    assert ran.status == 0
    first, second = ran.err.splitlines()[1:]
    assert first.startswith("3 tokens |")
    assert second.startswith("12 tokens |")


def test_a_message_without_an_answer_is_forgotten(
    path: str, run: Run, ctrl_c: Callable[..., None]
) -> None:
    options = (*OPTIONS, "--prefill-chunk", "4")
    alone = run("chat", "--model", path, *options, stdin="And about dogs?\n")
    ctrl_c(1)
    ran = run("chat", "--model", path, *options, stdin=f"{PROMPT}\nAnd about dogs?\n")
    assert ran.status == 0
    assert ran.out.strip() == alone.out.strip()
    assert "stopped before the answer began" in ran.err


def test_a_second_interrupt_ends_the_program(
    path: str, run: Run, ctrl_c: Callable[..., None]
) -> None:
    ctrl_c(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "abort", lambda *_: signal.raise_signal(signal.SIGINT))
        ran = run("chat", "--model", path, *OPTIONS, stdin=f"{PROMPT}\nAnd about dogs?\n")
    assert ran.status == 130


def test_what_handled_a_signal_before_does_so_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that came twice at once, as under `uv run`, lost what train-head had trained."""
    before = signal.getsignal(signal.SIGTERM)
    with Interrupt(signal.SIGTERM) as interrupt:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.seen
        monkeypatch.setattr(terminal, "_REPEAT_SECONDS", -1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
