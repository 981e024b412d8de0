"""Counters of what decode steps read, shared between the process that runs the model and vLLM's
frontend, which reports them.

Both processes map one file: a worker writes the numbers, the frontend reads them. On a GPU they are
summed on the device, and copied only after the previous copy has finished, so a step never waits
for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from keyhole.integrations.vllm.step_rows import Tables
from keyhole.policies.base import Step

#: Order of the numbers, float64 each.
FIELDS = ("keys_read", "keys_there", "pages_chosen", "rows", "sparse_layers")


@dataclass(frozen=True, kw_only=True)
class ReadCounts:
    """The counters so far, summed over rows (decoded tokens) and full-attention layers.

    keys_read, keys_there: keys that were read, and that a dense step would read. pages_chosen: of
    sparse layers. rows: decoded tokens. sparse_layers: layers that read selections.
    """

    keys_read: float
    keys_there: float
    pages_chosen: float
    rows: float
    sparse_layers: float

    @property
    def attended_fraction(self) -> float | None:
        """Share of the keys that were read; None before the first step."""
        return self.keys_read / self.keys_there if self.keys_there else None


class ReadCounters:
    """The counters of one rank.

    path: the file that another process reads; None: only this process can read them.
    """

    def __init__(self, path: Path | None, device: torch.device, sparse_layers: int) -> None:
        if path is None:
            self._shared = torch.zeros(len(FIELDS), dtype=torch.float64)
        else:
            self._shared = _mapped(path)
        self._shared.zero_()
        self._shared[FIELDS.index("sparse_layers")] = sparse_layers
        on_host = device.type == "cpu"
        self._sums = self._shared if on_host else self._shared.to(device)
        self._copy = None if on_host else self._shared.pin_memory()
        self._arrived: torch.cuda.Event | None = None

    def count(self, step: Step, tables: Tables | None) -> None:
        """Adds what a layer reads; tables None: everything."""
        there = step.lengths.sum()
        self._sums[1] += there
        if tables is None:
            self._sums[0] += there
        else:
            self._sums[0] += tables.lengths.sum() / tables.lists
            self._sums[2] += tables.pages / tables.lists

    def end_step(self, rows: int) -> None:
        """Counts the rows of a step, and publishes the sums."""
        self._sums[3] += rows
        if self._copy is None:
            return
        if self._arrived is None or self._arrived.query():
            self._shared.copy_(self._copy)
            self._copy.copy_(self._sums, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def values(self) -> ReadCounts:
        """The counters so far."""
        return _counts(self._shared)


def read_counters(path: Path) -> ReadCounts | None:
    """The counters in a file; None if no worker has created it yet."""
    return _counts(_mapped(path)) if path.exists() else None


def _mapped(path: Path) -> Tensor:
    return torch.from_file(str(path), shared=True, size=len(FIELDS), dtype=torch.float64)


def _counts(numbers: Tensor) -> ReadCounts:
    return ReadCounts(**dict(zip(FIELDS, numbers.tolist(), strict=True)))
