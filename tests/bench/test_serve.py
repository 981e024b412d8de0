"""The load generator against a server that answers as it is told, and its arithmetic."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from keyhole import LLM, ConfigError
from keyhole.bench import serve
from keyhole.bench.serve import RequestTimes, make_bodies, summary
from keyhole.bench.settings import ServeSettings
from keyhole.cli import main
from keyhole.errors import KeyholeError
from tests.checkpoints import make_model
from tests.server.conftest import serving


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    sizes = {"vocab_size": 300, "max_position_embeddings": 1024}
    path = make_model("llama", tmp_path_factory.mktemp("m"), tokenizer=True, **sizes)
    with serving(LLM(path, memory="8MiB", max_batch=4), max_queue=2) as address:
        yield address


def test_a_load_is_answered_and_written(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "b.jsonl"
    flags = "--requests 5 --concurrency 2 --prompt-length 3-9 --answer-length 4 --json".split()
    assert main(["bench", "serve", "--url", address, *flags, "--output", str(output)]) == 0
    printed = json.loads(capsys.readouterr().out)
    (line,) = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    assert line == printed
    (found,) = line["results"]
    assert (found["answered"], found["failed"], found["unfinished"]) == (5, {}, 0)
    assert found["tokens_per_s"] * found["seconds"] == pytest.approx(5 * 4)
    for name in ("first_token_ms", "between_tokens_ms", "answer_ms"):
        assert 0 < found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"]
    assert found["first_token_ms"]["p50"] <= found["answer_ms"]["p50"]


def test_what_is_refused_or_too_late_is_counted(address: str) -> None:
    """4 run and 2 wait; the others are refused. After the time limit nothing is waited for."""
    many = {"url": address, "requests": 12, "prompt_length": "4", "answer_length": "40"}
    (found,) = serve.run(ServeSettings(**many, concurrency=12))["results"]
    assert found["failed"] == {"status 429": 12 - found["answered"]}
    assert 6 <= found["answered"] < 12
    late = many | {"requests": 3, "answer_length": "900"}
    # It said "none of 3 requests was answered: {}".
    with pytest.raises(KeyholeError, match=r"none of 3 .*: 3 took longer than time_limit 0\.05$"):
        serve.run(ServeSettings(**late, concurrency=1, time_limit=0.05))


def test_the_servers_reason_is_shown_where_nothing_was_answered(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only "status 400" was shown."""
    monkeypatch.setattr(serve, "_check_lengths", lambda *_: None)
    given = {"url": address, "requests": 2, "prompt_length": "99999", "answer_length": "1"}
    with pytest.raises(KeyholeError, match="2 ended with status 400; the prompt has 99999"):
        serve.run(ServeSettings(**given))


def test_an_answer_that_the_model_is_too_short_for_is_refused(address: str) -> None:
    """It ended early, and only tokens per second showed it."""
    with urllib.request.urlopen(f"{address}/v1/models") as answer:
        longest = json.load(answer)["data"][0]["max_model_len"]
    given = {"url": address, "requests": 1, "prompt_length": str(longest - 4)}
    (found,) = serve.run(ServeSettings(**given, answer_length="4"))["results"]
    assert found["tokens_per_s"] * found["seconds"] == pytest.approx(4)
    said = f"of {longest - 4} tokens and an answer of 5 .* server's max_model_len {longest};"
    with pytest.raises(ConfigError, match=said):
        serve.run(ServeSettings(**given, answer_length="5"))


def test_arrivals_follow_the_rate(address: str) -> None:
    given = {"url": address, "requests": 6, "prompt_length": "2", "answer_length": "1"}
    (found,) = serve.run(ServeSettings(**given, rate=100.0, concurrency=3))["results"]
    assert found["answered"] == 6
    assert found["between_tokens_ms"] is None


def test_a_summary_counts_by_hand() -> None:
    settings = ServeSettings(goodput_first_ms=100.0, goodput_between_ms=20.0)
    samples = [
        RequestTimes(1.0, [1.05, 1.06, 1.07], tokens=3),  # good
        RequestTimes(1.0, [1.2, 1.21], tokens=2),  # its first token is late
        RequestTimes(1.0, [1.05, 1.1], tokens=2),  # its second one is
        RequestTimes(1.0, error="status 429"),
    ]
    found = summary(samples, 2.0, 5, settings)
    assert (found["answered"], found["unfinished"]) == (3, 1)
    assert found["failed"] == {"status 429": 1}
    assert found["requests_per_s"] == 1.5
    assert found["tokens_per_s"] == 3.5
    assert found["goodput_per_s"] == 0.5
    assert found["first_token_ms"]["p50"] == pytest.approx(50)
    assert found["between_tokens_ms"]["p50"] == pytest.approx(10)
    assert found["answer_ms"]["p50"] == pytest.approx(100)


def test_lengths_are_drawn_or_read(tmp_path: Path) -> None:
    drawn = make_bodies(ServeSettings(requests=50, prompt_length="3-5"), "m", [7, 8])
    assert {len(body["prompt"]) for body in drawn} == {3, 4, 5}
    assert {token for body in drawn for token in body["prompt"]} == {7, 8}
    assert drawn == make_bodies(ServeSettings(requests=50, prompt_length="3-5"), "m", [7, 8])
    path = tmp_path / "lengths.jsonl"
    rows = [
        {"prompt_tokens": 2, "completion_tokens": 9},
        {"prompt_tokens": 4} | {"completion_tokens": 1},
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    read = make_bodies(ServeSettings(requests=3, lengths=str(path)), "m", [7])
    assert [(len(b["prompt"]), b["max_tokens"]) for b in read] == [(2, 9), (4, 1), (2, 9)]
    path.write_text('{"prompt_tokens": 0, "completion_tokens": 1}', encoding="utf-8")
    with pytest.raises(ConfigError, match=">= 1"):
        make_bodies(ServeSettings(lengths=str(path)), "m", [7])
    with pytest.raises(ConfigError, match="cannot be read"):
        make_bodies(ServeSettings(lengths=str(tmp_path / "none")), "m", [7])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"requests": 0}, "requests 0"),
        ({"rate": 0.0}, "rate 0.0"),
        ({"prompt_length": "9-3"}, "prompt_length '9-3'"),
        ({"answer_length": "x"}, "answer_length 'x'"),
        ({"time_limit": -1.0}, "time_limit -1.0"),
        ({"url": "localhost:8000"}, "url 'localhost:8000' must be an address without /v1"),
        ({"url": "http://127.0.0.1:8000/v1"}, "url 'http://127.0.0.1:8000/v1' must be an address"),
        ({"url": "http://127.0.0.1:99999"}, "url 'http://127.0.0.1:99999' must be an address"),
        ({"url": "http://127.0.0.1:x"}, "url 'http://127.0.0.1:x' must be an address"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServeSettings(**given)


@pytest.mark.parametrize("body", [b"", b'data: {"choices": []}\n\n', b'data: {"cho'])
def test_an_answer_that_is_cut_off_has_failed(body: bytes) -> None:
    """It ended the run, and the answers before it were lost."""

    class Content:
        async def iter_any(self) -> AsyncIterator[bytes]:
            yield body

    class Answer:
        status, content = 200, Content()

        async def __aenter__(self) -> Answer:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    class Session:
        def post(self, *_: object, **__: object) -> Answer:
            return Answer()

    assert asyncio.run(serve._stream(Session(), {})).error == "incomplete answer"


def test_a_place_without_a_server_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 2
    assert "does not respond like a server" in capsys.readouterr().err


@pytest.mark.parametrize("body", ["", "[]", "null", '{"data": []}', '{"data": [{"id": "m"}]}'])
def test_another_kind_of_server_is_an_error(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its answers ended in tracebacks."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body.encode()})

    with socket.create_server(("127.0.0.1", 0)) as place:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        thread = threading.Thread(target=lambda: server.run(sockets=[place]))
        thread.start()
        status = main(["bench", "serve", "--url", f"http://127.0.0.1:{place.getsockname()[1]}"])
        server.should_exit = True
        thread.join(30)
    assert status == 2
    assert "does not respond like a server" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["1e400", '"many"', "0", "null"])
def test_lengths_that_are_none_are_refused(address: str, tmp_path: Path, number: str) -> None:
    """An infinite one ended in an OverflowError."""
    path = tmp_path / "lengths.jsonl"
    path.write_text(f'{{"prompt_tokens": 4, "completion_tokens": {number}}}')
    with pytest.raises(ConfigError, match=r"lengths .*lengths\.jsonl' (cannot be read|must have)"):
        serve.run(ServeSettings(url=address, lengths=str(path)))
