"""`keyhole serve` as a process: its first lines, and how it ends."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from benchmarks.serving.soak import children
from keyhole.cli import main
from tests.checkpoints import make_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model("llama", tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=300)


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server as a process, its address, and the lines that it prints."""
    command = [sys.executable, "-m", "keyhole", "serve", *arguments, "--port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as server:
        try:
            assert server.stderr is not None
            # A demonstration model is said to be one before.
            first = next(line for line in server.stderr if " at http" in line)
            lines = [first]
            reader = threading.Thread(target=lambda: lines.extend(server.stderr or ()))
            reader.start()
            yield server, first.split(" at ")[1].strip().removesuffix("/v1"), lines
            server.wait(60)
            reader.join()
        finally:
            server.kill()


@pytest.mark.slow
def test_a_signal_lets_what_runs_finish(path: str) -> None:
    with process(path, "--policy", "streaming_llm", "--memory", "8MiB") as (
        server,
        address,
        lines,
    ):
        body: dict[str, Any] = {
            "prompt": "x",
            "max_tokens": 300,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx2.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            events = answer.iter_lines()
            next(events)
            server.send_signal(signal.SIGTERM)
            while httpx2.get(f"{address}/ready").status_code == 200:
                pass
            refused = httpx2.post(f"{address}/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            *_, last = (line for line in events if line)
        assert last == "data: [DONE]"
    assert server.returncode == 0
    assert "policy: streaming_llm (token_budget 1024" in lines[1]
    assert lines[2].startswith("memory: weights ")
    assert any('path="/v1/completions" status=200' in line for line in lines[3:])
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
def test_a_signal_lets_a_document_be_stored(tmp_path: Path) -> None:
    """Its client got status 500, and the process was aborted."""
    text = b"the lamp is on the left and the box is on the right. " * 400
    found: list[httpx2.Response] = []
    with process("--memory", "64MiB", "--documents", str(tmp_path)) as (server, address, lines):
        place = f"{address}/v1/documents"
        client = threading.Thread(
            target=lambda: found.append(httpx2.put(f"{place}/long", content=text, timeout=60))
        )
        client.start()
        while httpx2.get(f"{place}/long").json().get("status") != "encoding":
            pass
        late = httpx2.put(f"{place}/late?wait=false", content=text + b"?")
        assert late.status_code == 202
        server.send_signal(signal.SIGTERM)
        while httpx2.get(f"{address}/ready").status_code == 200:
            pass
        refused = httpx2.put(f"{place}/refused", content=b"new")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        client.join(60)
        assert found[0].status_code == 201
    assert server.returncode == 0
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
def test_answers_that_outlast_the_drain_timeout_say_why_they_end() -> None:
    """They got status 500 and "Internal Server Error", and streams just ended."""
    body = {"prompt": "x", "max_tokens": 7000, "ignore_eos": True}
    found: list[httpx2.Response] = []
    with process("--memory", "64MiB", "--drain-timeout", "0.1") as (server, address, lines):
        place = f"{address}/v1/completions"
        whole = threading.Thread(
            target=lambda: found.append(httpx2.post(place, json=body, timeout=60))
        )
        asked = {"input": "x", "max_output_tokens": 7000, "ignore_eos": True, "stream": True}
        with (
            httpx2.stream("POST", place, json={**body, "stream": True}, timeout=60) as answer,
            httpx2.stream("POST", f"{address}/v1/responses", json=asked, timeout=60) as response,
        ):
            events, typed = answer.iter_lines(), response.iter_lines()
            next(events)
            next(typed)
            whole.start()
            while "keyhole_completions_running 3.0" not in httpx2.get(f"{address}/metrics").text:
                pass
            server.send_signal(signal.SIGTERM)
            *_, last = (line for line in events if line)
            *_, failed = (line for line in typed if line.startswith("data"))
        whole.join(60)
    assert server.returncode == 0
    errors = [json.loads(last.removeprefix("data: ")), found[0].json()]
    for error in [one["error"] for one in errors]:
        assert (error["type"], error["code"]) == ("server_error", "draining")
        assert "the server shut down" in error["message"]
    assert found[0].status_code == 503
    ended = json.loads(failed.removeprefix("data: "))
    assert ended["type"] == "response.failed"
    assert "the server shut down" in ended["response"]["error"]["message"]
    assert not any("Traceback" in line for line in lines)


@contextmanager
def listing_documents(address: str, folder: Path) -> Iterator[tuple[socket.socket, Any]]:
    """A request that waits in a thread of the server, and the lock on the index it waits for."""
    host, port = address.removeprefix("http://").split(":")
    assert httpx2.get(f"{address}/v1/documents").json()["data"] == []  # from here on it is open
    with (
        closing(sqlite3.connect(folder / "index.sqlite", isolation_level=None)) as index,
        socket.create_connection((host, int(port))) as client,
    ):
        index.execute("BEGIN EXCLUSIVE")
        client.sendall(b"GET /v1/documents HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert httpx2.get(f"{address}/health").status_code == 200
        yield client, index


@pytest.mark.slow
def test_a_signal_lets_a_request_of_any_kind_finish(tmp_path: Path) -> None:
    """One that was not a completion got status 500 after a second."""
    flags = ("--memory", "64MiB", "--documents", str(tmp_path))
    with (
        process(*flags) as (server, address, lines),
        listing_documents(address, tmp_path) as (client, index),
    ):
        server.send_signal(signal.SIGTERM)
        while httpx2.get(f"{address}/ready").status_code == 200:
            pass
        time.sleep(1.5)  # longer than what is written at the end may take
        index.execute("ROLLBACK")
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK")
    assert server.returncode == 0
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
def test_the_end_waits_for_no_thread(tmp_path: Path) -> None:
    """The server ran on, deaf to signals, until the thread of a request had ended."""
    flags = ("--memory", "64MiB", "--documents", str(tmp_path), "--drain-timeout", "0.1")
    with (
        process(*flags) as (server, address, lines),
        listing_documents(address, tmp_path) as (client, _),
    ):
        server.send_signal(signal.SIGTERM)
        answer = client.makefile("rb").read()
        server.wait(30)  # it would wait for the lock for a minute
    assert server.returncode == 0
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"the server shut down before this answer was complete" in answer
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a signal for one thread")
def test_a_signal_that_another_thread_gets_ends_it(path: str) -> None:
    """The kernel chooses the thread; unless it was the main one, the server ran on."""
    with process("--model", path, "--memory", "8MiB") as (server, _, _):
        threads = {int(one.name) for one in Path(f"/proc/{server.pid}/task").iterdir()}
        others = threads - {server.pid}
        assert ctypes.CDLL(None).tgkill(server.pid, max(others), signal.SIGTERM) == 0
    assert server.returncode == 0


@pytest.mark.slow
def test_a_second_signal_ends_at_once(path: str) -> None:
    """The log ended in a traceback of asyncio."""
    with process("--model", path, "--memory", "8MiB") as (server, address, lines):
        body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
            server.send_signal(signal.SIGTERM)
            while answers(address, "ready"):
                pass
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    assert server.returncode == 0
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
def test_a_port_that_is_taken_is_an_error(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its handler of logs stayed, and later servers of this process wrote to a closed stream."""
    before = [*logging.getLogger().handlers]
    with process("--model", path) as (server, address, _):
        assert main(["serve", "--model", path, "--port", address.rpartition(":")[2]]) == 2
        assert "cannot listen on 127.0.0.1:" in capsys.readouterr().err
        assert logging.getLogger().handlers == before
        server.send_signal(signal.SIGINT)
    assert server.returncode == 0


def answers(address: str, path: str = "health") -> bool:
    try:
        return httpx2.get(f"{address}/{path}").status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the server is one process")
@pytest.mark.parametrize("killed", ["engine", "http"])
def test_neither_process_outlives_the_other(path: str, killed: str) -> None:
    """HTTP without an engine would keep the port; an engine without HTTP answers no client."""
    with process("--model", path, "--memory", "8MiB") as (server, address, lines):
        (child,) = children(server.pid)
        assert answers(address)
        os.kill(server.pid if killed == "engine" else child, signal.SIGKILL)
        server.wait(30)
        end = time.monotonic() + 30
        while answers(address):
            assert time.monotonic() < end
    if killed == "http":
        assert server.returncode == 2
        assert "the process that answers HTTP ended with status -9" in lines[-1]
