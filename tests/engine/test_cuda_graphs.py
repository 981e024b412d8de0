"""How a recording on a GPU is made, without one: what is called, and on which stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from keyhole.engine.cuda_graph_runner import CudaGraphs, Outputs, make_recorder


class Gpu:
    """What stands for `torch.cuda`. log: what was called; stream, mode: as they are now."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.stream = self.main = Stream(self, "main")
        self.mode = 0
        names = ("get_sync_debug_mode", "set_sync_debug_mode", "set_stream", "graph")
        for name in names:
            patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.cuda, "Stream", lambda _: Stream(self, "side"))
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.stream)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: self.log.append("pool"))
        patch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))
        patch.setattr(torch.cuda, "device", self.on)

    def get_sync_debug_mode(self) -> int:
        return self.mode

    def set_sync_debug_mode(self, mode: Any) -> None:
        self.mode = 2 if mode == "error" else mode

    def set_stream(self, stream: Stream) -> None:
        self.stream = stream

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before = self.stream
        self.stream = stream if isinstance(stream, Stream) else before
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def graph(self, graph: Graph, *, pool: Any, stream: Stream, capture_error_mode: str) -> Any:
        assert capture_error_mode == "thread_local"
        self.log.append("capture begins")
        self.stream = stream  # and torch leaves it where an error comes out
        yield
        self.log.append("capture ends")
        self.stream = self.main


class Stream:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def wait_stream(self, other: Stream) -> None:
        self.gpu.log.append(f"{self.name} waits for {other.name}")


class Graph:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def replay(self) -> None:
        self.gpu.log.append("replay")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


OUTPUTS = Outputs(torch.zeros(1, 1), torch.zeros(1, 3), None)


def recorded(gpu: Gpu, *, fails_at: int | None = None) -> Any:
    """Work that reports when and how often it runs, and its capture."""
    times = 0

    def work() -> Outputs:
        nonlocal times
        times += 1
        gpu.log.append(f"work on {gpu.stream.name}, {'may not wait' if gpu.mode else 'may wait'}")
        if times == fails_at:
            raise RuntimeError("called a synchronizing CUDA operation")
        return OUTPUTS

    recorder = CudaGraphs(torch.device("cuda"))
    gpu.log.clear()
    return recorder.record(work)


def test_work_is_done_twice_before_it_is_recorded(gpu: Gpu) -> None:
    repeat = recorded(gpu)
    assert gpu.log == [
        "side waits for main",
        "work on side, may wait",
        "work on side, may not wait",
        "main waits for side",
        "capture begins",
        "work on side, may wait",
        "capture ends",
    ]
    assert repeat() is OUTPUTS
    assert gpu.log[-1] == "replay"


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_one_that_fails_leaves_all_as_it_was(gpu: Gpu, fails_at: int) -> None:
    """And no recording was begun of what waits: it would not be ended well."""
    gpu.mode = 1
    with pytest.raises(RuntimeError, match="synchronizing"):
        recorded(gpu, fails_at=fails_at)
    assert gpu.stream is gpu.main
    assert gpu.mode == 1
    assert "main waits for side" in gpu.log
    assert ("capture begins" in gpu.log) == (fails_at == 3)


def test_forgetting_begins_a_new_pool(gpu: Gpu) -> None:
    recorder = CudaGraphs(torch.device("cuda"))
    recorder.forget()
    assert gpu.log == ["pool", "pool"]


def test_a_cpu_records_nothing(gpu: Gpu) -> None:
    assert make_recorder(torch.device("cpu")) is None
    assert isinstance(make_recorder(torch.device("cuda")), CudaGraphs)
