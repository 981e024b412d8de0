"""The tokens of a prompt over everything before them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels.reference.pages import gathered
from keyhole.kernels.reference.softmax import capped, in_groups, softmax

#: The explicit path holds at most this many scores at once (256 MiB in float32).
MAX_SCORES = 1 << 26


def prefill(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    start: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of one sequence's tokens start .. start + T - 1 over its pages.

    query [T, Hq, D]; pages int64 [M], the sequence's pages in order, that hold start + T tokens.
    window, softcap, sinks as in `attend`. Returns [T, Hq, Dv] in query's dtype.
    """
    page_size, num_kv_heads = key_pages.shape[2], key_pages.shape[1]
    end = start + query.shape[0]
    skipped = 0 if window is None else max(0, start - window + 1) // page_size
    pages = pages[skipped : -(-end // page_size)]
    first = skipped * page_size
    key, value = (
        gathered(x, (pages,), query.device).transpose(0, 1).flatten(1, 2)[:, : end - first]
        for x in (key_pages, value_pages)
    )
    grouped = in_groups(query, num_kv_heads).permute(1, 2, 0, 3)  # [Hkv, G, T, D]
    position = torch.arange(first, end, device=query.device)
    row = torch.arange(start, end, device=query.device)[:, None]
    seen = position <= row if window is None else (position <= row) & (position > row - window)
    if softcap is None and sinks is None:
        # The query heads of a group are folded into one row, so that no key is copied per head.
        folded = grouped.flatten(1, 2)[None]
        mask = seen.repeat(grouped.shape[1], 1)
        out = F.scaled_dot_product_attention(
            folded, key[None], value[None], attn_mask=mask, scale=scale
        )
        out = out.view(*grouped.shape[:3], -1)
    else:
        rows = max(1, MAX_SCORES // (query.shape[1] * (end - first)))
        blocks = zip(grouped.split(rows, 2), seen.split(rows), strict=True)
        out = torch.cat(
            [
                attend_block(block, key, value, mask, scale, softcap, sinks).to(query.dtype)
                for block, mask in blocks
            ],
            2,
        )
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Explicit attention of [Hkv, G, T, D] over [Hkv, n, D] where `seen` [T, n]; float32."""
    scores = capped((query.float() @ key.float().transpose(-1, -2)[:, None]) * scale, softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sinks = sinks.repeat_interleave(seen.shape[0])  # one "head" per (head, row)
    weights = softmax(scores.flatten(1, 2)[None], sinks)[0].view_as(scores)
    return weights @ value.float()[:, None]
