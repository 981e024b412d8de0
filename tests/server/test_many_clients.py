"""Many clients of one engine: none of them slows, starves or breaks another."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from keyhole import LLM, AsyncLLM, SamplingParams
from keyhole.server import run
from keyhole.server.settings import ServerConfig
from tests.checkpoints import make_model
from tests.server.conftest import serving

LONG = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "abc", "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}


@contextmanager
def stream_of(address: str, **fields: Any) -> Iterator[Iterator[str]]:
    """The events of a stream that has begun."""
    place = f"{address}/v1/completions"
    with httpx2.stream("POST", place, json=body(stream=True, **fields), timeout=60) as answer:
        events = (line for line in answer.iter_lines() if line)
        next(events)
        yield events


def until(reached: Any) -> None:
    end = time.monotonic() + 120  # far more than it takes, also on a busy machine
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.001)


def at_rest(llm: LLM) -> None:
    until(lambda: not llm.engine.has_work)
    with llm.engine.lock:
        llm.engine.check_integrity()


# A slow reader.


@pytest.mark.slow
def test_what_a_slow_task_has_not_taken_is_one_piece(llm: LLM) -> None:
    wanted = llm.generate("abc", LONG)
    served = AsyncLLM(llm)

    async def main() -> None:
        async with aclosing(served.stream("abc", LONG)) as pieces:
            first = await anext(pieces)
            others = await asyncio.gather(*(served.generate("abcd", SHORT) for _ in range(6)))
            assert all(len(result.token_ids) == 4 for result in others)
            while not served._steps.is_idle:  # its own tokens did not wait for it either
                await asyncio.sleep(0.001)
            rest = await anext(pieces)
        assert first.text + rest.text == wanted.text
        assert first.token_ids + rest.token_ids == wanted.token_ids
        assert rest.result is not None
        assert (rest.result.text, rest.result.token_ids) == (wanted.text, wanted.token_ids)

    asyncio.run(main())
    at_rest(llm)


@pytest.mark.slow
def test_a_client_that_does_not_read_slows_no_other(address: str, llm: LLM) -> None:
    data = json.dumps(body(max_tokens=150, n=3, stream=True, logprobs=20)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    host, port = address.removeprefix("http://").split(":")
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        lazy.settimeout(30)
        lazy.connect((host, int(port)))
        lazy.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
        until(lambda: llm.engine.has_work)
        for _ in range(3):
            assert httpx2.post(f"{address}/v1/completions", json=body()).status_code == 200
        until(lambda: not llm.engine.has_work)  # nor does its own answer wait
        seen = b""
        while b"data: [DONE]" not in seen:
            got = lazy.recv(1 << 20)
            assert got
            seen += got
    ends = [
        json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"]
        for line in seen.decode().splitlines()
        if line.startswith('data: {"')
    ]
    assert ends.count("length") == 3


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has it")
def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests counted as running for ever: enough such clients, and all others got 429."""
    monkeypatch.setattr(run, "_UNREAD_MS", 200)
    with run.listening(ServerConfig(port=0)) as place, socket.socket() as lazy:
        place.listen()
        lazy.connect(place.getsockname())
        with place.accept()[0] as connection:
            connection.settimeout(30)
            with pytest.raises(TimeoutError) as found:
                connection.sendall(bytes(64 << 20))
    assert found.value.errno == errno.ETIMEDOUT  # the connection's, not that of this test


# Who leaves.


@pytest.mark.slow
def test_who_leaves_is_not_in_the_step_after_the_next(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that runs when a client leaves ends; the one after it has freed its pages."""
    served, step, running = AsyncLLM(llm), llm.engine.step, []

    def noted() -> Any:
        found = step()
        running.append(len(llm.engine.scheduler.running))
        return found

    monkeypatch.setattr(llm.engine, "step", noted)

    async def main() -> int:
        stays = asyncio.ensure_future(served.generate("abcd", LONG))
        async with aclosing(served.stream("abc", LONG)) as pieces:
            async for _ in pieces:
                if running and running[-1] == 2:
                    break
        left = len(running)
        await stays
        return left

    left = asyncio.run(main())
    assert running[left - 1] == 2
    assert max(running[left + 1 :]) == 1
    at_rest(llm)


@pytest.mark.usefixtures("own_engine")
def test_who_leaves_before_the_first_token_frees_its_stream(address: str, llm: LLM) -> None:
    """It was noticed at the first token only, however long the request waited for it."""
    data = json.dumps(body(stream=True)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    host, port = address.removeprefix("http://").split(":")

    def running() -> str:
        lines = httpx2.get(f"{address}/metrics").text.splitlines()
        return next(line for line in lines if line.startswith("keyhole_completions_running "))

    with llm.engine.lock:  # no step runs meanwhile
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
            until(lambda: running().endswith(" 1.0"))
        until(lambda: running().endswith(" 0.0"))
    at_rest(llm)


# Limits.


@pytest.mark.slow
def test_more_than_the_queue_takes_are_refused_with_the_time_to_wait(llm: LLM) -> None:
    """Four run and one may wait."""
    with serving(llm, max_queue=1) as address:
        with stream_of(address, max_tokens=400, n=5):
            refused = httpx2.post(f"{address}/v1/completions", json=body())
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert refused.json()["error"]["code"] == "queue_full"
        at_rest(llm)
        until(lambda: httpx2.post(f"{address}/v1/completions", json=body()).status_code == 200)


@pytest.mark.slow
def test_a_request_may_have_a_deadline_of_its_own(address: str, llm: LLM) -> None:
    late = body(max_tokens=480, keyhole={"timeout": 0.02})
    with stream_of(address, max_tokens=200) as others:
        answer = httpx2.post(f"{address}/v1/completions", json=late)
        assert answer.status_code == 504
        assert answer.json()["error"]["type"] == "timeout"
        *_, last = others
        assert last == "data: [DONE]"
    answer = httpx2.post(f"{address}/v1/completions", json=body(keyhole={"timeout": -1}))
    assert answer.status_code == 400
    at_rest(llm)


@pytest.mark.parametrize("count", [1, 2])
def test_a_deadline_ends_a_stream_with_an_error(address: str, llm: LLM, count: int) -> None:
    """A stream of two completions was cut off, without a word."""
    place = f"{address}/v1/completions"
    late = {"max_tokens": 400, "n": count, "keyhole": {"timeout": 0.5}}
    with llm.engine.lock:  # no step runs meanwhile: what has not begun has a status
        assert httpx2.post(place, json=body(stream=True, **late)).status_code == 504
    at_rest(llm)
    with stream_of(address, **late) as events, llm.engine.lock:
        *_, last = events
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "timeout"
    at_rest(llm)


@pytest.mark.slow
def test_a_long_prompt_does_not_starve_a_short_one(tmp_path: Path) -> None:
    """`max_prefill_share`: the short prompt is answered while the long one is still being read."""
    path = make_model("llama", tmp_path, tokenizer=True, vocab_size=300)
    llm = LLM(path, memory="8MiB", prefill_chunk=16, max_prefill_share=0.5, prefix_cache=False)
    with serving(llm) as address:
        ended: dict[str, float] = {}

        def ask(name: str, prompt: str) -> None:
            place = f"{address}/v1/completions"
            assert httpx2.post(place, json=body(prompt=prompt, user=name)).status_code == 200
            ended[name] = time.monotonic()

        threads = [
            threading.Thread(target=ask, args=given)
            for given in (("long", "x" * 450), ("short", "abc"))
        ]
        with llm.engine.lock:  # so that both are there before the next step
            for thread in threads:
                thread.start()
                time.sleep(0.2)
        for thread in threads:
            thread.join()
        assert ended["short"] < ended["long"]


# What fails.


def test_a_step_that_fails_is_an_error_object_and_the_server_lives(
    address: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = llm.engine.step

    def broken() -> Any:
        if any(len(one.generated) > 20 for one in llm.engine.scheduler.running):
            raise RuntimeError("the device is gone")
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine, "step", broken)
        with stream_of(address, max_tokens=400) as events:
            answer = httpx2.post(f"{address}/v1/completions", json=body(max_tokens=400))
            assert answer.status_code == 500
            error = answer.json()["error"]
            assert error["type"] == "server_error"
            assert "device" not in error["message"]  # that is for the log
            *_, last = events
            assert json.loads(last.removeprefix("data: "))["error"] == error
    at_rest(llm)
    assert httpx2.post(f"{address}/v1/completions", json=body()).status_code == 200


def test_nan_fails_the_request_that_has_it_alone(
    address: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = llm.engine.model.forward

    def broken(tokens: Any, positions: Any, batch: Any, rows: torch.Tensor) -> torch.Tensor:
        logits = forward(tokens, positions, batch, rows)
        logits[positions[rows] == 40] = float("nan")  # which only the long one reaches
        return logits

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.model, "forward", broken)
        with stream_of(address, max_tokens=30) as good:
            bad = httpx2.post(f"{address}/v1/completions", json=body(max_tokens=60))
            assert bad.status_code == 500
            assert bad.json()["error"]["code"] == "numerical_error"
            *_, last = good
            assert last == "data: [DONE]"
    at_rest(llm)
