"""Scores of blocks and of tokens: blocks of pages by the tokens that later queries attend to most
(InfLLM), pooled keys of pages (SeerAttention-R), blocks of a prompt by sums along antidiagonals
(XAttention), and tokens by a model's own indexer (DeepSeek sparse attention).

Plain PyTorch on every device, except for the scores of InfLLM's blocks. The attention that a token
received is a sum over many queries, stored as two numbers of the keys' dtype: the second holds the
rounding error of the first.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels import reference
from keyhole.kernels.cpu import product
from keyhole.kernels.operations import summary_scores
from keyhole.kernels.reference.attention import capped, softmax
from keyhole.kernels.reference.pages import gathered
from keyhole.kernels.reference.quantised import dequantised
from keyhole.kernels.selection import Selection

# Queries of a prompt that are processed together: each sees a window of keys; together they see one
# window plus this many keys.
_QUERIES = 128

# Blocks whose keys are processed together: 64 MiB of float32 for 64 tokens of 8 heads of 128.
_BLOCKS = 256
# The same of pages of 16 tokens.
_PAGES = 1024


def add_received(
    query: Tensor,
    key_pages: Tensor,
    received: Tensor,
    page_table: Tensor,
    starts: Tensor,
    first: Tensor,
    *,
    window: int,
    init: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Adds the attention that tokens receive from later queries, per query head, in place.

    The weights of token i's query are added to the tokens of its window, i - window < j <= i: the
    softmax over these and the first `init` tokens, and the model's own sinks.
    query [B, T, Hq, D], of T consecutive tokens from starts, int64 [B]; key_pages
    [P, Hkv, page_size, D]; received [P, 2, Hq, page_size]; page_table int64 [B, M]. The stored
    values of tokens from starts on are ignored: they have received nothing yet. Tokens before
    first, int64 [B], are complete and do not change. scale, softcap, sinks: as in `attend`.
    """
    for begin in range(0, query.shape[1], _QUERIES):
        some = query[:, begin : begin + _QUERIES]
        count, new = some.shape[1], starts + begin
        # The window of the first query and what follows it; where a sequence begins later than the
        # window, indices past the newest token repeat that token.
        base = (new - (window - 1)).clamp(min=0)
        entry = torch.arange(window - 1 + count, device=query.device)
        token = entry.expand(len(base), -1).minimum((new + count - 1 - base)[:, None])
        position = base[:, None] + token
        at = new[:, None] + torch.arange(count, device=query.device)
        seen = (position[:, None] <= at[..., None]) & (position[:, None] > at[..., None] - window)
        seen &= (token == entry)[:, None]  # [B, count, n]
        start = torch.arange(init, device=query.device).expand(len(base), -1)
        before = start[:, None] <= at[..., None] - window
        keys = _keys_at(key_pages, page_table, torch.cat((start, position), 1))
        logits = _logits(some, keys, scale, softcap)  # [B, Hq, count, init + n]
        mask = torch.cat((before, seen), 2)[:, None]
        column = None if sinks is None else sinks.repeat_interleave(count)  # one per head and token
        weights = softmax(logits.masked_fill(~mask, -math.inf), column)[..., init:].sum(2)
        gained = weights.gather(2, token[:, None].expand_as(weights)).transpose(1, 2)  # [B, n, Hq]
        page, place = _where(page_table, position, received.shape[3])
        old = received[page, :, :, place]  # [B, n, 2, Hq]
        known = old.float().sum(2).masked_fill((position >= new[:, None])[..., None], 0.0)
        total = torch.stack(_in_two(known + gained, old.dtype), 2)
        complete = (position < first[:, None])[..., None, None]
        received[page, :, :, place] = torch.where(complete, old, total)


def represent_blocks(
    key_pages: Tensor,
    received: Tensor,
    representatives: Tensor,
    pages: Tensor,
    real: Tensor,
    count: int,
) -> None:
    """Writes each block's mean over the `count` keys that received most, per query head, in place.

    Ties go to the earlier token. key_pages [P, Hkv, page_size, D] and received [P, 2, Hq,
    page_size] as `add_received` left them; representatives [P, Hq, D], written at the first page of
    a block; pages int64 [n, b]: the full pages of each block. Blocks where real, bool [n], is False
    do not change.
    """
    heads = key_pages.shape[1]
    for some, there in zip(pages.split(_BLOCKS), real.split(_BLOCKS), strict=True):
        keys = reference.gathered(key_pages, (some,), representatives.device)
        keys = reference.dequantised(keys)
        keys = keys.transpose(1, 2).flatten(2, 3)  # [n, Hkv, b * page_size, D]
        sums = received[some].float().sum(2).transpose(1, 2).flatten(2)  # [n, Hq, b * page_size]
        best = sums.sort(dim=-1, descending=True, stable=True).indices[..., :count]
        best = best.unflatten(1, (heads, -1)).flatten(2)[..., None]  # [n, Hkv, G * count, 1]
        chosen = keys.gather(2, best.expand(-1, -1, -1, keys.shape[3])).float()
        means = chosen.unflatten(2, (-1, min(count, keys.shape[2]))).mean(3).flatten(1, 2)
        old = representatives[some[:, 0]]
        new = means.to(old.dtype)
        representatives[some[:, 0]] = torch.where(there[:, None, None], new, old)


def pool_keys(key_pages: Tensor, pooled: Tensor, pages: Tensor, filled: Tensor) -> None:
    """Writes the pooled keys of some pages, in place: largest, smallest and mean numbers.

    key_pages [P, Hkv, page_size, D]; pooled [P, Hkv, 3 D], these three one after the other; pages
    int64 [n]; filled int64 [n]: tokens that each page holds now, >= 1.
    """
    for some, tokens in zip(pages.split(_PAGES), filled.split(_PAGES), strict=True):
        keys = reference.gathered(key_pages, (some,), pooled.device)
        keys = reference.dequantised(keys).float()
        place = torch.arange(keys.shape[2], device=keys.device)
        empty = (place >= tokens[:, None])[:, None, :, None]
        high = keys.masked_fill(empty, -math.inf).amax(2)
        low = keys.masked_fill(empty, math.inf).amin(2)
        mean = keys.masked_fill(empty, 0.0).sum(2) / tokens[:, None, None]
        pooled[some] = torch.cat((high, low, mean), 2).to(pooled.dtype)


def block_scores(query: Tensor, representatives: Tensor, table: Tensor, valid: Tensor) -> Tensor:
    """The sum over query heads of q . k for the representative k of a block, float32 [B, 1, n].

    query [B, Hq, D]; representatives [P, Hq, D]; table int32 [B, n]: the first page of each block;
    valid int32 [B]: scores of later blocks are undefined.
    """
    return summary_scores(query, representatives[:, None], table, valid).sum(1, keepdim=True)


def between_ends(
    blocks: Selection, pages: Tensor, page_size: int, ends: tuple[int, int]
) -> Selection:
    """The first and last pages of sequences, and the pages of selected blocks between them.

    blocks: [B, 1, n], whose unit is the tokens of a block; the first block follows the ends[0]
    first pages, the last one may reach into the ends[1] last ones. pages int32 [B].
    """
    size = blocks.unit // page_size
    device, count = pages.device, pages[:, None]
    place = torch.arange(size, dtype=torch.int32, device=device)
    middle = ends[0] + (blocks.indices[:, 0, :, None] * size + place).flatten(1)
    there = (blocks.indices[:, 0] >= 0).repeat_interleave(size, 1) & (middle < count - ends[1])
    first = torch.arange(ends[0], dtype=torch.int32, device=device).expand(len(pages), -1)
    last = count - ends[1] + torch.arange(ends[1], dtype=torch.int32, device=device)
    real = torch.cat((first < count, there, last >= ends[0]), 1)
    nowhere = torch.iinfo(torch.int32).max
    indices = torch.cat((first, middle, last), 1).masked_fill(~real, nowhere).sort(1).values
    indices = indices.masked_fill(indices == nowhere, -1)
    return Selection(indices[:, None], real.sum(1, dtype=torch.int32)[:, None], page_size)


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


def _where(page_table: Tensor, position: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Physical page and offset of each token, int64 [B, n]; the last page beyond the table."""
    entry = (position // size).clamp(max=page_table.shape[1] - 1)
    return page_table.gather(1, entry), position % size


def _keys_at(key_pages: Tensor, page_table: Tensor, position: Tensor) -> Tensor:
    """Keys of tokens, float32 [B, Hkv, n, D]."""
    page, place = _where(page_table, position, key_pages.shape[2])
    device = key_pages.device
    keys = key_pages[page.to(device), :, place.to(device)]  # [B, n, Hkv, D]
    return reference.dequantised(keys.to(position.device)).transpose(1, 2).float()


def _logits(query: Tensor, keys: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Query [B, T, Hq, D], keys [B, Hkv, n, D]: float32 [B, Hq, T, n]."""
    grouped = query.float().transpose(1, 2).unflatten(1, (keys.shape[1], -1))  # [B, Hkv, G, T, D]
    logits = (grouped @ keys[:, :, None].transpose(-1, -2)).flatten(1, 2) * scale
    return capped(logits, softcap)


def _in_two(numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Splits each number into the sum of two numbers of a shorter dtype."""
    first = numbers.to(dtype)
    return first, (numbers - first.float()).to(dtype)


def antidiagonal_scores(
    query: Tensor,
    key_pages: Tensor,
    pages: Tensor,
    start: int,
    *,
    block_size: int,
    stride: int,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """XAttention's estimate of the weight of each block of keys, float32 [R, Hq, C].

    Positions are cut into squares of `stride` queries by `stride` keys. A square's score is the
    mean of q . k along its antidiagonal, where the i-th last query meets the i-th key; the softmax
    runs over the squares of a row, up to the one on the diagonal. A block's score is the sum over
    its squares (arXiv 2503.16428, section 2.1 and algorithm 1).

    query [T, Hq, D], the tokens start .. start + T - 1 of a sequence; key_pages [P, Hkv, page_size,
    D], these tokens included; pages int64 [M]. block_size: in tokens, a multiple of `stride`.
    R blocks of positions that the queries are in, and C = ceil((start + T) / block_size) blocks of
    keys; entries after the diagonal are 0. Where the queries begin or end inside a square, its
    score is the mean over the queries that are there.
    """
    (num_tokens, _, dim), end = query.shape, start + len(query)
    size, num_kv_heads = key_pages.shape[2], key_pages.shape[1]
    per_block = block_size // stride
    first = start // block_size * block_size
    num_rows, num_columns = -(-(end - first) // block_size), -(-end // block_size)
    # Queries in whole squares, with zeros before the first and after the last query.
    lead = start % stride
    squares = -(-(lead + num_tokens) // stride)
    padded = F.pad(query.transpose(0, 1), (0, 0, lead, squares * stride - lead - num_tokens))
    rows = padded.view(num_kv_heads, -1, squares, stride, dim).flip(3).flatten(3).flatten(1, 2)
    there = torch.full((squares,), stride, device=query.device)
    there[0] -= lead
    there[-1] -= squares * stride - lead - num_tokens
    by = (scale / there).repeat(rows.shape[1] // squares)[:, None]
    # Squares of keys, and the first of the squares of queries among them.
    num_keys, own = -(-end // stride), start // stride
    later = torch.ones(squares, squares, dtype=torch.bool, device=query.device).triu(1)
    before = (start - first) // stride
    scores = []
    for head in range(num_kv_heads):  # one at a time: the scores of all would take much memory
        keys = gathered(key_pages[:, head], (pages[: -(-end // size)],), query.device)
        keys = dequantised(keys).to(query.dtype).flatten(0, 1)[:end]
        keys = F.pad(keys, (0, 0, 0, num_keys * stride - end)).view(num_keys, -1)
        logits = capped(product(rows[head], keys.T).float() * by, softcap)
        logits = logits.unflatten(0, (-1, squares))
        logits[..., own:].masked_fill_(later, float("-inf"))
        weights = F.pad(
            logits.softmax(-1),
            (
                *(0, num_columns * per_block - num_keys),
                *(before, num_rows * per_block - before - squares),
            ),
        )
        shape = (-1, num_rows, per_block, num_columns, per_block)
        scores.append(weights.view(shape).sum((2, 4)))
    return torch.cat(scores).transpose(0, 1).contiguous()


#: Products of queries and keys that are in memory at once: 64 MB of float32.
_PRODUCTS = 1 << 24


def index_scores(query: Tensor, weights: Tensor, key_pages: Tensor, page_table: Tensor) -> Tensor:
    """The score of each token for each query: sum over heads of w ReLU(q . k); float32 [B, T, N].

    DeepSeek-V3.2 (arXiv 2512.02556, section 2.1, eq. 1). query [B, T, H, D]; weights float32
    [B, T, H], the scale included; key_pages [P, 1, page_size, D], in query's dtype; page_table int
    [B, M]. N = M * page_size; entries past the sequence have scores of no meaning.
    """
    size, (num_rows, num_queries, heads, _) = key_pages.shape[2], query.shape
    rows = query.float().flatten(1, 2)
    pages = max(1, _PRODUCTS // (rows.shape[0] * rows.shape[1] * size))
    parts = []
    for some in page_table.long().split(pages, 1):
        keys = gathered(key_pages[:, 0], (some,), query.device).float().flatten(1, 2)
        products = (rows @ keys.mT).relu_().view(num_rows, num_queries, heads, -1)
        parts.append((weights[..., None, :] @ products)[..., 0, :])
    return torch.cat(parts, -1)
