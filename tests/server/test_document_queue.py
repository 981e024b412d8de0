"""Documents are encoded beside requests: status, progress, failures, removal, a full disk."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from keyhole import LLM, AsyncLLM, CapacityError, SamplingParams
from keyhole.documents.storage import LocalStaged
from keyhole.engine.documents import encoder
from keyhole.server.documents.queue import DocumentQueue, Job
from keyhole.server.errors import ApiError
from keyhole.server.settings import ServerConfig
from keyhole.server.state import State
from tests.checkpoints import make_model
from tests.server.conftest import serving

LONG = "a lamp is on the left, another on the right " * 10


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Encodes a document in several chunks."""
    folder = tmp_path_factory.mktemp("model")
    path = make_model("llama", folder, tokenizer=True, vocab_size=300)
    return LLM(path, memory="8MiB", max_batch=4, prefill_chunk=64, documents=folder / "documents")


@pytest.fixture(scope="module")
def address(llm: LLM) -> Iterator[str]:
    with serving(llm, served_model_name="small") as address:
        yield address


class Brake:
    """Stops encoding before its second chunk, until it is let go."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()


@pytest.fixture
def brake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Brake]:
    brake, run = Brake(), encoder._run

    def slow(*arguments: Any) -> None:
        run(*arguments)
        brake.reached.set()

    report = Job.report

    def stopping(job: Job, done: int, tokens: int) -> None:
        if done:
            assert brake.go_on.wait(60)
        report(job, done, tokens)

    monkeypatch.setattr(encoder, "_run", slow)
    monkeypatch.setattr(Job, "report", stopping)
    yield brake
    brake.go_on.set()


def state(place: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx2.get(f"{place}/{name}").json()
    return found


def until(place: str, name: str, status: str) -> dict[str, Any]:
    end = time.monotonic() + 60
    while (found := state(place, name)).get("status") != status:
        assert time.monotonic() < end, found
        time.sleep(0.01)
    return found


def test_requests_are_answered_while_a_document_is_encoded(
    address: str, client: openai.OpenAI, llm: LLM, brake: Brake
) -> None:
    """The whole of a document held the engine's lock; everybody waited for its end."""
    place = f"{address}/v1/documents"
    answer = httpx2.put(f"{place}/long?wait=false", content=LONG.encode())
    assert answer.status_code == 202
    assert answer.json()["status"] in ("queued", "encoding")
    assert httpx2.put(f"{place}/later?wait=false", content=b"later").json()["status"] == "queued"
    assert brake.reached.wait(60)
    assert state(place, "long")["status"] == "encoding"
    listed = {one["id"]: one["status"] for one in httpx2.get(place).json()["data"]}
    assert listed["later"] == "queued"
    made = client.completions.create(model="small", prompt="x", max_tokens=3)
    assert made.usage is not None
    assert made.usage.completion_tokens > 0
    brake.go_on.set()
    found = until(place, "long", "ready")
    assert (found["progress"], found["tokens"]) == (1.0, len(LONG))
    until(place, "later", "ready")
    for name in ("long", "later"):
        assert httpx2.delete(f"{place}/{name}").status_code == 200
    assert not llm.engine.scheduler.lent


def test_progress_is_the_share_of_tokens(address: str, llm: LLM) -> None:
    seen: list[float] = []
    job = Job(name="shown", text=LONG, overwrite=True, pinned=False, metadata=None)

    def report(done: int, tokens: int) -> None:
        job.report(done, tokens)
        seen.append(job.progress)

    info = llm.documents.add("shown", LONG, progress=report)
    chunk = llm.engine.config.prefill_chunk
    ends = [*range(0, info.tokens, chunk), info.tokens]
    assert seen == [end / info.tokens for end in ends]
    llm.documents.remove("shown")


def test_one_that_is_removed_while_it_is_encoded_is_not_stored(
    address: str, llm: LLM, brake: Brake
) -> None:
    place, free = f"{address}/v1/documents", llm.engine.cache.available
    waiting: list[httpx2.Response] = []
    client = threading.Thread(
        target=lambda: waiting.append(
            httpx2.put(f"{place}/gone", content=LONG.encode(), timeout=60)
        )
    )
    client.start()
    assert brake.reached.wait(60)
    deleted: list[httpx2.Response] = []
    remover = threading.Thread(target=lambda: deleted.append(httpx2.delete(f"{place}/gone")))
    remover.start()
    time.sleep(0.1)
    brake.go_on.set()
    client.join(60)
    remover.join(60)
    assert deleted[0].status_code == 200
    assert waiting[0].status_code == 409
    assert "removed" in waiting[0].json()["error"]["message"]
    assert httpx2.get(f"{place}/gone").status_code == 404
    assert httpx2.delete(f"{place}/gone").status_code == 404
    assert llm.engine.cache.available == free


def test_a_failure_has_a_reason_and_the_next_job_clears_it(address: str, llm: LLM) -> None:
    place = f"{address}/v1/documents"
    too_long = b"x" * (llm.engine.max_length + 1)
    assert httpx2.put(f"{place}/f?wait=false", content=too_long).status_code == 202
    assert "this model takes at most" in until(place, "f", "failed")["error"]
    listed = {one["id"]: one["status"] for one in httpx2.get(place).json()["data"]}
    assert listed["f"] == "failed"
    # A client that waits is told, and nothing is left of what was refused.
    assert httpx2.put(f"{place}/f", content=too_long).status_code == 400
    assert httpx2.get(f"{place}/f").status_code == 404
    assert httpx2.put(f"{place}/f", content=b"short").json()["error"] is None
    assert state(place, "f")["status"] == "ready"
    assert httpx2.delete(f"{place}/f").status_code == 200


def test_a_stored_document_stays_ready_if_another_text_is_refused(address: str) -> None:
    """It was shown as failed, though it could be asked as before."""
    place = f"{address}/v1/documents"
    assert httpx2.put(f"{place}/kept", content=b"the first").status_code == 201
    body = {"text": "the second", "overwrite": False}
    assert httpx2.put(f"{place}/kept", json=body).status_code == 400
    assert state(place, "kept")["error"] is None
    assert httpx2.put(f"{place}/kept?wait=false", json=body).status_code == 202
    deadline = time.monotonic() + 60
    while state(place, "kept")["error"] is None and time.monotonic() < deadline:
        time.sleep(0.01)
    found = state(place, "kept")
    assert (found["status"], found["progress"], found["tokens"]) == ("ready", 1.0, 9)
    assert "overwrite" in found["error"]
    listed = {one["id"]: one["status"] for one in httpx2.get(place).json()["data"]}
    assert listed["kept"] == "ready"
    assert httpx2.delete(f"{place}/kept").status_code == 200


@pytest.mark.slow
def test_a_full_disk_is_507_and_the_rest_goes_on(
    address: str, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"{address}/v1/documents"
    assert httpx2.put(f"{place}/there", content=b"it was there before").status_code == 201

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(LocalStaged, "__init__", full)
        answer = httpx2.put(f"{place}/new", content=b"there is no room for this")
        assert answer.status_code == 507
        assert answer.json()["error"]["code"] == "insufficient_storage"
        assert "No space left" in answer.json()["error"]["message"]
        made = client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": "before"}],
            max_tokens=3,
            extra_body={"documents": ["there"], "ignore_eos": True},
        )
        assert made.usage is not None
        assert made.usage.completion_tokens == 3
    assert httpx2.get(f"{place}/new").status_code == 404
    assert httpx2.put(f"{place}/new", content=b"there is no room for this").status_code == 201
    for name in ("there", "new"):
        assert httpx2.delete(f"{place}/{name}").status_code == 200


def test_no_more_wait_than_the_limit(llm: LLM, brake: Brake) -> None:
    queue = DocumentQueue(llm.documents, 1, lambda _: None)
    jobs = [
        Job(name=f"w{number}", text=LONG, overwrite=True, pinned=False, metadata=None)
        for number in range(3)
    ]
    queue.add(jobs[0])
    assert brake.reached.wait(60)
    queue.add(jobs[1])
    with pytest.raises(ApiError, match=r"is full \(limit 1\)") as caught:
        queue.add(jobs[2])
    assert caught.value.status == 429
    brake.go_on.set()
    for job in jobs[:2]:
        assert job.result.result(60).name == job.name
        llm.documents.remove(job.name)
    assert queue.get("w0") is None


def test_one_that_is_removed_while_it_is_queued_waits_for_no_other(llm: LLM, brake: Brake) -> None:
    """Its removal waited for all documents before it, and held a thread that requests need."""
    queue = DocumentQueue(llm.documents, 8, lambda _: None)
    jobs = [Job(name=name, text=LONG, overwrite=True, pinned=False) for name in ("a", "b", "c")]
    for job in jobs:
        queue.add(job)
    assert brake.reached.wait(60)
    cancelled: list[bool] = []
    remover = threading.Thread(target=lambda: cancelled.append(queue.cancel("b")), daemon=True)
    remover.start()
    remover.join(10)
    assert cancelled == [True]
    assert queue.get("b") is None
    with pytest.raises(ApiError, match="'b' was removed"):
        jobs[1].result.result(0)
    brake.go_on.set()
    for job in (jobs[0], jobs[2]):
        assert job.result.result(60).name == job.name
        llm.documents.remove(job.name)
    assert not queue.cancel("b")


def test_a_closed_queue_encodes_nothing(llm: LLM, brake: Brake) -> None:
    queue = DocumentQueue(llm.documents, 8, lambda _: None)
    jobs = [Job(name=name, text=LONG, overwrite=True, pinned=False) for name in ("a", "b", "c")]
    for job in jobs[:2]:
        queue.add(job)
    assert brake.reached.wait(60)
    closer = threading.Thread(target=queue.close)
    closer.start()
    assert isinstance(jobs[1].result.exception(60), ApiError)  # closed, with one to wait for
    with pytest.raises(ApiError, match="is stopping"):
        queue.add(jobs[2])
    assert closer.is_alive()
    brake.go_on.set()
    closer.join(60)
    for job in jobs[:2]:
        with pytest.raises(ApiError, match="is stopping") as caught:
            job.result.result(0)
        assert caught.value.status == 503
    assert not queue.jobs()
    assert not llm.documents.list()


def test_metadata_is_kept_and_replaced(address: str) -> None:
    place = f"{address}/v1/documents"
    for metadata in ({"by": "Ann", "pages": [1, 2]}, {"by": "Bob"}):
        body = {"text": "with metadata", "metadata": metadata}
        assert httpx2.put(f"{place}/m", json=body).json()["metadata"] == metadata
        assert state(place, "m")["metadata"] == metadata
    assert httpx2.put(f"{place}/m", content=b"with metadata").json()["metadata"] == {"by": "Bob"}
    assert httpx2.put(f"{place}/m", content=b"another").json()["metadata"] == {}
    many = {"text": "x", "metadata": {"long": "y" * 9000}}
    answer = httpx2.put(f"{place}/m", json=many)
    assert answer.status_code == 400
    assert "metadata" in answer.json()["error"]["message"]
    raw = json.dumps({"text": "x", "metadata": {"n": 1}}).replace("1", "NaN")
    headers = {"content-type": "application/json"}
    assert httpx2.put(f"{place}/m", content=raw, headers=headers).status_code == 400
    assert httpx2.delete(f"{place}/m").status_code == 200


@pytest.mark.parametrize("holder", ["request", "document"])
def test_a_document_waits_for_pages_that_are_held(tmp_path: Path, holder: str) -> None:
    """It failed if no page was free at that moment."""
    path = make_model("llama", tmp_path, tokenizer=True, vocab_size=300)
    llm = LLM(path, memory="256KiB", prefix_cache=False, documents=tmp_path / "documents")
    room = llm.engine.max_pages * llm.engine.config.page_size
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    waited, pieces = threading.Semaphore(0), llm.stream("x" * (room - 16), params)
    text = "y" * (room // 2)
    if holder == "request":
        next(pieces)
    else:
        lent = llm.engine.cache.allocate(llm.engine.max_pages)
        assert lent is not None
        llm.engine.scheduler.lend(lent)
    with pytest.raises(
        CapacityError, match=r"does not fit into the KV cache now: .* tokens are free"
    ):
        llm.documents.add("now", text)
    found: list[Any] = []

    def store() -> None:
        found.append(llm.documents.add("later", text, progress=lambda *_: waited.release()))

    thread = threading.Thread(target=store)
    thread.start()
    for _ in range(2):  # before it looks for pages, and when it finds none
        assert waited.acquire(timeout=60)
    if holder == "document":
        llm.engine.scheduler.take_back(lent)
    for _ in pieces:
        pass
    thread.join(60)
    assert found[0].tokens == len(text)
    llm.engine.check_integrity()


@pytest.mark.parametrize("name", ["encoding", "retriever"])
def test_threads_that_come_at_once_share_one(llm: LLM, name: str) -> None:
    """Since Python 3.12, `/metrics` and the first document could each make a queue of their own:
    documents of the one that lost had no status, and could be neither cancelled nor waited for.
    """
    state = State(AsyncLLM(llm), ServerConfig())
    make = vars(State)[name].func  # what each of the threads runs
    assert make(state) is make(state) is getattr(state, name)
