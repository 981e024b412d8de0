"""Recorders of decode steps: CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

from keyhole.engine.decode.cuda_graph_runner import Outputs, Recorder, Work


class CudaGraphs:
    """Records what is launched on a GPU, in one pool of memory.

    Recordings are repeated one after the other, and what one leaves is read before the next, so
    that they may use the same memory for all that is between their inputs and outputs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.forget()

    def forget(self) -> None:
        """Begins a new pool: torch does not take up one whose graphs are all gone."""
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> Work:
        """Runs the work, then records it; RuntimeError for what waits for the device.

        That is found out before the recording begins: one that fails leaves torch's allocator in
        a state from which it gives no memory back that several streams have used.
        """
        with torch.cuda.device(self._device):
            return self._record(work)

    def _record(self, work: Work) -> Work:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        before = torch.cuda.get_sync_debug_mode()
        try:
            with torch.cuda.stream(self._stream):
                work()  # kernels are compiled, libraries take their working memory
                torch.cuda.set_sync_debug_mode("error")
                work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
            current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads (a server's, one that copies) may go on with what a recording may not do.
        mode = "thread_local"
        try:
            with (
                without_collection(),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode=mode
                ),
            ):
                outputs = work()
        finally:
            torch.cuda.set_stream(current)  # a recording that fails leaves its own

        def repeat() -> Outputs:
            graph.replay()
            return outputs

        return repeat


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """No garbage is collected: if a graph of an engine that is gone were, this recording would end.

    Graphs hold what a device must not give back while it records.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def make_recorder(device: torch.device) -> Recorder | None:
    """Who records steps on a device; None where launching them costs little (a CPU)."""
    return CudaGraphs(device) if device.type == "cuda" else None
