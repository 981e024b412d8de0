"""Encodes a document alone: keys and values of every layer, and statistics of its blocks.

SamKV (arXiv 2508.11661), section 3.1 and appendix A.1. The document runs through the model in
chunks, like a prompt, in pages that are freed afterwards; while a layer runs, it is watched
for the attention that tokens receive and for the mean query of each block. Between two chunks other
requests may have steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from keyhole import kernels
from keyhole.cache.pages import PageCache
from keyhole.documents.record import DocumentRecord, LayerRecord
from keyhole.engine.documents.loader import HeadEncoding
from keyhole.engine.head_runner import HeadRunner
from keyhole.errors import CapacityError
from keyhole.models.batch import Batch, Chunk
from keyhole.models.model import Model
from keyhole.models.modules.sequence_adapters import adapter_rows
from keyhole.policies.controls import Full
from keyhole.reuse.block_scores import extreme_keys
from keyhole.reuse.block_statistics import (
    MOST_LOCAL_BLOCKS,
    BlockMeans,
    ReceivedAttention,
    block_means,
)

#: Yields after each piece of work how many tokens it computed, and returns the record.
Encoding = Generator[int, None, DocumentRecord]


def encode(
    model: Model,
    cache: PageCache,
    tokens: np.ndarray,
    *,
    block_size: int,
    chunk: int,
    head_runner: HeadRunner | None = None,
) -> DocumentRecord:
    """Encodes a whole document and returns its record, with tensors on the CPU.

    tokens: int64 [n]; chunk: tokens that run at once. head_runner: its head's keys are stored too,
    where they cannot be computed from tokens alone. CapacityError if n tokens do not fit into the
    cache.
    """
    pages = allocate(cache, len(tokens))
    try:
        work = encode_in_pieces(
            model,
            cache,
            tokens,
            pages,
            block_size=block_size,
            size=lambda left: min(left, chunk),
            head_runner=head_runner,
        )
        while True:
            next(work)
    except StopIteration as done:
        record: DocumentRecord = done.value
        return record
    finally:
        cache.release(pages)


def allocate(cache: PageCache, num_tokens: int) -> list[int]:
    """Pages for a document. CapacityError if it does not fit into the cache."""
    size = cache.page_size
    pages = cache.allocate(-(-num_tokens // size))
    if pages is None:
        room, what = cache.available * size, f"a document of {num_tokens} tokens does not fit into"
        if num_tokens <= cache.max_pages * size:
            raise CapacityError(
                f"{what} the KV cache now: {room} tokens are free; add it later, pass progress= to "
                "wait until there is room, or raise memory="
            )
        raise CapacityError(
            f"{what} the KV cache, which has room for {room}; raise memory=, or split it into parts"
        )
    return pages


def encode_in_pieces(
    model: Model,
    cache: PageCache,
    tokens: np.ndarray,
    pages: Sequence[int],
    *,
    block_size: int,
    size: Callable[[int], int],
    head_runner: HeadRunner | None = None,
    adapter: int = 0,
) -> Encoding:
    """`encode` as a generator, so that other work can run between its pieces.

    pages: where it is computed; the caller frees them. size: how many of the tokens that
    are left run at once. adapter: the number of the LoRA adapter that it is encoded with.
    """
    named = None if head_runner is None else head_runner.stored_as
    head = None if head_runner is None or named is None else HeadEncoding(head_runner)
    watch = _Watch(cache, len(tokens), block_size)
    table = torch.tensor(pages, device=model.device)
    # No progress bar for a short document.
    with tqdm(
        total=len(tokens), unit="token", desc="encode", leave=False, delay=1, disable=None
    ) as bar:
        start = 0
        while start < len(tokens):
            part = tokens[start : start + size(len(tokens) - start)]
            _run(model, cache, watch, table, part, start, head, adapter)
            start += len(part)
            bar.update(len(part))
            yield len(part)
    every = torch.arange(len(tokens), device=model.device)
    layers = []
    for layer in range(len(cache.keys)):
        layers.append(watch.record(layer, table, every))
        yield 0
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
    adapter: int,
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
        adapters=adapter_rows([(adapter, len(tokens))], model.device),
    )
    last = torch.tensor([len(tokens) - 1], device=model.device)
    token_ids = torch.from_numpy(tokens).to(model.device)
    model.forward(token_ids, positions, batch, last)
    if head is not None:
        head.add(token_ids, batch)


class _Watch:
    """The block statistics of every layer, collected while a document is encoded."""

    def __init__(self, cache: PageCache, length: int, block_size: int) -> None:
        self._cache = cache
        self._block_size = block_size
        places = [cache.place(layer) for layer in range(len(cache.keys))]
        self._received = [ReceivedAttention(length, block_size, place) for place in places]
        self._queries = [BlockMeans(length, block_size, place) for place in places]

    def at(self, pages: Tensor, start: int, end: int) -> None:
        """Begins the next chunk: the document's pages so far, and its tokens."""
        self._pages, self._start, self._end = pages, start, end

    def layer(self, layer: int, query: Tensor, options: dict[str, Any]) -> None:
        """Called by each layer with its rotated queries [t, Hq, D], its keys written."""
        so_far = torch.arange(self._end, device=query.device)
        pages = self._pages.to(self._cache.place(layer))
        keys = kernels.gather_tokens(self._cache.keys[layer], pages, so_far)
        self._received[layer].add(query, keys.to(query.dtype), self._start, **options)
        self._queries[layer].add(query)

    def record(self, layer: int, pages: Tensor, tokens: Tensor) -> LayerRecord:
        """The tensors of a layer to store, on the CPU."""
        pages, tokens = (x.to(self._cache.place(layer)) for x in (pages, tokens))
        rows = kernels.gather_rows(self._cache.keys[layer], pages, tokens)
        keys = kernels.dequantised(rows).to(self._cache.empty.dtype)
        values = None
        if not self._cache.geometry.layers[layer].shared_values:
            values = kernels.gather_rows(self._cache.values[layer], pages, tokens).cpu()
        found = self._received[layer].finish()
        return LayerRecord(
            keys=rows.cpu(),
            values=values,
            block_keys=block_means(keys, self._block_size).cpu(),
            local_queries=self._queries[layer].finish()[-MOST_LOCAL_BLOCKS:].cpu(),
            representatives=found.representatives.cpu(),
            representative_keys=keys[found.representatives].cpu(),
            alpha=found.alpha.cpu(),
            received=found.received.cpu(),
            extreme_keys=extreme_keys(keys, self._block_size).cpu(),
        )
