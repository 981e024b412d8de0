"""`keyhole chat` keeps the conversation, and the keys and values, between the turns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keyhole import LLM, SamplingParams
from tests.checkpoints import make_model
from tests.cli.conftest import Run

FIRST = "Tell me everything that you know about foxes and about dogs."
SECOND = "And now about cats."
OPTIONS = ("--max-tokens", "6", "--ignore-eos", "--device", "cpu")


def answers(path: str) -> list[str]:
    """What the two turns should give: the second sees the first and its answer."""
    llm, params = LLM(path, device="cpu"), SamplingParams(max_tokens=6, ignore_eos=True)
    messages = [{"role": "user", "content": FIRST}]
    first = llm.chat(messages, params).text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": SECOND}]
    return [first, llm.chat(messages, params).text]


def kept(err: str) -> list[int]:
    return [int(number) for number in re.findall(r"\| (\d+) of \d+ prompt tokens cached", err)]


def test_the_second_turn_knows_the_first(path: str, run: Run) -> None:
    ran = run("chat", "--model", path, *OPTIONS, stdin=f"{FIRST}\n{SECOND}\n")
    assert ran.status == 0
    assert ran.out == "".join(f"{answer}\n" for answer in answers(path))
    assert ran.err.startswith("llama-0, full; ")
    first, second = kept(ran.err)
    assert first == 0
    assert second > len(FIRST)


def test_a_sparse_policy_keeps_what_it_generated(path: str, run: Run) -> None:
    policy = ("--policy", "streaming_llm:token_budget=32")
    ran = run("chat", "--model", path, *policy, *OPTIONS, stdin=f"{FIRST}\n{SECOND}\n")
    assert ran.status == 0
    assert "streaming_llm (token_budget 32, sink_size 4)" in ran.err
    assert kept(ran.err)[1] > len(FIRST)


def test_reset_forgets_and_quit_ends(path: str, run: Run) -> None:
    lines = f"{FIRST}\n/reset\n/rest\n\n{FIRST}\n/quit\n{SECOND}\n"
    ran = run("chat", "--model", path, *OPTIONS, stdin=lines)
    assert ran.status == 0
    first = answers(path)[0]
    assert ran.out == f"{first}\n{first}\n"
    assert "new conversation" in ran.err
    assert "error: unknown command '/rest'" in ran.err


def test_a_message_that_is_too_long_leaves_the_conversation_as_it_was(path: str, run: Run) -> None:
    ran = run("chat", "--model", path, *OPTIONS, stdin=f"{FIRST}\n{'x' * 600}\n{SECOND}\n")
    assert ran.status == 0
    assert ran.out == "".join(f"{answer}\n" for answer in answers(path))
    assert "error: the prompt has" in ran.err
    assert "/reset starts a new conversation" in ran.err


def test_a_model_without_a_chat_template_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run("chat", "--model", make_model("qwen3", tmp_path), stdin="Hello")
    assert ran.status == 2
    assert "has no chat template; use generate" in ran.err
