"""Benchmark cases that score summaries of pages and clusters of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.cases import KernelCase, Outputs, System
from benchmarks.kernels.layer import Layer
from keyhole import kernels
from keyhole.bench.settings import PAGE_SIZE

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
