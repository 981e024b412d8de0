"""Encodes a document alone, once: keys and values of every layer, and what its blocks are worth.

SamKV (arXiv 2508.11661), section 3.1 and appendix A.1. The document runs through the model in
chunks, like a prompt, in pages that are given back afterwards; while a layer runs, it is watched
for the attention that tokens receive and for the mean query of each block.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from keyhole import kernels
from keyhole.cache.pages import PageCache
from keyhole.documents.record import DocumentRecord, LayerRecord
from keyhole.engine.documents.head_keys import HeadEncoding
from keyhole.engine.head_runner import HeadRunner
from keyhole.errors import CapacityError
from keyhole.models.batch import Batch, Chunk
from keyhole.models.loading import Model
from keyhole.policies.controls.full import Full
from keyhole.reuse.blocks.extremes import extreme_keys
from keyhole.reuse.blocks.statistics import BlockMeans, ReceivedAttention, block_means

# A document is encoded with a progress bar from here on: below, it takes a moment.
_LONG = 16384


def encode(
    model: Model,
    cache: PageCache,
    tokens: np.ndarray,
    *,
    block_size: int,
    chunk: int,
    lookahead: HeadRunner | None = None,
    lock: AbstractContextManager[Any] | None = None,
    progress: Callable[[int], None] | None = None,
    pages: list[int] | None = None,
) -> DocumentRecord:
    """The record of a document, its tensors on the CPU.

    tokens: int64 [n]; chunk: tokens that run at once. lookahead: whose head's keys are stored too,
    where they cannot be made from tokens alone. lock: held for one chunk at a time, so that steps
    run between them. progress: called between chunks with the tokens that are done; what it raises
    ends the work. pages: allocated for it, given back here; None: allocated here. CapacityError if
    n tokens do not fit into the cache.
    """
    size = cache.page_size
    lock = nullcontext() if lock is None else lock
    if pages is None:
        with lock:
            pages = cache.allocate(-(-len(tokens) // size))
    if pages is None:
        raise CapacityError(
            f"a document of {len(tokens)} tokens does not fit into the KV cache, where "
            f"{cache.available * size} are free; raise memory=, or cut it into parts"
        )
    named = None if lookahead is None else lookahead.stored_as
    head = None if lookahead is None or named is None else HeadEncoding(lookahead)
    try:
        watch = _Watch(cache, len(tokens), block_size, model.device)
        table = torch.tensor(pages, device=model.device)
        quiet = None if len(tokens) >= _LONG else True
        with tqdm(total=len(tokens), unit="token", desc="encode", disable=quiet) as bar:
            for start in range(0, len(tokens), chunk):
                part = tokens[start : start + chunk]
                with lock:
                    _run(model, cache, watch, table, part, start, head)
                bar.update(len(part))
                if progress is not None:
                    progress(start + len(part))
        every = torch.arange(len(tokens), device=model.device)
        layers = []
        for layer in range(len(cache.keys)):
            with lock:
                layers.append(watch.record(layer, table, every))
    finally:
        with lock:
            cache.release(pages)
    heads = {} if head is None or named is None else {named: head.record()}
    return DocumentRecord(torch.from_numpy(tokens), block_size, layers, heads)


def _run(
    model: Model,
    cache: PageCache,
    watch: _Watch,
    table: Tensor,
    tokens: np.ndarray,
    start: int,
    head: HeadEncoding | None,
) -> None:
    """One chunk of the document."""
    size, end = cache.page_size, start + len(tokens)
    positions = torch.arange(start, end, device=model.device)
    pages = table[: -(-end // size)]
    watch.at(pages, start, end)
    batch = Batch(
        cache=cache,
        policy=Full(),
        slots=pages[positions // size] * size + positions % size,
        newest=positions[:0],
        num_decode=0,
        step=None,
        chunks=[Chunk(slice(0, len(tokens)), start, pages)],
        observer=watch.layer,
    )
    last = torch.tensor([len(tokens) - 1], device=model.device)
    token_ids = torch.from_numpy(tokens).to(model.device)
    model.forward(token_ids, positions, batch, last)
    if head is not None:
        head.add(token_ids, batch)


class _Watch:
    """What is counted in every layer while a document runs."""

    def __init__(
        self, cache: PageCache, length: int, block_size: int, device: torch.device
    ) -> None:
        self._cache = cache
        self._block_size = block_size
        layers = range(len(cache.keys))
        self._received = [ReceivedAttention(length, block_size, device) for _ in layers]
        self._queries = [BlockMeans(length, block_size, device) for _ in layers]

    def at(self, pages: Tensor, start: int, end: int) -> None:
        """The next chunk: the document's pages so far, and its tokens."""
        self._pages, self._start, self._end = pages, start, end

    def layer(self, layer: int, query: Tensor, options: dict[str, Any]) -> None:
        """Called by each layer with its rotated queries [t, Hq, D], its keys written."""
        so_far = torch.arange(self._end, device=query.device)
        keys = kernels.gather_tokens(self._cache.keys[layer], self._pages, so_far)
        self._received[layer].add(query, keys, self._start, **options)
        self._queries[layer].add(query)

    def record(self, layer: int, pages: Tensor, tokens: Tensor) -> LayerRecord:
        """What is stored of a layer, on the CPU."""
        keys = kernels.gather_tokens(self._cache.keys[layer], pages, tokens)
        values = None
        if not self._cache.geometry.layers[layer].shared_values:
            values = kernels.gather_tokens(self._cache.values[layer], pages, tokens).cpu()
        found = self._received[layer].finish()
        return LayerRecord(
            keys=keys.cpu(),
            values=values,
            block_keys=block_means(keys, self._block_size).cpu(),
            block_queries=self._queries[layer].finish().cpu(),
            representatives=found.representatives.cpu(),
            representative_keys=keys[found.representatives].cpu(),
            alpha=found.alpha.cpu(),
            received=found.received.cpu(),
            extreme_keys=extreme_keys(keys, self._block_size).cpu(),
        )
