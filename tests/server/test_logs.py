"""One line for each request, without its prompt unless prompts are logged."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from keyhole import LLM, ConfigError
from keyhole.cli import serve
from keyhole.server import logs
from tests.server.conftest import serving

_BODY = {"prompt": "secret words", "max_tokens": 5, "ignore_eos": True, "n": 2}


@contextmanager
def written(kind: str) -> Iterator[io.StringIO]:
    """What is logged in the block."""
    text = io.StringIO()
    with logs.configured(kind, logging.StreamHandler(text)):
        yield text


def lines_of(llm: LLM, stream: bool = False, **settings: Any) -> list[dict[str, Any]]:
    with written("json") as text, serving(llm, **settings) as address:
        headers = {"X-Request-Id": "mine"}
        body = _BODY | {"stream": stream}
        httpx2.post(f"{address}/v1/completions", json=body, headers=headers, timeout=60)
        httpx2.get(f"{address}/nowhere%0Aforged")
    lines = [json.loads(line) for line in text.getvalue().splitlines()]
    return [line for line in lines if line["logger"] == "keyhole.server.requests"]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_line_says_how_a_request_went(llm: LLM, stream: bool) -> None:
    first, second = lines_of(llm, stream)
    assert (first["id"], first["path"], first["status"]) == ("mine", "/v1/completions", 200)
    assert (first["completion_tokens"], first["finish_reason"]) == (10, "length,length")
    # A byte is a token, and one stands before every text.
    assert first["prompt_tokens"] == 2 * (len("secret words") + 1)
    assert first["duration_ms"] > 0
    assert (second["path"], second["status"]) == ("/nowhere\nforged", 404)
    assert "secret" not in json.dumps([first, second])


def test_prompts_are_logged_when_asked_for(llm: LLM) -> None:
    assert lines_of(llm, log_prompts=True)[0]["prompt"] == "secret words"


def test_a_path_cannot_begin_a_line_of_text(llm: LLM) -> None:
    with written("text") as text, serving(llm) as address:
        httpx2.get(f"{address}/nowhere%0Aforged")
    assert not any(line.startswith("forged") for line in text.getvalue().splitlines())
    assert r'path="/nowhere\nforged"' in text.getvalue()


def test_errors_are_counted_by_kind(llm: LLM) -> None:
    with serving(llm, api_key=("k",)) as address:
        headers = {"Authorization": "Bearer k"}
        httpx2.get(f"{address}/metrics")
        httpx2.post(f"{address}/v1/completions", json=_BODY | {"n": 0}, headers=headers)
        lines = httpx2.get(f"{address}/metrics", headers=headers).text.splitlines()
    assert 'keyhole_errors_total{kind="authentication_error"} 1.0' in lines
    assert 'keyhole_errors_total{kind="invalid_request_error"} 1.0' in lines


def test_keys_come_from_a_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYHOLE_API_KEYS", "a, b")
    path = tmp_path / "keys"
    path.write_text("c\n\n d \n", encoding="utf-8")
    assert serve._keys(str(path)) == ("a", "b", "c", "d")
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="at least one key"):
        serve._keys(str(path))
