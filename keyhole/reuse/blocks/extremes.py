"""Blocks judged by a few of their keys instead of by their mean. Ours, not SamKV's.

A question may depend on one distinctive key, which a mean over a block hides. For every block and
KV head one key in eight, the farthest from the mean, is stored; a block's score is the best score
of these keys for any token of the question in any head. Heads score on different scales, so each is
standardised over the document.

Cost: an eighth of the keys stored once more, and of the question's attention to them, per layer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from keyhole.reuse.blocks.statistics import block_means

#: Tokens of a block for each key that is stored of it.
TOKENS_PER_EXTREME = 8

# Numbers at hand while keys are compared with their means, and scores with theirs.
_PIECE = 1 << 22


def extreme_keys(keys: Tensor, block_size: int) -> Tensor:
    """For each block and head the k keys farthest from their mean, [N, k, Hkv, D] of keys' dtype.

    keys: [n, Hkv, D]; the last block may be short. k: block_size / 8, rounded up; the farthest
    first, ties go to the earlier, and again where a block has fewer than k.
    """
    step = block_size * max(1, _PIECE // (block_size * keys[0].numel()))
    return torch.cat([_extremes(piece, block_size) for piece in keys.split(step)])


def _extremes(keys: Tensor, block_size: int) -> Tensor:
    number = math.ceil(block_size / TOKENS_PER_EXTREME)
    missing = -len(keys) % block_size
    blocks = torch.cat([keys, keys[-1:].expand(missing, -1, -1)]).unflatten(0, (-1, block_size))
    far = (blocks.float() - block_means(keys, block_size)[:, None]).square().sum(-1)
    far.flatten(0, 1)[len(keys) :] = -1.0
    order = far.argsort(dim=1, descending=True, stable=True)[:, :number]
    order = torch.where(far.gather(1, order) < 0, order[:, :1], order)
    found: Tensor = blocks.gather(1, order[..., None].expand(-1, -1, -1, keys.shape[-1]))
    return found


def extreme_scores(query: Tensor, keys: Tensor) -> Tensor:
    """The best that any key of a block scores with any token and head, float32 [N].

    query float32 [t, Hq, D]; keys float32 [N, k, Hkv, D], of one document; each KV head faces its
    group of query heads. The score of a token, head and key is <q, k>, less its mean over the N * k
    keys, by the standard deviation (divided by N * k; 0 counts as 1).
    """
    number, each, heads, _ = keys.shape
    # A block's keys far apart: a maximum over neighbours takes longer, as does torch's deviation.
    columns = keys.permute(2, 3, 1, 0).flatten(2)
    found = torch.full((number,), -torch.inf)
    for part in query.split(max(1, _PIECE // (query.shape[1] * columns.shape[-1]))):
        grouped = part.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2)
        scores = (grouped @ columns).flatten(0, 1)
        scores -= scores.mean(1, keepdim=True)
        spread = torch.linalg.vector_norm(scores, dim=1, keepdim=True) / math.sqrt(scores.shape[1])
        highest = scores.unflatten(1, (each, number)).amax(1)
        found = torch.maximum(found, (highest / torch.where(spread > 0, spread, 1.0)).amax(0))
    return found
