"""What the front makes of replicas that die, are full, or cannot be had. No cluster is needed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray has an environment of its own: make test-ray")

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from keyhole.integrations.ray.front import Forwarder

START = {"type": "http.response.start", "status": 200}
STREAM = {**START, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
PLAIN = {**START, "headers": [(b"content-type", b"application/json"), (b"x-request-id", b"a")]}
DIED = RayActorError()


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Pieces:
    """A replica's answer: messages, or what is raised in their place."""

    def __init__(self, found: list[Any]) -> None:
        self._found = found
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        for one in self._found:
            if isinstance(one, Exception):
                raise one
            yield [one]


class Replicas:
    """A handle that returns the next answer at each call."""

    def __init__(self, *answers: list[Any]) -> None:
        self.calls: list[tuple[str, dict[str, Any], bytes]] = []
        self.pieces = [Pieces(answer) for answer in answers]

    def options(self, **settings: Any) -> Replicas:
        assert (settings["stream"], settings["method_name"]) == (True, "answer")
        return self

    def remote(self, *call: Any) -> Pieces:
        self.calls.append(call)
        return self.pieces[len(self.calls) - 1]


def ask(
    replicas: Replicas, path: str = "/v1/completions", body: tuple[bytes, ...] = (b"{}",)
) -> list[dict[str, Any]]:
    """What a client gets; the application is below Serve's prefix /app."""
    messages = [part(one, number < len(body)) for number, one in enumerate(body, 1)]
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        return messages.pop(0) | {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": f"/app{path}", "root_path": "/app", "method": "POST"}
    asyncio.run(Forwarder(replicas, max_body=8)(scope, receive, send))  # type: ignore[arg-type]
    return sent


def test_an_answer_passes_unchanged_and_is_named_once() -> None:
    replicas = Replicas([PLAIN, part(b"one"), part(b"two", more=False)])
    start, *rest = ask(replicas)
    assert start["headers"] == [(b"content-type", b"application/json")]
    assert rest == [part(b"one"), part(b"two", more=False)]
    ((key, scope, body),) = replicas.calls
    assert (key, body) == ("", b"{}")
    assert (scope["path"], scope["raw_path"], scope["root_path"]) == (
        "/v1/completions",
        b"/v1/completions",
        "",
    )
    assert replicas.pieces[0].cancelled


def test_a_request_without_an_answer_is_sent_again() -> None:
    replicas = Replicas([DIED], [DIED], [{**PLAIN}, part(b"x", more=False)])
    assert [one.get("body") for one in ask(replicas)] == [None, b"x"]
    assert len(replicas.calls) == 3


def test_a_request_that_ends_replicas_does_not_reach_them_all() -> None:
    replicas = Replicas([DIED], [DIED], [DIED], [PLAIN])
    start, body = ask(replicas)
    assert start["status"] == 503
    assert json.loads(body["body"])["error"]["code"] == "replica_died"
    assert len(replicas.calls) == 3


@pytest.mark.parametrize(
    ("path", "begins"), [("/v1/completions", b"data: "), ("/v1/responses", b"event: error\ndata: ")]
)
def test_a_stream_that_began_ends_with_an_error(path: str, begins: bytes) -> None:
    replicas = Replicas([{**STREAM}, part(b"data: 1\n\n"), DIED], [STREAM])
    *_, last = ask(replicas, path)
    assert not last.get("more_body", False)
    assert last["body"].startswith(begins)
    assert last["body"].endswith(b"\n\n")
    said = json.loads(last["body"].partition(b"data: ")[2])
    assert said.get("error", said)["code"] == "replica_died"
    assert len(replicas.calls) == 1


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), 429, "queue_full"),
        (DeploymentUnavailableError(None), 503, "unavailable"),
    ],
)
def test_unavailable_replicas_are_an_error(error: Exception, status: int, code: str) -> None:
    start, body = ask(Replicas([error]))
    assert start["status"] == status
    assert json.loads(body["body"])["error"]["code"] == code
    assert (b"retry-after", b"1") in start["headers"]


def test_no_more_of_a_large_body_is_read_than_a_replica_needs_to_refuse_it() -> None:
    replicas = Replicas([{**PLAIN}, part(b"", more=False)])
    ask(replicas, body=(b"12345", b"67890", b"never read"))
    assert replicas.calls[0][2] == b"1234567890"
