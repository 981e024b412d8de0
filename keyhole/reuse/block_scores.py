"""Blocks of stored documents: their tokens, scores for a query, outliers, and which to keep.

SamKV, section 3, equations 1 to 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from keyhole.documents.record import LayerStatistics
from keyhole.reuse.base import PlacedDocument, rounded_up
from keyhole.reuse.block_statistics import block_means


@dataclass(frozen=True, eq=False)
class Blocks:
    """All blocks of all documents in a row, M of them.

    documents: int64 [M], the document (from 0) of each block. sizes: int64 [M], its tokens.
    edges: where each document's blocks begin, and at the end M.
    """

    documents: Tensor
    sizes: Tensor
    edges: tuple[int, ...]

    @classmethod
    def of(cls, documents: Sequence[PlacedDocument]) -> Blocks:
        """The blocks of these documents."""
        edges, sizes = [0], []
        for document in documents:
            edges.append(edges[-1] + document.num_blocks)
            sizes += [document.block_size] * document.num_blocks
            sizes[-1] = document.length - (document.num_blocks - 1) * document.block_size
        owners = torch.arange(len(documents)).repeat_interleave(torch.tensor(edges).diff())
        return cls(owners, torch.tensor(sizes), tuple(edges))

    @property
    def slices(self) -> list[slice]:
        """Of each document, where its blocks are."""
        return [slice(*pair) for pair in pairwise(self.edges)]

    def ends(self, first: int, last: int) -> Tensor:
        """The first and last blocks of every document, bool [M]; all of a short document."""
        ends = torch.zeros(len(self.sizes), dtype=torch.bool)
        for own in self.slices:
            ends[own][:first] = True
            ends[own][max(0, own.stop - own.start - last) :] = True
        return ends

    def tokens(self, blocks: Tensor) -> Tensor:
        """The tokens of blocks bool [..., M], bool [..., T]."""
        return blocks.repeat_interleave(self.sizes, dim=-1)


def gather(
    documents: Sequence[PlacedDocument], fact: Callable[[LayerStatistics], Tensor]
) -> list[Tensor]:
    """Per layer a statistic [N, ...] of each document, concatenated to [M, ...]."""
    layers = range(len(documents[0].layers))
    return [torch.cat([fact(document.layers[n]) for document in documents]) for n in layers]


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


def moved(
    documents: Sequence[PlacedDocument], layer: int, queries: Tensor, *, back: bool
) -> Tensor:
    """Queries [n, ..., Hq, D], one entry per document, rotated from the document's positions to
    those in the prompt, or back.

    <rotated q, rotated k> depends on the distance alone, so that a query that is rotated back
    scores the stored keys as they are: one query is rotated instead of the keys of every block.
    """
    shift = documents[0].shift
    if shift is None:
        return queries
    by = torch.tensor([-own.offset if back else own.offset for own in documents])
    return shift(layer, queries, by.view(-1, *[1] * (queries.ndim - 2)))


def key_scores(queries: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """<Q, K> of each document's query and each of its keys, in a row, float32 [M].

    queries float32 [n, Hq, D]; keys [N, Hkv, D] of each of the n documents. Each KV head faces its
    group of query heads.
    """
    # <q1, k> + <q2, k> = <q1 + q2, k>
    grouped = queries.unflatten(1, (keys[0].shape[1], -1)).sum(2).flatten(1)
    each = zip(keys, grouped, strict=True)  # not joined first: that would copy all keys
    return torch.cat([own.float().flatten(1) @ query for own, query in each])


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


def outliers(alpha: Tensor, sigmas: float = 3.0) -> Tensor:
    """Where alpha is an outlier by the PauTa criterion: alpha < mean - sigmas std, bool [..., N].

    alpha [..., N], of the middle blocks of a document and layer; smaller is more important. Mean
    and standard deviation (divided by n) are over the finite ones; an infinite one is not an
    outlier: `only_middle` makes those of the ends infinite. One of n numbers is at most sqrt(n - 1)
    deviations from their mean, so that with 3 sigmas an outlier needs at least 11 blocks (SamKV,
    appendix A.1).
    """
    finite = alpha.isfinite()
    number = finite.sum(-1, keepdim=True).clamp(min=1)
    known = torch.where(finite, alpha.double(), 0.0)
    mean = known.sum(-1, keepdim=True) / number
    spread = torch.where(finite, known - mean, 0.0).square().sum(-1, keepdim=True) / number
    # The last condition excludes outliers that only rounding can produce.
    return finite & (known < mean - sigmas * spread.sqrt()) & (number - 1 > sigmas**2)


def only_middle(alpha: Tensor, ends: Tensor) -> Tensor:
    """Alpha [..., N] with +inf at the ends, bool [N]: middle blocks are compared among themselves.

    The first tokens of a document receive attention as such, and the last ones are seen from few
    distances.
    """
    return alpha.masked_fill(ends, torch.inf)


# Selection of middle blocks: the best of each document, then the best of those over all.
#
# SamKV, section 3.2, last paragraph.


def choose(
    scores: Sequence[Tensor], shares: Sequence[float], most: int | None = None
) -> list[Tensor]:
    """The middle blocks to keep in each layer, per document bool [L, m].

    scores: per document float32 [L, m], of its middle blocks; m may differ and be 0. shares: the
    share of them that it wants. In every layer each of the n documents offers its
    `ceil(share * m)` best blocks. Scores are standardised per document and layer over all its
    middle blocks, and of all blocks offered the best are kept, at most `most`; None: their number
    divided by n, rounded up. Equal scores: the earlier document, then the earlier block.
    """
    sizes = [part.shape[1] for part in scores]
    numbers = [rounded_up(share, size) for share, size in zip(shares, sizes, strict=True)]
    offers = [best(part, number) for part, number in zip(scores, numbers, strict=True)]
    offered = torch.cat(offers, 1)
    standard = torch.cat([standardised(part) for part in scores], 1)
    room = math.ceil(sum(numbers) / len(scores)) if most is None else most
    # Blocks that are not offered sort last and are never selected.
    kept = best(standard.masked_fill(~offered, -torch.inf), room)
    return list((kept & offered).split(sizes, 1))


def best(scores: Tensor, number: int) -> Tensor:
    """The `number` largest of each row, the first of equals, bool [L, m]; scores [L, m]."""
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :number]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)


def fitting(scores: Tensor, sizes: Tensor, room: int) -> Tensor:
    """The largest of each row, in order, with at most `room` tokens in total.

    scores [L, m]; sizes int64 [m], tokens of each block. The first of equals; bool [L, m].
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    fits = sizes[order].cumsum(1) <= room
    return torch.zeros_like(fits).scatter_(1, order, fits)


def standardised(scores: Tensor) -> Tensor:
    """Scores [L, m] less their row's mean, by its standard deviation (divided by m; 0 counts as 1).

    float64.
    """
    if scores.shape[1] == 0:
        return scores.double()
    spread, mean = torch.std_mean(scores.double(), dim=1, correction=0, keepdim=True)
    return (scores - mean) / torch.where(spread > 0, spread, 1.0)


# Blocks judged by a few of their keys instead of by their mean. Ours, not SamKV's.
#
# A question may depend on one distinctive key, which a mean over a block hides. For every block and
# KV head one key in eight, the farthest from the mean, is stored; a block's score is the best score
# of these keys for any token of the question in any head. Heads score on different scales, so
# each is standardised over the document.
#
# Cost: an eighth of the keys stored once more, and of the question's attention to them, per layer.


#: Tokens of a block for each key that is stored of it.
TOKENS_PER_EXTREME = 8

# The most numbers held while keys are compared with their means, and scores with theirs.
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
    # Keys of a block are strided: a maximum over adjacent numbers is slower, as is torch's std.
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
