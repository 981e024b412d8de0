"""Scores of a document's blocks for a query, and the share of blocks to keep.

SamKV, section 3, equations 1 to 3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity


def personal_queries(query: Tensor, local: Tensor) -> Tensor:
    """Each document's query: the question's, plus a bias from the other documents (eq. 1).

    query float32 [Hq, D]; local float32 [n, Hq, D], mean query of each document's local blocks.
    Returns [n, Hq, D]: query + 1 / (n - 1) * sum over j != i of |cos(query, local_j)| local_j, with
    cos over all heads flattened. One document: the question's alone.
    Several queries [t, Hq, D] give [n, t, Hq, D]: to each the same is added, by their mean's cos.
    """
    number = len(local)
    if number == 1:
        return query[None].clone()
    mean = query if query.ndim == local.ndim - 1 else query.mean(0)
    weight = cosine_similarity(mean.flatten()[None], local.flatten(1)).abs()
    weighted = weight[:, None, None] * local
    # In float64, so that subtracting a document's own term from the sum leaves no residue.
    total = weighted.sum(0, dtype=torch.float64)
    added = ((total - weighted) / (number - 1)).float()
    return query + (added if mean is query else added[:, None])


def key_scores(query: Tensor, keys: Tensor) -> Tensor:
    """<Q, K> of a query [Hq, D] and each of the keys [N, Hkv, D], float32 [N].

    Each KV head faces its group of query heads.
    """
    # <q1, k> + <q2, k> = <q1 + q2, k>
    grouped = query.unflatten(0, (keys.shape[1], -1)).sum(1)
    scores: Tensor = keys.flatten(1) @ grouped.flatten()
    return scores


def share(scores: Tensor, alpha: Tensor, received: Tensor, ends: Tensor) -> Tensor:
    """The share of its middle blocks that a document offers, per layer, float64 [L] (eq. 2).

    scores, alpha, received float32 [L, N], of the document's blocks; ends bool [N]: initial and
    local blocks, at least one; the others are its middle, at least one.
    (max - anchor) / (max - min) if min < anchor <= max, else 0: anchor is the score of the mean of
    the ends' mean keys, max that of the middle block of smallest alpha, min that of the one that
    receives least; ties go to the earlier.
    """
    scores, middle = scores.double(), ~ends
    anchor = scores[:, ends].mean(1)  # the product is linear: the mean's score is the mean score
    scores, alpha, received = scores[:, middle], alpha[:, middle], received[:, middle]
    highest = scores.gather(1, alpha.argmin(1, keepdim=True)).squeeze(1)
    lowest = scores.gather(1, received.argmin(1, keepdim=True)).squeeze(1)
    between = (lowest < anchor) & (anchor <= highest)
    whole = torch.where(between, highest - lowest, 1.0)
    return torch.where(between, (highest - anchor) / whole, 0.0)
