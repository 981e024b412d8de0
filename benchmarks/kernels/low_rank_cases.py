"""The benchmark case of attention with low-rank keys, as in ShadowKV."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.attention_cases import mix
from benchmarks.kernels.cases import KernelCase, Outputs, System
from benchmarks.kernels.layer import Layer
from keyhole import kernels
from keyhole.bench.settings import PAGE_SIZE
from keyhole.kernels import LowRank, PagedQuery, Selection

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
