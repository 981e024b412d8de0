"""The concatenated blocks of a prompt's documents, and their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from keyhole.reuse.base import LayerFacts, PlacedDocument


@dataclass(frozen=True, eq=False)
class Blocks:
    """All blocks of all documents in a row, M of them.

    documents: int64 [M], the document (from 0) of each block. sizes: int64 [M], its tokens.
    edges: where each document's blocks begin, and at the end M.
    """

    documents: Tensor
    sizes: Tensor
    edges: tuple[int, ...]

    @classmethod
    def of(cls, documents: Sequence[PlacedDocument]) -> Blocks:
        """The blocks of these documents."""
        edges, sizes = [0], []
        for document in documents:
            edges.append(edges[-1] + document.num_blocks)
            sizes += [document.block_size] * document.num_blocks
            sizes[-1] = document.length - (document.num_blocks - 1) * document.block_size
        owners = torch.arange(len(documents)).repeat_interleave(torch.tensor(edges).diff())
        return cls(owners, torch.tensor(sizes), tuple(edges))

    @property
    def slices(self) -> list[slice]:
        """Of each document, where its blocks are."""
        return [slice(*pair) for pair in pairwise(self.edges)]

    def ends(self, first: int, last: int) -> Tensor:
        """The first and last blocks of every document, bool [M]; all of a short document."""
        ends = torch.zeros(len(self.sizes), dtype=torch.bool)
        for own in self.slices:
            ends[own][:first] = True
            ends[own][max(0, own.stop - own.start - last) :] = True
        return ends

    def tokens(self, blocks: Tensor) -> Tensor:
        """The tokens of blocks bool [..., M], bool [..., T]."""
        return blocks.repeat_interleave(self.sizes, dim=-1)


def gather(
    documents: Sequence[PlacedDocument], fact: Callable[[LayerFacts], Tensor]
) -> list[Tensor]:
    """Per layer a statistic [N, ...] of each document, concatenated to [M, ...]."""
    layers = range(len(documents[0].layers))
    return [torch.cat([fact(document.layers[n]) for document in documents]) for n in layers]
