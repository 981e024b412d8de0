"""Blocks of pages, chosen by the keys that stand for them (InfLLM).

Plain PyTorch on every device, but for the scores of these keys. What stands for a page is found
from its keys alone, so that a page can be shared, or read from a file, whatever queries its tokens
were met by.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels.selection import Selection
from keyhole.kernels.summaries import summary_scores

# Pages whose keys are looked at together: 128 MiB of float32 for 8 heads of 128 numbers.
_PAGES = 2048


def representative_keys(
    key_pages: Tensor, representatives: Tensor, pages: Tensor, filled: Tensor
) -> None:
    """Writes the key that is least like the others of its page, for some pages, in place.

    That is, per KV head, the key farthest from their mean; the earlier one of equals.
    key_pages [P, Hkv, page_size, D]; representatives [P, Hkv, D]; pages int64 [n]; filled int64
    [n]: tokens that each page holds now, >= 1.
    """
    for some, counts in zip(pages.split(_PAGES), filled.split(_PAGES), strict=True):
        keys = key_pages[some.to(key_pages.device)].to(representatives.device)
        place = torch.arange(keys.shape[2], device=keys.device)
        empty = (place >= counts[:, None])[:, None]  # [n, 1, page_size]
        known = keys.float().masked_fill(empty[..., None], 0.0)
        mean = known.sum(2, keepdim=True) / counts[:, None, None, None]
        distance = (known - mean).square().sum(3).masked_fill(empty, -1.0)
        best = distance.argmax(2)[..., None, None].expand(-1, -1, 1, keys.shape[3])
        representatives[some] = keys.gather(2, best).squeeze(2)


def block_scores(
    query: Tensor,
    representatives: Tensor,
    page_table: Tensor,
    pages: Tensor,
    size: int,
    there: Tensor | None = None,
) -> Tensor:
    """Mean of q . k over the representatives k of a block, float32 [B, 1, blocks].

    Summed over all query heads. query [B, Hq, D]; representatives [P, Hkv, D], one per page;
    page_table int32 [B, M]; pages int32 [B]: pages of each sequence; size: pages in a block. there
    bool [B, M]: pages that count, if not all do; a block without any scores -inf.
    """
    scores = summary_scores(query, representatives[:, None], page_table, pages).sum(1)
    real = torch.arange(scores.shape[1], device=scores.device) < pages[:, None]
    real = real if there is None else real & there
    scores = scores.masked_fill(~real, 0.0)  # what is not there may be NaN
    rest = -scores.shape[1] % size
    total = F.pad(scores, (0, rest)).unflatten(1, (-1, size)).sum(2)
    count = F.pad(real, (0, rest)).unflatten(1, (-1, size)).sum(2)
    return torch.where(count > 0, total / count, float("-inf"))[:, None]


def block_pages(blocks: Selection, pages: Tensor, page_size: int) -> Selection:
    """The pages of selected blocks, the newest among them: [B, H, n * pages per block].

    blocks: unit is the tokens of a block. pages int32 [B]: pages of each sequence.
    """
    size = blocks.unit // page_size
    place = torch.arange(size, dtype=torch.int32, device=pages.device)
    indices = (blocks.indices[..., None] * size + place).flatten(2)
    real = (blocks.indices >= 0).repeat_interleave(size, 2) & (indices < pages[:, None, None])
    counts = real.sum(2, dtype=torch.int32)
    return Selection(indices.masked_fill(~real, -1), counts, page_size)
