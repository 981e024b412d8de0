"""Packs the kept tokens of a prompt, so that its pages hold hardly any dropped ones.

Layers may keep different tokens of stored documents. A page spans all layers, so at its tokens' own
positions it stays as long as any layer keeps one of them. Keys are rotated already, and attention
does not depend on the order of keys; so each layer's kept tokens move together, and page i of one
layer then holds different tokens than page i of another. If all layers keep the same number of
tokens, as under SamKV, only the first and last page may hold tokens that no layer reads.

A *place* is where a layer stores a token: a position of the page list. The first page of kept
tokens stays at the beginning, and the others end where the question begins, in order: attention
sinks and recent tokens, as policies know them, are the first and last kept ones.

A layer with a sliding window of the model's own compares positions. Its tokens stay where they are,
and those that no later token sees are dropped: pages that other layers do not need are held only if
the window is longer than what these keep.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.cache.page_list import PageList
from keyhole.cache.pages import PageCache


@dataclass(frozen=True, eq=False)
class Packing:
    """The places of a prompt's tokens before the question.

    kept: bool [L, C], the places that each layer uses. positions: int64 [L, C], the position of the
    token in each of them; -1 in the others.
    """

    kept: Tensor
    positions: Tensor

    @classmethod
    def of(cls, kept: Tensor, geometry: Geometry) -> Packing:
        """For layers that keep the tokens bool [L, C], on the CPU."""
        places = torch.zeros_like(kept)
        positions = torch.full(kept.shape, -1, dtype=torch.int64)
        length = kept.shape[1]
        for layer, row in enumerate(kept):
            tokens = row.nonzero()[:, 0]
            window = geometry.layers[layer].window
            if window is not None:
                tokens = tokens[tokens > length - window]
                places[layer, tokens] = True
                positions[layer, tokens] = tokens
                continue
            first = min(len(tokens), geometry.page_size)
            places[layer, :first] = True
            places[layer, length - (len(tokens) - first) :] = True
            positions[layer, places[layer]] = tokens
        return cls(places, positions)

    @functools.cached_property
    def places(self) -> Tensor:
        """The place of each position: int32 [L, C]; -1 where the layer has no such token."""
        found = torch.full(self.positions.shape, -1, dtype=torch.int32)
        for layer in range(len(found)):
            positions, places = self.moves(layer)
            found[layer, positions] = torch.from_numpy(places).int()
        return found

    def moves(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions of a layer's tokens, and their places: int64 [n] each, ascending."""
        places = self.kept[layer].numpy().nonzero()[0]
        return self.positions[layer].numpy()[places], places

    def at_positions(self, layer: int, tokens: np.ndarray) -> np.ndarray:
        """Marks of tokens by place, bool [H, N], as marks by position; later tokens stay."""
        found = np.zeros_like(tokens)
        end = self.kept.shape[1]
        found[:, end:] = tokens[:, end:]
        positions, places = self.moves(layer)
        found[:, positions] = tokens[:, places]
        return found


def send(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of an array on a device, whose earlier work the host does not wait for.

    torch reuses pinned memory only after the copies from it.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def move_tokens(
    cache: PageCache,
    pages: PageList,
    before: Tensor,
    old: Packing | None,
    new: Packing,
    there: Tensor,
) -> Iterator[None]:
    """Moves each layer's tokens where `new` has them, one layer at each step of the iteration.

    pages: has a page for every place (`PageList.move`). before: the page table by which tokens are
    found, int64 [M]. old: their former places; None: their positions. there: bool [L, C], by
    position, the tokens to move.
    """
    cleared = torch.from_numpy(pages.listed_pages()) if any(cache.data) else None
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        positions, places = new.moves(layer)
        device = cache.place(layer)
        has = there[layer].numpy()[positions]
        former, places = positions[has], places[has]
        if old is not None:
            former = old.places[layer].numpy()[former]
        tokens, slots = send(np.stack([former, pages.slots(places)]), device)
        shared = cache.geometry.layers[layer].shared_values
        table = before.to(device)
        key = kernels.gather_rows(keys, table, tokens)
        value = None if shared else kernels.gather_rows(values, table, tokens)
        if cleared is not None:  # summaries of a page must not include its former tokens
            there_before = cleared.to(device)
            keys[there_before] = 0
            values[there_before] = 0
        kernels.append(keys, None if shared else values, key, value, slots)
        yield
