"""Scores of blocks of keys for blocks of a prompt's queries, by sums along antidiagonals."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels.reference.attention import capped
from keyhole.kernels.reference.pages import gathered
from keyhole.kernels.reference.quantised import dequantised


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
        logits = capped((rows[head] @ keys.T).float() * by, softcap).unflatten(0, (-1, squares))
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
