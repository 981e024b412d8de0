"""Who may ask a server, how much, and what it says of itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from keyhole import LLM, ConfigError
from keyhole.server.errors import ApiError
from keyhole.server.settings import ServerConfig
from keyhole.server.state import Admission
from tests.server.conftest import serving


@pytest.fixture(scope="module")
def guarded(llm: LLM) -> Iterator[str]:
    with serving(llm, api_key=("first", "second"), max_body=2000) as address:
        yield address


@pytest.mark.parametrize("key", ["first", "second"])
def test_a_key_opens(guarded: str, key: str) -> None:
    answer = httpx2.get(f"{guarded}/v1/models", headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, "Bearer", "Bearer third", "Basic first", "Bearer firsts"])
def test_another_does_not(guarded: str, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    answer = httpx2.get(f"{guarded}/v1/models", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx2.get(f"{guarded}/health", headers=headers).status_code == 200


@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_large_body_is_refused(guarded: str, in_chunks: bool) -> None:
    body = b'{"prompt": "' + b"x" * 4000 + b'"}'

    def chunks() -> Iterator[bytes]:
        yield body[:1500]
        yield body[1500:]

    headers = {"Authorization": "Bearer first", "content-type": "application/json"}
    content: Any = chunks() if in_chunks else body
    answer = httpx2.post(f"{guarded}/v1/completions", content=content, headers=headers)
    assert answer.status_code == 413
    assert "at most 2.0 KiB" in answer.json()["error"]["message"]


@pytest.mark.usefixtures("own_engine")
def test_a_request_keeps_its_identity(address: str) -> None:
    assert (
        httpx2.get(f"{address}/health", headers={"X-Request-Id": "abc"}).headers["x-request-id"]
        == "abc"
    )
    assert len(httpx2.get(f"{address}/health").headers["x-request-id"]) == 32


def test_more_than_the_limit_are_refused_at_once() -> None:
    admission = Admission(3)
    with admission.enter(2):
        with pytest.raises(ApiError, match="the limit is 3") as caught, admission.enter(2):
            pass
        assert caught.value.status == 429
        assert caught.value.headers["Retry-After"] == "1"
        with admission.enter(1):
            assert admission.running == 3
    assert admission.running == 0
    with pytest.raises(ApiError, match="4 completions, but at most 3") as caught:
        admission.enter(4).__enter__()
    assert caught.value.status == 400
    admission.is_draining = True
    with pytest.raises(ApiError, match="stopping"), admission.enter(1):
        pass


def test_a_drain_waits_for_every_request_and_takes_no_new_work() -> None:
    """Only completions and documents counted: others got status 500 a second later."""
    admission = Admission(3)
    with admission.answer():
        admission.is_draining = True
        assert not admission.is_idle
        with pytest.raises(ApiError, match="stopping") as caught:
            admission.require_open()
        assert caught.value.status == 503
    assert admission.is_idle


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host": "0.0.0.0"}, "give an api_key"),
        ({"port": 70000}, "port 70000"),
        ({"max_queue": 0}, "max_queue 0"),
        ({"timeout": -1.0}, "timeout -1.0"),
        ({"api_key": ("",)}, "api_key"),
    ],
)
def test_a_config_that_cannot_be_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServerConfig(**settings)


def test_health_is_asked_without_a_body(address: str) -> None:
    """As some load balancers do, which got status 405."""
    for place in ("health", "ready"):
        answer = httpx2.head(f"{address}/{place}")
        assert (answer.status_code, answer.content) == (200, b"")


def test_other_hosts_are_accepted_with_a_key_or_insecure() -> None:
    assert ServerConfig(host="0.0.0.0", api_key=("k",)).host == "0.0.0.0"
    assert ServerConfig(host="0.0.0.0", insecure=True).insecure
    assert ServerConfig(host="::1").host == "::1"


def test_a_request_that_takes_too_long_is_ended(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """The log had a traceback, as for a failure of the server."""
    with serving(llm, timeout=0.05) as address:
        body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
        answer = httpx2.post(f"{address}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 504
        assert answer.json()["error"]["type"] == "timeout"
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        end = time.monotonic() + 30
        while llm.engine.has_work:  # until the step that runs is over
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.mark.usefixtures("own_engine")
def test_metrics_count_what_was_answered(llm: LLM) -> None:
    with serving(llm) as address:
        body = {"prompt": "x", "max_tokens": 5, "ignore_eos": True}
        assert httpx2.post(f"{address}/v1/completions", json=body).status_code == 200
        assert httpx2.get(f"{address}/nowhere/7").status_code == 404
        lines = httpx2.get(f"{address}/metrics").text.splitlines()
    assert "keyhole_generated_tokens_total 5.0" in lines
    assert 'keyhole_requests_total{path="/v1/completions",status="200"} 1.0' in lines
    assert 'keyhole_requests_total{path="other",status="404"} 1.0' in lines
    assert "keyhole_completions_running 0.0" in lines


def test_tokens_and_text_turn_into_each_other(address: str) -> None:
    said = httpx2.post(f"{address}/tokenize", json={"prompt": "ab"}).json()
    assert said["count"] == 3  # with the one before every text
    back = httpx2.post(f"{address}/detokenize", json={"tokens": said["tokens"][1:]}).json()
    assert back == {"prompt": "ab"}
    wrong = httpx2.post(f"{address}/detokenize", json={"tokens": [-1]})
    assert wrong.status_code == 400
    for path in ("/health", "/ready", "/version", "/openapi.json"):
        assert httpx2.get(address + path).status_code == 200


@pytest.mark.usefixtures("own_engine")
@pytest.mark.parametrize("given", [b"x" * 129, b"a\tb", "é".encode()])
def test_an_identity_that_may_not_stand_in_a_header_is_replaced(address: str, given: bytes) -> None:
    answer = httpx2.get(f"{address}/health", headers={b"X-Request-Id": given})
    assert len(answer.headers["x-request-id"]) == 32
