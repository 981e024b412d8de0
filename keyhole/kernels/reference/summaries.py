"""Scores of page summaries, of parts of pages, or of clusters of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.kernels.reference.softmax import in_groups


def summary_scores(query: Tensor, summaries: Tensor, page_table: Tensor, valid: Tensor) -> Tensor:
    """Products q . s for the vectors s of a sequence's pages in order, float32 [B, Hq, M * n].

    query [B, Hq, D]; summaries [P, n, Hkv, D], n of each page; page_table int32 [B, M]; valid int32
    [B]: later entries are undefined.
    """
    heads, dim = summaries.shape[2:]
    # Taking rows of a matrix is several times as fast as indexing.
    rows = summaries.flatten(1).index_select(0, page_table.flatten())
    vectors = rows.view(len(query), -1, heads, dim).transpose(1, 2).float()  # [B, Hkv, M * n, D]
    return (in_groups(query.float(), heads) @ vectors.transpose(-1, -2)).flatten(1, 2)


def spread_scores(
    scores: Tensor, numbers: Tensor, page_table: Tensor, first: int, ends: Tensor
) -> Tensor:
    """The score of each token's page or cluster, float32 [B, H, M * page_size].

    scores float32 [B, H, n]; numbers [P, H, page_size], each token's index into `scores`, int16 or
    int32; page_table int32 [B, M]; ends int32 [B]: tokens before `first` and from `ends` on belong
    to no entry; their numbers are ignored and their scores are infinite.
    """
    _, heads, size = numbers.shape
    rows = numbers.flatten(1).index_select(0, page_table.flatten())
    of_token = rows.view(len(scores), -1, heads, size).transpose(1, 2).flatten(2).long()
    place = torch.arange(of_token.shape[2], device=of_token.device)
    loose = ((place < first) | (place >= ends[:, None]))[:, None]
    spread: Tensor = scores.gather(2, of_token.masked_fill(loose, 0))
    return spread.masked_fill(loose, float("inf"))
