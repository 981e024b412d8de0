"""Where the tokens of a prompt lie in a request's pages, in one layer.

Without gaps a token lies at its position, as vLLM puts it. A layer that keeps some tokens only has
these side by side in the first pages, so that attention can read them as a list of whole pages; the
rest of the list begins with the page of the question's first token, where vLLM writes what follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """The tokens that one layer reads, in order.

    order: int64 [n], the request's pages, counted from 0, in reading order. index: int64 [end], of
    each token before the question its place among those that are kept, or -1. count: these.
    page_size: tokens of a page.
    """

    order: Tensor
    index: Tensor
    count: int
    page_size: int

    @classmethod
    def whole(cls, end: int, num_pages: int, page_size: int) -> Self:
        """All tokens, where vLLM puts them."""
        return cls(torch.arange(num_pages), torch.arange(end), end, page_size)

    @classmethod
    def of(cls, kept: Tensor, num_pages: int, page_size: int, *, scratch: bool = False) -> Self:
        """The kept tokens, bool [end], of a prompt; `end - kept` is a multiple of the page size.

        scratch: the question is read before its own pages are there: past the first of them it is
        written into the pages between, which no kept token needs.
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
        """The place of each token in reading order, int64; those of the question follow."""
        end = len(self.index)
        before = self.index[positions.clamp(max=end - 1)]
        return torch.where(positions < end, before, self.count + positions - end)

    def slots(self, positions: Tensor, blocks: Tensor) -> Tensor:
        """Slots in vLLM's cache, int64. blocks: int64, the request's blocks."""
        place, size = self.places(positions), self.page_size
        return blocks[self.order[place // size]] * size + place % size
