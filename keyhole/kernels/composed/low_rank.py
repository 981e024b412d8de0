"""Chunks of keys and low-rank keys, which attention reconstructs (ShadowKV, arXiv 2410.21465).

Plain PyTorch; on a CPU our C++ extension computes the attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels import cpu, cpu_attention, reference
from keyhole.kernels.operations import attend, operation, shift_rope, summary_scores
from keyhole.kernels.selection import LowRank, PagedQuery, Selection

# Chunks of keys: their landmarks, which of them are outliers, and scores (ShadowKV).
#
# Plain PyTorch on every device, except for the products with landmarks.


# Pages whose keys are processed together: 128 MiB of float32 for 8 heads of 128 numbers.
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
        keys = reference.gathered(key_pages, (some,), landmarks.device)
        keys = reference.dequantised(keys)
        place = torch.arange(keys.shape[2], device=keys.device)
        real = (place < tokens[:, None])[:, None, :, None]
        # [n, Hkv, chunks, chunk_size, D]
        known = keys.float().masked_fill(~real, 0.0).unflatten(2, (count, -1))
        real = real.unflatten(2, (count, -1))
        mean = known.sum(3) / real.sum(3).clamp(min=1)
        cosine = F.cosine_similarity(known, mean[..., None, :], dim=-1)
        # One token is its own mean, whatever its cosine is rounded to.
        fits = ~real[..., 0] | (real.sum(3) == 1)
        cosine = cosine.masked_fill(fits, 1.0).amin(3)
        landmarks[some] = mean.transpose(1, 2).to(landmarks.dtype)
        cosines[some] = cosine.transpose(1, 2).to(cosines.dtype)


def outlier_chunks(cosines: Tensor, pages: Tensor, chunks: tuple[int, int], count: int) -> Tensor:
    """The chunks before chunks[0], and the ones up to chunks[1] whose means fit worst.

    cosines as in `chunk_landmarks`; pages int64 [M], the sequence's pages. Returns int32
    [Hkv, chunks[0] + count], padded with -1. Ties go to the earlier chunk.
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

    Each head's softmax covers the chunks that are neither in `taken` nor among the last `local`
    ones; the result is the largest weight of each group of query heads. query [B, Hq, D]; landmarks
    as in `chunk_landmarks`; page_table int32 [B, M]; taken int32 [B, Hkv, n], padded with -1;
    chunks int32 [B], the number of chunks of each sequence; C = M * chunks of a page. Entries from
    chunks - local on are undefined.
    """
    heads = landmarks.shape[2]
    products = summary_scores(query, landmarks, page_table, chunks).unflatten(1, (heads, -1))
    listed = reference.members(taken, products.shape[3])
    place = torch.arange(products.shape[3], device=query.device)
    out = listed | (place >= (chunks - local)[:, None, None])
    products = products.div_(math.sqrt(query.shape[-1])).masked_fill_(out[:, :, None], -math.inf)
    # Where every chunk is excluded the softmax has no entries.
    weights: Tensor = products.softmax(-1).amax(2).nan_to_num_(0.0)
    return weights.masked_fill_(listed, math.inf)


# Keys in float64 at a time: 64 MiB for keys of 1024 numbers.
_ROWS = 8192


def truncated_svd(keys: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation of keys [n, d] by `rank` numbers each: K ~ coefficients @ basis.

    Coefficients float32 [n, rank] and basis [rank, d], rank <= d: U S and V^T of the truncated
    singular value decomposition. V is computed from the d x d matrix K^T K, since n is much larger
    than d.
    """
    keys = keys.float()
    # float64, as squaring halves the precision; eigenvalues ascend: the last columns are the
    # largest.
    squares = sum(part.T.double() @ part.double() for part in keys.split(_ROWS))
    basis = torch.linalg.eigh(squares).eigenvectors[:, -rank:].flip(1).T.float()
    return keys @ basis.T, basis


def decompose(
    key_pages: Tensor,
    coefficients: Tensor,
    pages: Tensor,
    length: int,
    rotation: Rotation,
) -> Tensor:
    """Decomposes the first `length` keys of a sequence, before RoPE, into low-rank keys.

    key_pages [P, Hkv, page_size, D], coefficients [P, page_size, rank], written in place; pages
    int64 [M], the sequence's pages in order. Returns the basis, float32 [rank, Hkv, D].
    """
    size, token = coefficients.shape[1], torch.arange(length, device=pages.device)
    keys = rotation.shift(reference.gather_tokens(key_pages, pages, token), -token[:, None])
    numbers, basis = truncated_svd(keys.flatten(1), coefficients.shape[2])
    coefficients[pages[token // size], token % size] = numbers.to(coefficients.dtype)
    return basis.view(-1, *keys.shape[1:])


@partial(operation, on_cpu=cpu_attention.attend_low_rank, takes=cpu.takes_floats)
def attend_low_rank(
    paged: PagedQuery,
    *,
    selection: Selection,
    low_rank: LowRank,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` over selected tokens, some of whose keys are low-rank keys, [B, Hq, Dv].

    selection: tokens, a list per KV head or one for all. The rest as in `attend`.
    """
    query, key_pages, value_pages, page_table, lengths = paged
    heads = key_pages.shape[1]
    indices = selection.indices.expand(-1, heads, -1)
    tokens = indices.clamp(min=0)
    shared = low_rank.coefficients[:, None].expand(-1, heads, -1, -1)
    keys = _gathered(shared, page_table, tokens) @ low_rank.basis.transpose(1, 2)
    if low_rank.frequencies is not None:
        keys = shift_rope(keys, tokens.long(), low_rank.frequencies, low_rank.last)
    chunks = page_table.shape[1] * key_pages.shape[2] // low_rank.chunk
    listed = reference.members(low_rank.taken, chunks).gather(2, tokens.long() // low_rank.chunk)
    own = listed | (tokens >= low_rank.first[:, None, None])
    # 8-bit keys and values are float32 here, as a sequence that reads everything must be exact.
    full = reference.dequantised(_gathered(key_pages, page_table, tokens))
    keys = full.where(own[..., None], keys.to(full.dtype))
    values = reference.dequantised(_gathered(value_pages, page_table, tokens))
    # The gathered tokens, in the order of the selection, as one page per sequence.
    place = torch.arange(indices.shape[2], dtype=torch.int32, device=indices.device)
    places = place.expand_as(indices).masked_fill(indices < 0, -1).contiguous()
    table = torch.arange(len(query), dtype=torch.int32, device=indices.device)[:, None]
    counts = torch.full_like(lengths, indices.shape[2])
    gathered = PagedQuery(query.to(keys.dtype), keys, values, table, counts)
    chosen = Selection(places, selection.counts.expand(-1, heads).contiguous(), 1)
    out = attend(gathered, selection=chosen, scale=scale, softcap=softcap, sinks=sinks)
    return out.to(query.dtype)


def _gathered(pages_of: Tensor, page_table: Tensor, tokens: Tensor) -> Tensor:
    """Keys or values of tokens [B, Hkv, n], a copy [B, Hkv, n, D].

    pages_of [P, Hkv, page_size, D]; page_table int32 [B, M]. Indexing one flattened dimension is
    several times as fast as indexing three.
    """
    _, heads, size, dim = pages_of.shape
    *steps, inner = pages_of.stride()
    # Rows may overlap: a page's values follow its keys, and MLA's values are a part of the keys.
    step = max(1, math.gcd(*steps))
    page_step, head_step, token_step = (one // step for one in steps)
    count = (len(pages_of) - 1) * page_step + (heads - 1) * head_step + (size - 1) * token_step + 1
    lines = pages_of.as_strided((count, dim), (step, inner))
    page = page_table.long()[:, None].expand(-1, heads, -1).gather(2, (tokens // size).long())
    head = torch.arange(heads, device=tokens.device)[:, None] * head_step
    numbers = page * page_step + head + tokens % size * token_step
    return lines.index_select(0, numbers.flatten()).view(*tokens.shape, -1)


@dataclass(frozen=True, eq=False)
class Rotation:
    """How keys of a layer shift: frequencies and last as in `shift_rope`; None: they do not."""

    frequencies: Tensor | None
    last: bool = False

    def shift(self, x: Tensor, by: Tensor) -> Tensor:
        """Keys [..., D], rotated at any positions p, as they are at p + by, int64."""
        if self.frequencies is None:
            return x
        return shift_rope(x, by, self.frequencies, self.last)
