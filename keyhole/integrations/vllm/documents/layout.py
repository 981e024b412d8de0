"""Where one layer stores the tokens of a prompt in the request's pages.

Without gaps a token is stored at its position, as in vLLM. A layer that keeps only some tokens
packs them into the first pages, so that attention can read them as a list of whole pages; the list
continues with the page of the question's first token, where vLLM writes what follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """The tokens that one layer reads, in order.

    order: int64 [n], the request's pages, counted from 0, in reading order. index: int64 [end], for
    each token before the question its index among the kept ones, or -1. count: number of kept
    tokens. page_size: tokens per page.
    """

    order: Tensor
    index: Tensor
    count: int
    page_size: int

    @classmethod
    def whole(cls, end: int, num_pages: int, page_size: int) -> Self:
        """All tokens, where vLLM stores them."""
        return cls(torch.arange(num_pages), torch.arange(end), end, page_size)

    @classmethod
    def of(cls, kept: Tensor, num_pages: int, page_size: int, *, scratch: bool = False) -> Self:
        """The kept tokens, bool [end], of a prompt; `end - kept` is a multiple of the page size.

        scratch: the question is computed before its own pages are allocated: beyond the first of
        them it is written to middle pages that no kept token needs.
        """
        end, count = len(kept), int(kept.sum())
        assert (end - count) % page_size == 0, "what is dropped must be whole pages"
        filled, question = count // page_size, end // page_size
        rest = torch.arange(question, num_pages)
        if scratch:
            rest = torch.cat([rest[:1], torch.arange(filled, question)])
        index = torch.where(kept, kept.cumsum(0) - 1, -1)
        return cls(torch.cat([torch.arange(filled), rest]), index, count, page_size)

    def places(self, positions: Tensor) -> Tensor:
        """The index of each token in reading order, int64; tokens of the question follow the kept
        ones.
        """
        end = len(self.index)
        before = self.index[positions.clamp(max=end - 1)]
        return torch.where(positions < end, before, self.count + positions - end)

    def slots(self, positions: Tensor, blocks: Tensor) -> Tensor:
        """Slots in vLLM's cache, int64. blocks: int64, the request's blocks."""
        place, size = self.places(positions), self.page_size
        return blocks[self.order[place // size]] * size + place % size
