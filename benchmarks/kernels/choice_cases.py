"""Benchmark cases that prepare or make a selection: append, bounds, top-k, top-p, and scores of
summaries of pages and of clusters of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.kernels.attention_cases import SELECTED_PAGES, SELECTED_TOKENS
from benchmarks.kernels.layer import KernelCase, Layer, Outputs, System
from keyhole import kernels
from keyhole.bench.settings import PAGE_SIZE

# Pages that `append` writes to, and the number of slots that it cycles through.
_APPENDED_PAGES, _PLACES = 2048, 64
# Several inputs, because a single one would stay in the processor's cache. Bounds of 131,072 tokens
# are 32 MiB in bfloat16, scores 4 MiB.
_BOUNDS, _SCORES = 4, 32
# Share of mass, of small integer scores whose sums are exact: keeps three fifths of the selection.
_SHARE, _SKEW, _LARGEST = 0.15, 16, 255


def append(layer: Layer) -> Iterator[KernelCase]:
    """Appends one new token per sequence to pages of a separate cache."""
    size = (_APPENDED_PAGES, layer.num_kv_heads, PAGE_SIZE, layer.dim)
    key, value = (layer.randn(layer.batch, layer.num_kv_heads, layer.dim) for _ in range(2))
    keys, values = torch.zeros(2, *size, dtype=layer.dtype)
    flat = [x.view(-1, layer.num_kv_heads, layer.dim).clone() for x in (keys, values)]
    places = torch.randperm(_APPENDED_PAGES * PAGE_SIZE, generator=layer.generator)
    slots = list(places.split(layer.batch)[:_PLACES])

    def ours(i: int) -> Outputs:
        kernels.append(keys, values, key, value, slots[i])
        return ()

    def written(i: int) -> Outputs:
        """Returns what was written and clears it for the next check."""
        ours(i)
        page, place = slots[i] // PAGE_SIZE, slots[i] % PAGE_SIZE
        found = keys[page, :, place], values[page, :, place]
        keys[page, :, place] = 0
        values[page, :, place] = 0
        return found

    def index_copy(i: int) -> Outputs:
        return tuple(x.index_copy_(0, slots[i], y) for x, y in zip(flat, (key, value), strict=True))

    yield KernelCase(
        op="append",
        tokens=layer.batch,
        about="a token of each sequence",
        moved_bytes=2 * layer.token_bytes,
        variants=len(slots),
        ours={"": System(run=ours, check=written)},
        peers={
            "torch index_copy_": System(
                run=index_copy, check=lambda i: tuple(x[slots[i]] for x in index_copy(i))
            )
        },
    )


def page_bounds(layer: Layer) -> Iterator[KernelCase]:
    """Bounds of all pages, as after a prompt of this length."""
    pages = torch.arange(len(layer.keys))
    filled = torch.full_like(pages, PAGE_SIZE)
    low, high = torch.zeros(2, len(pages), layer.num_kv_heads, layer.dim, dtype=layer.dtype)

    def ours(i: int) -> Outputs:
        kernels.page_bounds(layer.keys, low, high, pages, filled)
        return low, high

    def written(i: int) -> Outputs:
        low.fill_(torch.nan)
        high.fill_(torch.nan)
        return tuple(x.clone() for x in ours(i))

    read_bytes = layer.longest * layer.token_bytes // 2
    yield KernelCase(
        op="page_bounds",
        tokens=layer.longest,
        about=f"all pages of {layer.longest:,} tokens",
        moved_bytes=read_bytes + 2 * read_bytes // PAGE_SIZE,
        variants=1,
        ours={"": System(run=ours, check=written)},
        peers={"torch aminmax": System(run=lambda i: tuple(torch.aminmax(layer.keys, dim=2)))},
    )


def bound_scores(layer: Layer) -> Iterator[KernelCase]:
    """Page scores of one step, as in Quest."""
    size = (len(layer.keys), layer.num_kv_heads, layer.dim)
    bounds: list[tuple[Tensor, Tensor]] = []
    for _ in range(_BOUNDS):
        a, b = layer.randn(*size), layer.randn(*size)
        bounds.append((torch.minimum(a, b), torch.maximum(a, b)))
    where = layer.table.long()
    dense = [tuple(x[where].transpose(1, 2).contiguous() for x in pair) for pair in bounds]

    def ours(i: int) -> Outputs:
        return (kernels.bound_scores(layer.query, *bounds[i], layer.table),)

    def matmul(i: int) -> Outputs:
        low, high = dense[i]
        grouped = layer.query.unflatten(1, (layer.num_kv_heads, -1))
        bound = grouped.clamp(min=0) @ high.transpose(-1, -2)
        bound += grouped.clamp(max=0) @ low.transpose(-1, -2)
        return (bound.amax(2).float(),)

    yield KernelCase(
        op="bound_scores",
        tokens=layer.longest,
        about=f"all pages of {layer.longest:,} tokens",
        moved_bytes=layer.longest // PAGE_SIZE * layer.token_bytes,
        variants=_BOUNDS,
        ours={"": System(run=ours)},
        peers={"torch matmul": System(run=matmul)},
    )


def top_k(layer: Layer) -> Iterator[KernelCase]:
    """The top pages over all heads, and the top tokens per KV head."""
    pages, tokens = layer.longest // PAGE_SIZE, layer.longest
    yield _top(layer, 1, pages, min(SELECTED_PAGES, max(1, pages // 4)), "pages")
    yield _top(layer, layer.num_kv_heads, tokens, min(SELECTED_TOKENS, tokens // 4), "tokens")


def _top(layer: Layer, lists: int, entries: int, count: int, what: str) -> KernelCase:
    scores = [
        torch.rand(layer.batch, lists, entries, generator=layer.generator) for _ in range(_SCORES)
    ]
    valid = layer.lengths(entries)

    def ours(i: int) -> Outputs:
        return (kernels.top_k(scores[i], valid, count, 1).indices,)

    def topk(i: int) -> Outputs:
        best: Tensor = scores[i].topk(count, sorted=False).indices
        return (best.sort().values.int(),)

    heads = "" if lists == 1 else ", for each KV head"
    return KernelCase(
        op="top_k",
        tokens=layer.longest,
        selected=count,
        unit=1,
        about=f"{count:,} of {entries:,} {what}{heads}",
        moved_bytes=scores[0].nbytes,
        variants=_SCORES,
        ours={"": System(run=ours)},
        peers={"torch topk": System(run=topk)},
    )


def trim(layer: Layer) -> Iterator[KernelCase]:
    """The fewest top tokens of each KV head that hold a share of the scores."""
    tokens, count = layer.longest, min(SELECTED_TOKENS, layer.longest // 4)
    size = (layer.batch, layer.num_kv_heads, tokens)
    valid = layer.lengths(tokens)
    scores, chosen = [], []
    for _ in range(_SCORES):
        uniform = torch.rand(size, generator=layer.generator)
        scores.append(uniform.pow(_SKEW).mul(_LARGEST).floor())
        chosen.append(kernels.top_k(scores[-1], valid, count, 1))

    def ours(i: int) -> Outputs:
        return (kernels.top_p(chosen[i], scores[i], valid, _SHARE).indices,)

    def sort(i: int) -> Outputs:
        indices = chosen[i].indices.long()
        best, order = scores[i].gather(-1, indices).sort(descending=True, stable=True)
        needed = best.cumsum(-1) - best < _SHARE * scores[i].sum(-1, keepdim=True)
        left = indices.gather(-1, order).masked_fill(~needed, tokens).sort().values
        return (left.masked_fill(left == tokens, -1).int(),)

    yield KernelCase(
        op="trim",
        tokens=tokens,
        selected=count,
        unit=1,
        about=f"{count:,} of {tokens:,} tokens, for each KV head",
        moved_bytes=scores[0].nbytes,
        variants=_SCORES,
        ours={"": System(run=ours)},
        peers={"torch sort": System(run=sort)},
    )


# Several inputs, because a single one would stay in the processor's cache.
_SUMMARIES, _NUMBERS = 4, 16
# Chunks per page whose mean keys are scored, as in ShadowKV, and clusters per sequence.
_CHUNKS, _CLUSTERS = 2, 64


def summary_scores(layer: Layer) -> Iterator[KernelCase]:
    """Scores of the means of chunks in one step, as in ShadowKV."""
    size = (len(layer.keys), _CHUNKS, layer.num_kv_heads, layer.dim)
    means = [layer.randn(*size) for _ in range(_SUMMARIES)]
    valid = layer.lengths(layer.longest // PAGE_SIZE * _CHUNKS)
    pages = layer.table.flatten()

    def ours(i: int) -> Outputs:
        return (kernels.summary_scores(layer.query, means[i], layer.table, valid),)

    def matmul(i: int) -> Outputs:
        rows = means[i].flatten(1).index_select(0, pages)
        vectors = rows.view(layer.batch, -1, layer.num_kv_heads, layer.dim).transpose(1, 2)
        grouped = layer.query.unflatten(1, (layer.num_kv_heads, -1))
        return ((grouped @ vectors.transpose(-1, -2)).flatten(1, 2).float(),)

    yield KernelCase(
        op="summary_scores",
        tokens=layer.longest,
        about=f"{_CHUNKS} of each page of {layer.longest:,} tokens",
        moved_bytes=layer.longest // PAGE_SIZE * _CHUNKS * layer.token_bytes // 2,
        variants=_SUMMARIES,
        ours={"": System(run=ours)},
        peers={"torch index_select, matmul": System(run=matmul)},
    )


def spread_scores(layer: Layer) -> Iterator[KernelCase]:
    """The score of every token's cluster in one step, as in ClusterKV."""
    size = (len(layer.keys), layer.num_kv_heads, PAGE_SIZE)
    numbers = [
        torch.randint(_CLUSTERS, size, generator=layer.generator, dtype=torch.int32)
        for _ in range(_NUMBERS)
    ]
    scores = torch.rand(layer.batch, layer.num_kv_heads, _CLUSTERS, generator=layer.generator)
    ends, pages = layer.lengths(layer.longest), layer.table.flatten()

    def ours(i: int) -> Outputs:
        return (kernels.spread_scores(scores, numbers[i], layer.table, 0, ends),)

    def gather(i: int) -> Outputs:
        rows = numbers[i].flatten(1).index_select(0, pages)
        of_token = rows.view(layer.batch, -1, *size[1:]).transpose(1, 2).flatten(2)
        return (scores.gather(2, of_token.long()),)

    yield KernelCase(
        op="spread_scores",
        tokens=layer.longest,
        about=f"clusters of {layer.longest:,} tokens",
        moved_bytes=numbers[0].nbytes + 4 * layer.batch * layer.num_kv_heads * layer.longest,
        variants=_NUMBERS,
        ours={"": System(run=ours)},
        peers={"torch gather": System(run=gather)},
    )
