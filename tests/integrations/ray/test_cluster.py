"""Two replicas on a local cluster: killed, scaled, and as good at hits as one server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray has an environment of its own: make test-ray")

import httpx2
import ray

from keyhole import LLM
from tests.checkpoints import make_model
from tests.integrations.ray import cluster
from tests.server.conftest import in_this_process

#: Far more than any of these takes on a busy machine; a request without an answer fails its test.
TIMEOUT = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model("llama", tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=300)


def until(true: Callable[[], bool], seconds: float = TIMEOUT) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def body(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **more}


@dataclass
class Load:
    """Clients that ask as long as the block lives, every second one for a stream.

    under_way: clients whose stream has begun and not ended.
    """

    address: str
    tokens: int = 40
    clients: int = 8
    under_way: set[int] = field(default_factory=set)
    answers: list[tuple[int, Any]] = field(default_factory=list)
    streams: list[list[Any]] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._ended = threading.Event()
        self._threads = ThreadPoolExecutor(self.clients)
        self._running = [self._threads.submit(self._ask, one) for one in range(self.clients)]
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for one in self._running:
            one.result(TIMEOUT)
        self._threads.shutdown()

    def _ask(self, client: int) -> None:
        place, number = f"{self.address}/v1/completions", 0
        with httpx2.Client(timeout=TIMEOUT) as web:
            while not self._ended.is_set():
                number += 1
                prompt = f"{client} says {number}"
                if client % 2:
                    got = web.post(place, json=body(prompt, self.tokens))
                    self.answers.append((got.status_code, got.json()))
                else:
                    asked = body(prompt, self.tokens, stream=True)
                    with web.stream("POST", place, json=asked) as stream:
                        assert stream.status_code == 200
                        said = []
                        for line in filter(None, stream.iter_lines()):
                            self.under_way.add(client)
                            said.append(line[6:])
                    self.under_way.discard(client)
                    self.streams.append([x if x == "[DONE]" else json.loads(x) for x in said])

    @property
    def broken(self) -> list[dict[str, Any]]:
        """Errors that streams ended with; every other stream is complete."""
        found = []
        for said in self.streams:
            if said[-1] != "[DONE]":
                found.append(said[-1]["error"])
            else:
                assert said[-2]["choices"][0]["finish_reason"] == "length"
        return found


@pytest.fixture(scope="module")
def address(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    documents = str(tmp_path_factory.mktemp("documents"))
    settings = {"num_replicas": 2, "documents": documents, "max_batch": 8}
    with cluster.application(model=model, log_format="json", **settings) as address:
        yield address


def test_a_body_may_be_larger_than_grpcs_messages_are_by_default(address: str) -> None:
    content = json.dumps(body("hello", 2)).encode() + b" " * 5 * 2**20
    headers = {"content-type": "application/json"}
    place = f"{address}/v1/completions"
    got = httpx2.post(place, content=content, headers=headers, timeout=TIMEOUT)
    assert got.json()["usage"]["completion_tokens"] == 2


def test_a_replica_logs_each_request(address: str) -> None:
    folder = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    name = {"x-request-id": "one-of-the-log"}
    got = httpx2.post(f"{address}/v1/completions", json=body("hello", 2), headers=name)
    assert got.status_code == 200

    def logged() -> list[Any]:
        texts = [file.read_text(errors="replace") for file in folder.glob("worker-*.err")]
        lines = [line for line in "\n".join(texts).splitlines() if name["x-request-id"] in line]
        return [json.loads(line) for line in lines if line.startswith("{")]  # others are Serve's

    until(lambda: bool(logged()))
    (line,) = logged()
    assert (line["path"], line["status"], line["completion_tokens"]) == ("/v1/completions", 200, 2)


def test_a_killed_replica_breaks_streams_alone_and_comes_back(address: str) -> None:
    put = httpx2.put(f"{address}/v1/documents/kept", content=b"a text " * 20, timeout=TIMEOUT)
    assert put.status_code == 201
    before = set(cluster.replica_pids())
    assert len(before) == 2
    # As many clients as both replicas run at once: both have streams when all are under way.
    with Load(address, tokens=240, clients=16) as load:
        until(lambda: len(load.streams) > 8 and len(load.under_way) == 8)
        cluster.kill(before.copy().pop())
        until(lambda: len(set(cluster.replica_pids()) - before) == 1)
        seen = len(load.answers)
        until(lambda: len(load.answers) > seen + 8)
    assert {status for status, _ in load.answers} == {200}
    assert all(said["usage"]["completion_tokens"] == 240 for _, said in load.answers)
    assert load.broken
    for error in load.broken:
        assert (error["code"], error["type"]) == ("replica_died", "server_error")
    until(lambda: len(cluster.replica_pids()) == 2)
    info = httpx2.get(f"{address}/v1/documents/kept", timeout=TIMEOUT).json()
    assert info["status"] == "ready"
    asked = {"messages": [{"role": "user", "content": "what ?"}], "documents": ["kept"]}
    got = httpx2.post(f"{address}/v1/chat/completions", json=asked | {"max_tokens": 3})
    assert got.status_code == 200


def test_rays_exporter_has_the_metrics_of_every_replica(address: str) -> None:
    port = ray.nodes()[0]["MetricsExportPort"]
    wanted = "ray_keyhole_requests_total{"

    def replicas() -> set[str]:
        text = httpx2.get(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT).text
        lines = [line for line in text.splitlines() if line.startswith("ray_keyhole_pages{")]
        return {line.split('replica="')[1].split('"')[0] for line in lines}

    until(lambda: len(replicas()) >= 2)
    text = httpx2.get(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT).text
    assert wanted in text
    assert "ray_keyhole_first_token_seconds_bucket{" in text


@dataclass(frozen=True)
class Scaled:
    """An application that has one replica, and two under load. others: processes before it."""

    address: str
    others: set[int]

    @property
    def count(self) -> int:
        """Its replicas."""
        return len(set(cluster.replica_pids()) - self.others)


@pytest.fixture(scope="module")
def scaled(model: str) -> Iterator[Scaled]:
    scaling = {
        "metrics_interval_s": 0.2,
        "look_back_period_s": 1.0,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 2.0,
    }
    settings = {
        "num_replicas": "auto",
        "max_replicas": 2,
        "target_ongoing_requests": 2,
        "autoscaling_config": scaling,
    }
    others = set(cluster.replica_pids())
    with cluster.application(model=model, **settings) as address:
        yield Scaled(address, others)


def test_a_client_that_leaves_frees_its_request(scaled: Scaled) -> None:
    def running() -> float:
        lines = httpx2.get(f"{scaled.address}/metrics", timeout=TIMEOUT).text.splitlines()
        (line,) = (x for x in lines if x.startswith("keyhole_completions_running "))
        return float(line.split()[1])

    assert scaled.count == 1
    asked = body("hello", 900, stream=True)
    place = f"{scaled.address}/v1/completions"
    with httpx2.stream("POST", place, json=asked, timeout=TIMEOUT) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert running() == 1
    until(lambda: running() == 0, seconds=2)


def test_replicas_come_and_go_without_a_failed_request(scaled: Scaled) -> None:
    assert scaled.count == 1
    with Load(scaled.address) as load:
        until(lambda: scaled.count == 2)
        seen = len(load.answers)
        until(lambda: len(load.answers) > seen + 16)
    assert {status for status, _ in load.answers} == {200}
    assert not load.broken
    place, end = f"{scaled.address}/v1/completions", time.monotonic() + TIMEOUT
    while scaled.count == 2:
        assert time.monotonic() < end
        assert httpx2.post(place, json=body("x", 2), timeout=TIMEOUT).status_code == 200
    assert scaled.count == 1


PREFIXES = [f"{name} " * 60 for name in ("alpha", "beta", "gamma", "delta", "eta", "theta")]


def hits(address: str) -> tuple[float, float]:
    """Shares of prompt tokens whose keys and values were there: after a start, after documents.

    Every replica also finds each document in the store, whichever encoded it.
    """
    with httpx2.Client(base_url=address, timeout=TIMEOUT) as web:
        for index, text in enumerate(PREFIXES):
            put = web.put(f"{address}/v1/documents/d{index}", content=text.encode())
            assert put.status_code == 201

        def ask(index: int, number: int, reuse: str) -> Any:
            asked = {
                "messages": [{"role": "user", "content": f"question {number}"}],
                "documents": [f"d{index}"],
                "reuse": reuse,
                "max_tokens": 2,
            }
            return web.post(f"{address}/v1/chat/completions", json=asked).json()["usage"]

        starts, documents = [], []
        for number in range(12):
            for index, text in enumerate(PREFIXES):
                asked = body(f"{text} question {number}", 2)
                starts.append(web.post(f"{address}/v1/completions", json=asked).json()["usage"])
                documents.append(ask(index, number, "recompute"))
        assert all(
            ask(index, 0, "reuse")["keyhole"]["recompute_ratio"] == 0.0
            for index in range(len(PREFIXES))
            for _ in range(3)
        )
    return _share(starts), _share(documents)


def _share(usages: list[Any]) -> float:
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usages)
    return float(cached / sum(one["prompt_tokens"] for one in usages))


def test_two_replicas_hit_as_often_as_one_server(model: str, tmp_path: Path) -> None:
    llm = LLM(model, memory="8MiB", max_batch=4, documents=tmp_path / "one")
    with in_this_process(llm) as one:
        alone = hits(one)
    documents = str(tmp_path / "two")
    with cluster.application(model=model, num_replicas=2, documents=documents) as two:
        both = hits(two)
    print("hit rates of one server, and of two replicas:", alone, both)
    assert min(alone) > 0.5
    assert both[0] >= 0.9 * alone[0]
    assert both[1] >= 0.9 * alone[1]
