"""The scores by which a model's own indexer selects tokens (DeepSeek sparse attention)."""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.kernels.reference.pages import gathered

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
