"""Benchmark cases of attention and scores: over everything, tokens, pages, a prompt's chunk, and
with low-rank keys, as in ShadowKV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.layer import KernelCase, Layer, Outputs, System
from keyhole import kernels
from keyhole.bench.settings import PAGE_SIZE
from keyhole.kernels import LowRank, PagedQuery, ScoreRequest, Selection

#: Selected tokens per KV head, and selected pages for all heads, of the longest context; at most a
#: quarter of it.
SELECTED_TOKENS, SELECTED_PAGES = 2048, 64
#: Tokens of a prompt's chunk, and before it.
CHUNK, BEFORE = 512, 8192


def attend(layer: Layer) -> Iterator[KernelCase]:
    """Attention over all of the shorter contexts, and over tokens and pages of the longest."""
    for tokens in layer.contexts:
        yield _attend_all(layer, tokens)
    yield _attend_tokens(layer, min(SELECTED_TOKENS, layer.longest // 4))
    yield _attend_pages(layer, min(SELECTED_PAGES, max(1, layer.longest // PAGE_SIZE // 4)))


def _attend_all(layer: Layer, tokens: int) -> KernelCase:
    dense = layer.side_by_side(tokens)
    query = layer.query

    def sdpa(i: int) -> Outputs:
        key, value = dense[i]
        out = F.scaled_dot_product_attention(
            query[:, :, None], key, value, scale=layer.scale, enable_gqa=True
        )
        return (out[:, :, 0],)

    return KernelCase(
        op="attend",
        tokens=tokens,
        about=f"all of {tokens:,} tokens",
        moved_bytes=tokens * layer.token_bytes,
        variants=layer.variants(tokens),
        ours={"": System(run=_attend(layer, tokens))},
        peers={
            "torch sdpa": System(run=sdpa),
            "torch matmul": System(run=lambda i: (mix(layer, *dense[i])[0],)),
        },
    )


def _attend_tokens(layer: Layer, count: int) -> KernelCase:
    draws = layer.draws(layer.longest, count, layer.num_kv_heads)
    counts = torch.full((layer.batch, layer.num_kv_heads), count, dtype=torch.int32)
    paged = PagedQuery(
        layer.query, layer.keys, layer.values, layer.table, layer.lengths(layer.longest)
    )
    ((keys, values),) = layer.side_by_side(layer.longest)
    rows = [x.flatten(0, 2) for x in (keys, values)]  # [B Hkv N, D]
    heads = torch.arange(layer.batch * layer.num_kv_heads).view(layer.batch, -1, 1)

    def ours(i: int) -> Outputs:
        selection = Selection(draws[i], counts, 1)
        return (kernels.attend(paged, selection=selection, scale=layer.scale),)

    def gather(i: int) -> Outputs:
        where = (draws[i] + heads * layer.longest).flatten()
        key, value = (x.index_select(0, where).view(*draws[i].shape, -1) for x in rows)
        return (mix(layer, key, value)[0],)

    return KernelCase(
        op="attend",
        tokens=layer.longest,
        selected=count,
        unit=1,
        about=f"{count:,} tokens per KV head of {layer.longest:,}",
        moved_bytes=count * layer.token_bytes,
        variants=len(draws),
        ours={"": System(run=ours)},
        peers={"torch gather, matmul": System(run=gather)},
    )


def _attend_pages(layer: Layer, count: int) -> KernelCase:
    num_pages = layer.longest // PAGE_SIZE
    draws = layer.draws(num_pages, count, 1)
    counts = torch.full((layer.batch, 1), count, dtype=torch.int32)
    paged = PagedQuery(
        layer.query, layer.keys, layer.values, layer.table, layer.lengths(layer.longest)
    )
    ((keys, values),) = layer.side_by_side(layer.longest)
    rows = [x.view(-1, PAGE_SIZE * layer.dim) for x in (keys, values)]  # [B Hkv M, page]
    heads = torch.arange(layer.batch * layer.num_kv_heads).view(layer.batch, -1, 1)

    def ours(i: int) -> Outputs:
        selection = Selection(draws[i], counts, PAGE_SIZE)
        return (kernels.attend(paged, selection=selection, scale=layer.scale),)

    def gather(i: int) -> Outputs:
        where = (draws[i] + heads * num_pages).flatten()
        size = (layer.batch, layer.num_kv_heads, count * PAGE_SIZE, layer.dim)
        key, value = (x.index_select(0, where).view(size) for x in rows)
        return (mix(layer, key, value)[0],)

    return KernelCase(
        op="attend",
        tokens=layer.longest,
        selected=count,
        unit=PAGE_SIZE,
        about=f"{count} pages, shared by heads, of {layer.longest:,} tokens",
        moved_bytes=count * PAGE_SIZE * layer.token_bytes,
        variants=len(draws),
        ours={"": System(run=ours)},
        peers={"torch gather, matmul": System(run=gather)},
    )


def attend_and_score(layer: Layer) -> Iterator[KernelCase]:
    """Attention with scores as in DELTA's selection layers, compared with `attend` alone."""
    tokens = layer.contexts[-1]
    tables, lengths = layer.tables(tokens), layer.lengths(tokens)
    dense = layer.side_by_side(tokens)
    requests = (ScoreRequest("max", PAGE_SIZE),)

    def ours(i: int) -> Outputs:
        paged = PagedQuery(layer.query, layer.keys, layer.values, tables[i], lengths)
        out, scores = kernels.attend_and_score(paged, requests=requests, scale=layer.scale)
        return out, *scores

    def matmul(i: int) -> Outputs:
        out, weights = mix(layer, *dense[i])
        best = weights.flatten(1, 2).amax(1).float()
        return out, best.unflatten(1, (-1, PAGE_SIZE)).sum(2)[:, None]

    yield KernelCase(
        op="attend_and_score",
        tokens=tokens,
        about=f"all of {tokens:,} tokens, a score per page",
        moved_bytes=tokens * layer.token_bytes,
        variants=len(dense),
        ours={"": System(run=ours), "attend": System(run=_attend(layer, tokens))},
        peers={"torch matmul": System(run=matmul)},
    )


def head_scores(layer: Layer) -> Iterator[KernelCase]:
    """Scores as computed by a retrieval head."""
    tokens = layer.contexts[-1]
    tables, lengths = layer.tables(tokens), layer.lengths(tokens)
    keys = [key for key, _ in layer.side_by_side(tokens)]

    def ours(i: int) -> Outputs:
        paged = (layer.query, layer.keys, tables[i], lengths)
        return (kernels.head_scores(*paged, scale=layer.scale),)

    yield KernelCase(
        op="head_scores",
        tokens=tokens,
        about=f"{tokens:,} tokens",
        moved_bytes=tokens * layer.token_bytes // 2,
        variants=len(keys),
        ours={"": System(run=ours)},
        peers={"torch matmul": System(run=lambda i: (_weights(layer, keys[i]).amax(2).float(),))},
    )


def prefill(layer: Layer) -> Iterator[KernelCase]:
    """A chunk of one prompt; compute-bound, so no bandwidth is reported."""
    before = max((n for n in layer.contexts if n <= BEFORE), default=layer.contexts[0])
    before = min(before, layer.longest - PAGE_SIZE)
    chunk = min(CHUNK, layer.longest - before)
    tokens = before + chunk
    tables = [table[0].long() for table in layer.tables(tokens)]
    dense = [(key[:1], value[:1]) for key, value in layer.side_by_side(tokens)]
    query = layer.randn(chunk, layer.num_heads, layer.dim)
    seen = torch.arange(tokens) <= torch.arange(before, tokens)[:, None]

    def ours(i: int) -> Outputs:
        paged = (query, layer.keys, layer.values, tables[i], before)
        return (kernels.prefill(*paged, scale=layer.scale),)

    def sdpa(i: int) -> Outputs:
        key, value = dense[i]
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key,
            value,
            attn_mask=seen,
            scale=layer.scale,
            enable_gqa=True,
        )
        return (out[0].transpose(0, 1),)

    yield KernelCase(
        op="prefill",
        tokens=tokens,
        about=f"{chunk:,} tokens of a prompt after {before:,}",
        moved_bytes=tokens * layer.token_bytes // layer.batch,
        flops=4 * int(seen.sum()) * layer.num_heads * layer.dim,
        variants=len(tables),
        ours={"": System(run=ours)},
        peers={"torch sdpa": System(run=sdpa)},
    )


def _attend(layer: Layer, tokens: int) -> Callable[[int], Outputs]:
    """Our attention over a variant with this many tokens."""
    tables, lengths = layer.tables(tokens), layer.lengths(tokens)

    def run(i: int) -> Outputs:
        paged = PagedQuery(layer.query, layer.keys, layer.values, tables[i], lengths)
        return (kernels.attend(paged, scale=layer.scale),)

    return run


def _weights(layer: Layer, key: Tensor) -> Tensor:
    """Attention weights [B, Hkv, G, n] over keys [B, Hkv, n, D], without copying keys per group."""
    grouped = layer.query.unflatten(1, (layer.num_kv_heads, -1))
    scores = grouped @ key.transpose(-1, -2) * layer.scale
    weights: Tensor = scores.softmax(-1, dtype=torch.float32).to(layer.dtype)
    return weights


def mix(layer: Layer, key: Tensor, value: Tensor) -> Outputs:
    """Attention as two matrix products per KV head: [B, Hq, D], and its weights."""
    weights = _weights(layer, key)
    return (weights @ value).flatten(1, 2), weights


# Tokens read of the longest context, at most a quarter of it, and tokens per chunk.
_TOKENS, _CHUNK = 1024, 8
# Rank of the keys of all heads together, at most half of their size.
_RANK = 160


def attend_low_rank(layer: Layer) -> Iterator[KernelCase]:
    """Chunks of tokens per KV head, all keys reconstructed; compute-bound."""
    heads, dim, longest = layer.num_kv_heads, layer.dim, layer.longest
    count, rank = min(_TOKENS, longest // 4), min(_RANK, heads * dim // 2)
    draws = [
        (chunks[..., None] * _CHUNK + torch.arange(_CHUNK, dtype=torch.int32)).flatten(2)
        for chunks in layer.draws(longest // _CHUNK, count // _CHUNK, heads)
    ]
    counts = torch.full((layer.batch, heads), count, dtype=torch.int32)
    coefficients = layer.randn(len(layer.keys), PAGE_SIZE, rank) / rank**0.5
    basis = layer.randn(layer.batch, rank, heads, dim)
    frequencies = 1e4 ** (-torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    low_rank = LowRank(
        coefficients=coefficients,
        basis=basis,
        first=layer.lengths(longest),
        taken=torch.empty(layer.batch, heads, 0, dtype=torch.int32),
        chunk=_CHUNK,
        frequencies=frequencies,
        last=False,
    )
    paged = PagedQuery(layer.query, layer.keys, layer.values, layer.table, layer.lengths(longest))
    ((_, values),) = layer.side_by_side(longest)
    low, rows = coefficients[layer.table.long()].flatten(0, 2), values.flatten(0, 2)
    of_heads = basis.transpose(1, 2).contiguous()  # [B, Hkv, rank, D]
    angle = torch.arange(longest, dtype=torch.float64)[:, None] * frequencies
    cos, sin = (x.float().repeat(1, 2).to(layer.dtype) for x in (angle.cos(), angle.sin()))
    sequence = torch.arange(layer.batch)[:, None, None]
    head = torch.arange(heads)[:, None]

    def ours(i: int) -> Outputs:
        selection = Selection(draws[i], counts, 1)
        out = kernels.attend_low_rank(
            paged, selection=selection, low_rank=low_rank, scale=layer.scale
        )
        return (out,)

    def gather(i: int) -> Outputs:
        tokens = draws[i]
        which = (sequence * longest + tokens).flatten()
        key = low.index_select(0, which).view(*tokens.shape, rank) @ of_heads
        c, s = (x.index_select(0, tokens.flatten()).view_as(key) for x in (cos, sin))
        halves = torch.cat([-key[..., dim // 2 :], key[..., : dim // 2]], -1)
        which = ((sequence * heads + head) * longest + tokens).flatten()
        value = rows.index_select(0, which).view(*tokens.shape, dim)
        return (mix(layer, key * c + halves * s, value)[0],)

    rebuilt = layer.batch * heads * count
    yield KernelCase(
        op="attend_low_rank",
        tokens=longest,
        selected=count,
        unit=1,
        about=f"{count:,} tokens per KV head of {longest:,}, keys of rank {rank}",
        moved_bytes=rebuilt * (rank + dim) * layer.dtype.itemsize + basis.nbytes,
        flops=2 * rebuilt * dim * (rank + 2 * layer.num_heads // heads),
        variants=len(draws),
        ours={"": System(run=ours)},
        peers={"torch gather, matmul": System(run=gather)},
    )
