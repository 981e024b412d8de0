"""Attention of models that select tokens themselves, by an indexer of their own.

DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): small queries and one key
per token, of their own, score all earlier tokens, and every token of a prompt or of an answer
attends to the `index_topk` tokens of the highest scores. The indexer's key is the end of a token's
key in the cache, so that it is shared, copied and freed with it. A layer without an indexer reads
what the last one with an indexer selected (GLM's shared layers).

transformers' indexer appends its keys to transformers' cache, scores all tokens of each sequence of
a batch in parallel and returns the numbers of the best. In a packed row sequences have different
tokens, and keys are in pages. An instance therefore becomes one of a subclass that only computes
its queries, its key and its weights, an `IndexerRow`. The attention module passes it on, and gets a
mask, which it would slice, of one entry. transformers and other models of the process are not
changed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from keyhole import kernels
from keyhole.errors import ModelError
from keyhole.kernels import PagedQuery, Selection
from keyhole.models.batch import Batch, Chunk, PassThrough

#: The method of transformers' caches to which a module passes its keys.
_WRITES = "update_indexer"
#: The parts of an indexer as DeepSeek-V3.2 has it.
_PARTS = ("wq_b", "wk", "k_norm", "weights_proj", "softmax_scale")
#: The functions by which one rotates, of which its code names one.
_ROTATIONS = ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb")
#: Those that rotate the last numbers of a head, not the first.
_ROTATE_LAST = {"HYV4Indexer"}
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
        batch.last_reads[chunk.rows.start, layer] = blocks[-1][1].row(-1)
    return parts


def adapt(network: nn.Module, name: str) -> None:
    """Replaces the classes of all indexers and of the modules around them, in place.

    ModelError for an indexer of another kind.
    """
    for module in list(network.modules()):
        child = getattr(module, "indexer", None)
        if not isinstance(child, nn.Module) or _WRITES not in _code(type(child)).co_names:
            continue
        if not all(hasattr(child, part) for part in _PARTS):
            raise ModelError(
                f"model {name!r} selects tokens by {type(child).__name__}, an indexer that is "
                "different from DeepSeek-V3.2's"
            )
        child.__class__ = _indexer(type(child))  # type: ignore[arg-type]
        module.__class__ = _attention(type(module))  # type: ignore[arg-type]


def _code(cls: Any) -> Any:
    return inspect.unwrap(cls.forward).__code__


@functools.cache
def _attention(cls: Any) -> Any:
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        if PassThrough.among(args, named) is not None:
            named["attention_mask"] = torch.zeros(1, 1, 1, 1)
        return cls.forward(self, *args, **named)

    return type(f"Keyhole{cls.__name__}", (cls,), {"forward": forward})


@functools.cache
def _indexer(cls: Any) -> Any:
    function = next(name for name in _ROTATIONS if name in _code(cls).co_names)
    rotate = inspect.unwrap(cls.forward).__globals__[function]
    rotates_last = cls.__name__ in _ROTATE_LAST

    def rotated(
        query: Tensor, key: Tensor, dim: int, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Query [1, T, H, D] and key [1, T, 1, D], `dim` numbers of each head rotated."""
        sizes = [query.shape[-1] - dim, dim] if rotates_last else [dim, query.shape[-1] - dim]
        parts = [list(x.split(sizes, -1)) for x in (query, key)]
        turned = rotate(*(x[-1 if rotates_last else 0] for x in parts), *angles, unsqueeze_dim=2)
        for part, new in zip(parts, turned, strict=True):
            part[-1 if rotates_last else 0] = new
        return torch.cat(parts[0], -1), torch.cat(parts[1], -1)

    def forward(
        self: Any,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *args: Any,
        **named: Any,
    ) -> Any:
        if PassThrough.among(args, named) is None:
            given = (hidden_states, q_resid, position_embeddings, *args)
            return cls.forward(self, *given, **named)
        query = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
        key = self.k_norm(self.wk(hidden_states).to(self.k_norm.weight.dtype)).to(query.dtype)
        query, key = rotated(query, key[:, :, None], self.qk_rope_head_dim, position_embeddings)
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float()
        weights = weights * (self.n_heads**-0.5 * self.softmax_scale)
        return IndexerRow(query[0], key[0, :, 0], weights[0], self.index_topk)

    return type(f"Keyhole{cls.__name__}", (cls,), {"forward": forward})
