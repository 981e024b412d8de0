"""Attention of models that select tokens themselves, by an indexer of their own.

DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): small queries and one key
per token, of their own, score all earlier tokens, and every token of a prompt or of an answer
attends to the `index_topk` tokens of the highest scores. The indexer's key is the end of a token's
key in the cache, so that it is shared, copied and freed with it. A layer without an indexer reads
what the last one with an indexer selected (GLM's shared layers).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from keyhole import kernels
from keyhole.errors import ModelError
from keyhole.kernels import PagedQuery, Selection
from keyhole.models.batch import Batch, Chunk

#: Numbers of the keys that the queries of one call read: prompts are computed in blocks of rows.
_NUMBERS = 1 << 25


@dataclass
class IndexerRow:
    """What an indexer computed for the tokens of a packed row, and selected for them.

    query [T, H, D] and key [T, D] of the indexer, both rotated; weights float32 [T, H], the scale
    included; count: how many tokens each of them reads. decoding: what the decoding sequences
    read; prompts: by the number of a chunk, blocks of its rows and what these read. None, or no
    entry: every token before.
    """

    query: Tensor
    key: Tensor
    weights: Tensor
    count: int
    decoding: Selection | None = None
    prompts: dict[int, list[tuple[slice, Selection]]] = field(default_factory=dict)

    def select(self, batch: Batch, key_pages: Tensor) -> None:
        """Selects for all tokens of a step, whose keys are written.

        key_pages: the layer's keys of the indexer, [P, 1, page_size, D].
        """
        step = batch.step
        if step is not None and step.page_table.shape[1] * step.page_size > self.count:
            rows = slice(batch.num_decode)
            scores = self._scores(rows, key_pages, step.page_table, per_row=True)
            self.decoding = kernels.top_k(scores[:, None], step.lengths, self.count, 1)
        for number, chunk in enumerate(batch.chunks):
            assert isinstance(chunk, Chunk), "a model with an indexer has no stored documents"
            if chunk.start + chunk.rows.stop - chunk.rows.start <= self.count:
                continue
            self.prompts[number] = [
                (rows, kernels.top_k(scores[:, None], lengths, self.count, 1))
                for rows, lengths, scores in self._blocks(chunk, key_pages)
            ]

    def _blocks(self, chunk: Chunk, key_pages: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows of a prompt, the tokens up to each of them, and scores float32 [n, N]."""
        tokens = len(chunk.pages) * key_pages.shape[2]
        block = max(1, _NUMBERS // max(tokens, self.count * key_pages.stride(2)))
        for first in range(chunk.rows.start, chunk.rows.stop, block):
            rows = slice(first, min(first + block, chunk.rows.stop))
            lengths = lengths_of(chunk, rows, key_pages.device)
            yield rows, lengths, self._scores(rows, key_pages, chunk.pages[None], per_row=False)

    def _scores(
        self, rows: slice, key_pages: Tensor, page_table: Tensor, *, per_row: bool
    ) -> Tensor:
        """Scores float32 [n, N]. per_row: each row has its own pages; else one list for all."""
        query, weights = self.query[rows], self.weights[rows]
        if per_row:
            return kernels.index_scores(query[:, None], weights[:, None], key_pages, page_table)[
                :, 0
            ]
        return kernels.index_scores(query[None], weights[None], key_pages, page_table)[0]


def lengths_of(chunk: Chunk, rows: slice, device: torch.device) -> Tensor:
    """The tokens up to each of some rows of a prompt, int32 [n]."""
    first = chunk.start + rows.start - chunk.rows.start + 1
    count = rows.stop - rows.start
    return torch.arange(first, first + count, device=device, dtype=torch.int32)


def attend(
    batch: Batch,
    layer: int,
    query: Tensor,
    chosen: IndexerRow | None,
    options: dict[str, Any],
) -> list[Tensor]:
    """Attention of a packed row, query [T, Hq, D], over what the indexer selects.

    Returns the outputs [n, Hq, Dv] of consecutive rows. ModelError without an indexer's choice.
    """
    if not isinstance(chosen, IndexerRow):
        raise ModelError(f"layer {layer} attends without what its indexer selected")
    layout = batch.cache.geometry.layers[layer]
    dim = layout.key_dim - layout.index_dim
    whole, values = batch.cache.keys[layer], batch.cache.values[layer]
    if layout.index_dim:
        chosen.select(batch, whole[..., dim:])
    keys, parts = whole[..., :dim], []
    if batch.step is not None:
        step, rows = batch.step, query[: batch.num_decode]
        paged = PagedQuery(rows, keys, values, step.page_table, step.lengths)
        parts.append(kernels.attend(paged, selection=chosen.decoding, **options))
        batch.reads.append(chosen.decoding)
    for number, chunk in enumerate(batch.chunks):
        assert isinstance(chunk, Chunk)
        blocks = chosen.prompts.get(number)
        if blocks is None:
            place = (keys, values, chunk.pages, chunk.start)
            parts.append(kernels.prefill(query[chunk.rows], *place, **options))
            continue
        table = chunk.pages.to(torch.int32)[None]
        for part, selection in blocks:
            lengths = lengths_of(chunk, part, query.device)
            tables = table.expand(len(lengths), -1)
            paged = PagedQuery(query[part], keys, values, tables, lengths)
            parts.append(kernels.attend(paged, selection=selection, **options))
    return parts
