"""Kernels that start while the one before them ends: programmatic dependent launch.

From compute capability 9.0 a kernel may be launched before its predecessor has finished (CUDA C++
Programming Guide, "Programmatic Dependent Launch and Synchronization"). It then waits for all that
comes before it, but first it can read what no kernel writes: the weights of its layer. That hides
the launch and the first reads of kernels of a few microseconds. A kernel that takes part passes
`options()` to its launch, has the constant OVERLAP, and reads nothing else before `gdc_wait`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_wanted = False


def use(wanted: bool) -> None:
    """Turns overlapping on or off for all launches of this process (off by default)."""
    global _wanted
    _wanted = wanted


@contextlib.contextmanager
def using(wanted: bool) -> Iterator[None]:
    """The same for a block; what was on before is on again after it."""
    before = _wanted
    use(wanted)
    try:
        yield
    finally:
        use(before)


def is_possible() -> bool:
    """Whether the current GPU can overlap kernels."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def options() -> dict[str, Any]:
    """The options of a launch. Triton's interpreter does not know `launch_pdl`."""
    return {"OVERLAP": True, "launch_pdl": True} if _wanted else {"OVERLAP": False}
