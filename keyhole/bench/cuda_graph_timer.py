"""A computation recorded once as a CUDA graph: replayed, it costs the host next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from keyhole.engine.decode.cuda_graphs import without_collection

Result = TypeVar("Result")

# torch's advice: what is made on the first calls must be there before a capture.
_WARM_UP = 3


def capture(
    call: Callable[[], Result], device: torch.device
) -> tuple[Callable[[], object], Result]:
    """What replays `call`, and its result, which each replay overwrites.

    RuntimeError for a call that asks the device for anything; it may be called again then.
    """
    with torch.cuda.device(device):
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                call()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        try:
            with without_collection(), torch.cuda.graph(graph):
                result = call()
        finally:
            torch.cuda.set_stream(here)  # a capture that fails leaves its own
    return graph.replay, result


class Captured:
    """`call` of a tensor like `given`; it must not ask the device for anything."""

    def __init__(self, call: Callable[[Tensor], Tensor], given: Tensor) -> None:
        self._given = given.clone()
        self._replay, self._result = capture(lambda: call(self._given), given.device)

    def __call__(self, given: Tensor) -> Tensor:
        """The result, which the next call overwrites."""
        self._given.copy_(given)
        self._replay()
        return self._result
