"""simonw's llm, as a library and as a command, against `keyhole serve`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server.clients.conftest import ANSWER, CALL, FACT, SAID, SCHEMA, SITE

llm = pytest.importorskip("llm", reason="`make test-clients` installs it")


@pytest.fixture
def home(
    bundled: str, taught: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """Models as its documentation says for servers that speak OpenAI's interface."""
    models: list[dict[str, Any]] = [
        {"model_id": "tiny", "model_name": "keyhole-tiny", "api_base": bundled},
        {"model_id": "text", "model_name": "keyhole-tiny", "api_base": bundled, "completion": True},
        {"model_id": "taught", "model_name": "taught", "api_base": taught},
    ]
    models[-1] |= {"supports_tools": True, "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    return {"LLM_USER_PATH": str(tmp_path)}


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_its_answer_and_usage(home: dict[str, str], stream: bool) -> None:
    said = llm.get_model("tiny").prompt(
        FACT["content"], stream=stream, temperature=0.0, max_tokens=3
    )
    assert said.text().strip() == SAID
    usage = said.usage()
    assert usage.input > 1
    assert usage.output == 3


def test_a_conversation_goes_on(home: dict[str, str]) -> None:
    talk = llm.get_model("tiny").conversation()
    first = talk.prompt(FACT["content"], temperature=0.0, max_tokens=3)
    first.text()
    second = talk.prompt("question : Josa keeps ?", temperature=0.0, max_tokens=3)
    second.text()
    assert second.usage().input > first.usage().input


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_calls_a_tool_and_reads_its_answer(home: dict[str, str], stream: bool) -> None:
    asked = []

    def weather(city: str) -> str:
        """How warm it is in a city."""
        asked.append(city)
        return "20 degrees"

    chain = llm.get_model("taught").chain(
        "hello", tools=[weather], stream=stream, options={"temperature": 0.0, "max_tokens": 100}
    )
    assert chain.text() == ANSWER
    assert asked == [json.loads(CALL)["arguments"]["city"]]


def test_an_answer_is_json_of_its_schema(home: dict[str, str]) -> None:
    said = llm.get_model("taught").prompt("hello", schema=SCHEMA, temperature=1.0, seed=1)
    assert json.loads(said.text())["city"] in ("Oslo", "Lima")


def test_a_text_goes_on(home: dict[str, str]) -> None:
    said = llm.get_model("text").prompt(FACT["content"], temperature=0.0, max_tokens=3)
    assert said.text().strip() == SAID


def test_the_command_answers(home: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SITE)
    options = ["-o", "temperature", "0", "-o", "max_tokens", "3", "--no-log"]
    command = [sys.executable, "-m", "llm", "-m", "tiny", *options, FACT["content"]]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (found.stdout.strip(), found.returncode) == (SAID, 0), found.stderr


def test_errors_are_said(home: dict[str, str]) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="max_tokens 0 must be at least 1"):
        llm.get_model("tiny").prompt("hello", max_tokens=0).text()
