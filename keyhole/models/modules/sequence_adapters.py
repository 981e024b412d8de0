"""LoRA adapters, of which each sequence of a step may use a different one.

Hu et al., LoRA (2021, arXiv 2106.09685), equation 3: a layer computes W x + s B A x, where A
[r, in] and B [out, r] belong to the adapter of the row and s is its scale. Here the matrices of all
adapters of a layer are stacked: every row is multiplied by all A at once, the products with those
of other adapters are set to zero, and one product with all B gives what is added. The operations
of a step are the same whichever adapters its rows have; their cost grows with the sum of the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AdapterRows(NamedTuple):
    """The adapter of every row of a forward pass: its number, 0 for none.

    numbers: int64 [T], on the device of the layers that run now. copies: by the devices that had
    them already.
    """

    numbers: Tensor
    copies: dict[torch.device, Tensor]


#: Those of the forward pass that this thread runs; None: no row has an adapter.
_ROWS: ContextVar[AdapterRows | None] = ContextVar("adapter_rows", default=None)


class AdapterMatrices(NamedTuple):
    """What one adapter adds to one layer: `up @ down @ x`.

    number: of the adapter, from 1. down: [r, in]. up: [out, r], with the adapter's scale.
    """

    number: int
    down: Tensor
    up: Tensor


class Adapted(nn.Module):
    """Marks the subclasses that `attach` makes.

    owner: int64 [R], the adapter of each rank. down: [R, in] and up: [out, R] of all adapters.
    """

    owner: Tensor
    down: Tensor
    up: Tensor


def attach(
    network: nn.Module, layers: Mapping[str, Sequence[AdapterMatrices]], dtype: torch.dtype
) -> None:
    """Makes layers of a network add what the adapter of a row adds, in place.

    layers: by module name. dtype: what they compute in.
    """
    for name, parts in layers.items():
        module = network.get_submodule(name)
        place = next((t.device for t in [*module.parameters(), *module.buffers()]), None)
        owner = torch.cat([torch.full((len(p.down),), p.number) for p in parts])
        down, up = torch.cat([p.down for p in parts]), torch.cat([p.up for p in parts], 1)
        for key, tensor in (("owner", owner), ("down", down.to(dtype)), ("up", up.to(dtype))):
            module.register_buffer(key, tensor.to(place).contiguous(), persistent=False)
        module.__class__ = _subclass(type(module))  # type: ignore[arg-type]


@contextmanager
def using(rows: Tensor | None) -> Iterator[None]:
    """For a forward pass of a packed row: the number of each row's adapter, int64 [T]."""
    token = _ROWS.set(None if rows is None else AdapterRows(rows, {}))
    try:
        yield
    finally:
        _ROWS.reset(token)


def send(place: torch.device) -> None:
    """For a model with layers on several devices: the next layers that run are on this one."""
    rows = _ROWS.get()
    if rows is None:
        return
    if place not in rows.copies:
        rows.copies[place] = rows.numbers.to(place)
    _ROWS.set(rows._replace(numbers=rows.copies[place]))


def adapter_rows(numbers: Sequence[tuple[int, int]], device: torch.device) -> Tensor | None:
    """The adapter of each packed row, int64 [T]; None if no sequence has one.

    numbers: of each sequence in the row its adapter, 0 for none, and its tokens.
    """
    if not any(number for number, _ in numbers):
        return None
    of_rows = np.repeat([number for number, _ in numbers], [count for _, count in numbers])
    return torch.from_numpy(of_rows.astype(np.int64)).to(device)


@functools.cache
def _subclass(cls: type[nn.Module]) -> type[nn.Module]:
    original: Any = cls.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = original(self, x)
        rows = _ROWS.get()
        if rows is None:
            return out
        inner = F.linear(x, self.down)
        # Filled, not multiplied: a row that overflows in another adapter must not become NaN.
        others = self.owner != rows.numbers[:, None]
        return out + F.linear(inner.masked_fill(others, 0), self.up)

    return type(f"Adapted{cls.__name__}", (Adapted, cls), {"forward": forward})
