"""Many mixed requests, and what a crash leaves: the server as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import pytest

from benchmarks.serving.soak import grown
from tests.checkpoints import make_model
from tests.server.test_serve import process

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_thousand_mixed_requests_leave_nothing_behind(tmp_path: Path) -> None:
    """The short form of `make soak`; it goes on where it stopped."""
    state = tmp_path / "state.json"
    command = [sys.executable, "-m", "benchmarks.serving.soak", "--requests", "1000"]
    command += ["--state", str(state), "--documents", str(tmp_path / "documents")]
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    (note,) = json.loads(state.read_text(encoding="utf-8"))["notes"]
    answers = note["answers"]
    assert sum(answers.values()) == 1000
    assert sum(count for kind, count in answers.items() if kind.endswith("left")) > 50


def test_growth_is_a_fault_and_noise_is_not() -> None:
    notes = [{"resident_bytes": 90 + min(i, 1) * 10, "files": 9} for i in range(20)]
    assert grown(notes) == []
    assert "memory grew" in grown([*notes, {"resident_bytes": 120, "files": 9}])[0]
    assert "open files grew" in grown([*notes, {"resident_bytes": 100, "files": 20}])[0]


@pytest.mark.slow
def test_acknowledged_documents_outlive_a_kill(tmp_path: Path) -> None:
    """The server is killed with -9 while documents and completions come in."""
    path = make_model("llama", tmp_path, tokenizer=True, vocab_size=300)
    flags = (path, "--memory", "8MiB", "--documents", str(tmp_path / "documents"))
    acknowledged: list[str] = []
    with process(*flags) as (server, address, _):

        def store(worker: int) -> None:
            for i in range(10_000):
                name, text = f"{worker}-{i}", f"the box of {worker} has number {i}"
                try:
                    answer = httpx2.put(f"{address}/v1/documents/{name}", content=text.encode())
                except httpx2.TransportError:
                    return
                if answer.status_code == 201:
                    acknowledged.append(name)

        def complete() -> None:
            body = {"prompt": "the box", "max_tokens": 64, "ignore_eos": True}
            try:
                while True:
                    httpx2.post(f"{address}/v1/completions", json=body, timeout=60)
            except httpx2.TransportError:
                return

        threads = [threading.Thread(target=store, args=(i,)) for i in range(2)]
        threads.append(threading.Thread(target=complete))
        for thread in threads:
            thread.start()
        while len(acknowledged) < 6:
            threads[0].join(0.01)
        os.kill(server.pid, signal.SIGKILL)
        for thread in threads:
            thread.join()
    with process(*flags) as (server, address, _):
        for name in acknowledged:
            found = httpx2.get(f"{address}/v1/documents/{name}").json()
            assert found["status"] == "ready", name
        body = {
            "messages": [{"role": "user", "content": "which number"}],
            "documents": acknowledged[:3],
            "max_tokens": 2,
            "ignore_eos": True,
        }
        assert httpx2.post(f"{address}/v1/chat/completions", json=body).status_code == 200
        server.send_signal(signal.SIGTERM)
