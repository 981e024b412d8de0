"""A recorder without a GPU: it repeats work by running it again.

What a CUDA graph could not do, or would do otherwise, fails: waiting for the device while it is
recorded, numbers from the host, tensors of the cache that have moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from keyhole.cache.pages import PageCache
from keyhole.engine.cuda_graph_runner import Outputs, Work
from keyhole.kernels.reference import layers

#: Operations whose results, or the shapes of these, the host has to wait for; and numbers from it.
WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "item",
    "lift_fresh",
    "masked_select",
    "nonzero",
    "nonzero_static",
    "repeat_interleave.Tensor",
    "unique_consecutive",
    "unique_dim",
}


class Watched(TorchDispatchMode):
    """RuntimeError for an operation that a recording cannot have, as on a GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func).removeprefix("aten.")
        masked = name.startswith(("index.", "index_put", "_index_put")) and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in args[1]
        )
        if masked or WAITING & {name, name.partition(".")[0]}:
            raise RuntimeError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


class RunAgain:
    """recorded, repeated: how often. cache: of the engine, once it is known."""

    def __init__(self) -> None:
        self.cache: PageCache | None = None
        self.recorded = self.repeated = self.forgotten = 0

    def record(self, work: Work) -> Work:
        self.recorded += 1
        # Not when it is repeated: a graph does not run the code again, and watching is slow.
        with Watched():
            self._without_the_host(work)
        places = self._places()

        def repeat() -> Outputs:
            assert self._places() == places, "a tensor of the cache has moved"
            self.repeated += 1
            return self._without_the_host(work)

        return repeat

    def forget(self) -> None:
        self.forgotten += 1

    def _places(self) -> list[int]:
        assert self.cache is not None
        return [tensor.data_ptr() for tensor in self.cache._tensors()]

    def _without_the_host(self, work: Callable[[], Outputs]) -> Outputs:
        # A GPU computes angles in its kernel; the table of a CPU needs the range of the shifts.
        no_table = mock.patch.object(layers, "_kept_angles", return_value=None)
        with mock.patch.object(torch, "from_numpy", _refused), no_table:
            return work()


def _refused(*_: object) -> Tensor:
    raise RuntimeError("a recording has no numbers from the host")
