"""Two names of the CPU stand in for two GPUs.

torch takes `cpu:0` and `cpu:1` for one memory: a tensor that is not sent would go unnoticed.
`Places` therefore remembers which storage was sent where, and refuses an operation on two places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keyhole import kernels
from keyhole.models.batch import Batch, Chunk
from keyhole.models.model import Model, decoder_layers
from keyhole.policies.base import SequenceRows, Step

HOME, OTHER = torch.device("cpu:0"), torch.device("cpu:1")
#: A model of four layers, the two in the middle on the other device.
SPLIT = {"": "cpu:0", "model.layers.1": "cpu:1", "model.layers.2": "cpu:1"}


class Places(TorchDispatchMode):
    """Where each storage is; an operation on storages of two places fails.

    Results are where their inputs are. Storages are held, so that no address is used twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[int, tuple[Any, torch.device]] = {}
        self.sent = 0

    def mark(self, tensor: Tensor, place: torch.device) -> None:
        storage = tensor.untyped_storage()
        self.of[storage._cdata] = storage, place

    def place(self, tensor: Tensor) -> torch.device | None:
        found = self.of.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        places = {self.place(x) for x in tensors if x.dim() or x.numel() > 1} - {None}
        assert len(places) <= 1, f"{func} on {places}: {[tuple(x.shape) for x in tensors]}"
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and places and self.place(x) is None:
                self.mark(x, next(iter(places)))
        return out


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    """Copies what is sent to the other place, and notes where it is."""
    found, plain = Places(), Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        place = args[0] if args and isinstance(args[0], torch.device) else None
        if place is None or place.index is None or found.place(self) == place:
            return plain(self, *args, **kwargs)
        with torch.utils._python_dispatch._disable_current_modes():
            copy = self.clone()
        found.mark(copy, place)
        found.sent += 1
        return copy

    monkeypatch.setattr(Tensor, "to", to)
    run = Model.forward

    def forward(self: Model, ids: Tensor, positions: Tensor, batch: Any, rows: Tensor) -> Tensor:
        here = [ids, positions, rows, batch.slots, batch.newest, batch.touched, batch.filled]
        if batch.step is not None:
            step = batch.step
            here += [step.lengths, step.pages, step.page_table]
            here += [step.sequences.prompts, step.sequences.slots]
        here += [batch.adapters, *(chunk.pages for chunk in batch.chunks)]
        for tensor in here:
            if tensor is not None and tensor.numel():
                found.mark(tensor, HOME)
        _mark_model(found, self)
        _mark_cache(found, batch.cache)
        with found:
            logits = run(self, ids, positions, batch, rows)
        assert found.place(logits) == HOME
        assert all(found.place(x.indices) != OTHER for x in batch.reads if x is not None)
        return logits

    monkeypatch.setattr(Model, "forward", forward)
    at = Batch.at

    def checked(self: Batch, layer: int) -> Batch:
        view, devices = at(self, layer), self.cache.layer_devices
        wanted = HOME if devices is None else devices[layer]
        # Kernels read addresses, which `Places` does not see.
        for name, tensor in _sent(view):
            assert not tensor.numel() or found.place(tensor) == wanted, name
        return view

    monkeypatch.setattr(Batch, "at", checked)
    for name in ("append", "gather_rows", "gather_tokens"):
        monkeypatch.setattr(kernels, name, _in_one_place(found, getattr(kernels, name)))
    return found


def _in_one_place(found: Places, operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation, but it fails with tensors of two places; also between forward passes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = {found.place(x) for x in tensors} - {None}
        assert len(there) <= 1, f"{operation} on {there}"
        return operation(*args, **kwargs)

    return run


#: What views of a batch share. Adapters' numbers go from layer to layer with the hidden states.
_NOT_SENT = ("adapters", "cache", "keeper", "policy", "reads", "state", "views")


def _sent(value: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a step that go to a layer, with their names."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _sent(one, f"{name}[{number}]")
    elif isinstance(value, Batch | Step | Chunk | SequenceRows):
        for field in dataclasses.fields(value):
            if field.name not in _NOT_SENT:
                yield from _sent(getattr(value, field.name), f"{name}.{field.name}")


def _mark_model(found: Places, model: Model) -> None:
    _, blocks = decoder_layers(model.network)
    devices = model.layer_devices or [HOME] * len(blocks)
    devices = devices[:: len(devices) // len(blocks)]  # LongCat has two layers in a block
    for tensor in [*model.network.parameters(), *model.network.buffers()]:
        found.mark(tensor, HOME)
    for block, place in zip(blocks, devices, strict=True):
        for tensor in [*block.parameters(), *block.buffers()]:
            found.mark(tensor, place)


def _mark_cache(found: Places, cache: Any) -> None:
    for layer, place in enumerate(cache.layer_devices or [HOME] * len(cache.keys)):
        for tensor in [cache.keys[layer], cache.values[layer], *cache.data[layer].values()]:
            found.mark(tensor, place)
