"""Chunks of keys: their landmarks, which of them are outliers, and scores (ShadowKV).

Plain PyTorch on every device, but for the products with landmarks.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels import reference
from keyhole.kernels.composite.summaries import summary_scores

# Pages whose keys are looked at together: 128 MiB of float32 for 8 heads of 128 numbers.
_PAGES = 2048


def chunk_landmarks(
    key_pages: Tensor, landmarks: Tensor, cosines: Tensor, pages: Tensor, filled: Tensor
) -> None:
    """Writes the mean key of every chunk of some pages, and how far its keys are from it, in place.

    key_pages [P, Hkv, page_size, D]; landmarks [P, chunks, Hkv, D]; cosines [P, chunks, Hkv]: the
    smallest cosine of a chunk's key with the mean; pages int64 [n]; filled int64 [n]: tokens that
    each page holds now, >= 1. Chunks without a token get 0.
    """
    count = landmarks.shape[1]
    for some, tokens in zip(pages.split(_PAGES), filled.split(_PAGES), strict=True):
        keys = key_pages[some.to(key_pages.device)].to(landmarks.device)
        place = torch.arange(keys.shape[2], device=keys.device)
        real = (place < tokens[:, None])[:, None, :, None]
        # [n, Hkv, chunks, chunk_size, D]
        known = keys.float().masked_fill(~real, 0.0).unflatten(2, (count, -1))
        real = real.unflatten(2, (count, -1))
        mean = known.sum(3) / real.sum(3).clamp(min=1)
        cosine = F.cosine_similarity(known, mean[..., None, :], dim=-1)
        cosine = cosine.masked_fill(~real[..., 0], 1.0).amin(3)
        landmarks[some] = mean.transpose(1, 2).to(landmarks.dtype)
        cosines[some] = cosine.transpose(1, 2).to(cosines.dtype)


def outlier_chunks(cosines: Tensor, pages: Tensor, chunks: tuple[int, int], count: int) -> Tensor:
    """The chunks before chunks[0], and of those up to chunks[1] the ones that means fit worst.

    cosines as in `chunk_landmarks`; pages int64 [M], the sequence's pages. Returns int32
    [Hkv, chunks[0] + count], padded with -1; the earlier one of equals.
    """
    found = cosines[pages].flatten(0, 1)[slice(*chunks)].float().T  # [Hkv, chunks]
    worst = found.sort(dim=-1, stable=True).indices[:, :count] + chunks[0]
    first = torch.arange(chunks[0], device=worst.device).expand(len(worst), -1)
    worst, count = torch.cat((first, worst), 1), chunks[0] + count
    return F.pad(worst, (0, count - worst.shape[1]), value=-1).to(torch.int32)


def chunk_scores(
    query: Tensor, landmarks: Tensor, page_table: Tensor, taken: Tensor, chunks: Tensor, local: int
) -> Tensor:
    """A query's weight on the landmark of every chunk, float32 [B, Hkv, C]; infinite for `taken`.

    The softmax of each head goes over the chunks that are neither in `taken` nor the last `local`
    ones; of a group of query heads the largest counts. query [B, Hq, D]; landmarks as in
    `chunk_landmarks`; page_table int32 [B, M]; taken int32 [B, Hkv, n], padded with -1; chunks
    int32 [B], those that each sequence has; C = M * chunks of a page. Entries from chunks - local
    on mean nothing.
    """
    heads = landmarks.shape[2]
    products = summary_scores(query, landmarks, page_table, chunks).unflatten(1, (heads, -1))
    listed = reference.members(taken, products.shape[3])
    place = torch.arange(products.shape[3], device=query.device)
    out = listed | (place >= (chunks - local)[:, None, None])
    products = products.div_(math.sqrt(query.shape[-1])).masked_fill_(out[:, :, None], -math.inf)
    # Where every chunk is out there is nothing to weigh.
    weights: Tensor = products.softmax(-1).amax(2).nan_to_num_(0.0)
    return weights.masked_fill_(listed, math.inf)
