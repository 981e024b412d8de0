"""SamKV's choice in vLLM: which pages each layer reads of a prompt's documents.

The question is first computed over the ends of the documents, in the pages that their middle blocks
would have, and its queries choose. Then what each layer keeps is packed into the first pages of the
request, and attention reads these pages and the question's own (`layout`): other pages are in no
page table.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group

from keyhole.documents.integrity import RecordError
from keyhole.integrations.vllm.documents.forward import compute_runs
from keyhole.integrations.vllm.documents.layout import Layout
from keyhole.integrations.vllm.documents.loader import DocumentLoader, kept_positions
from keyhole.integrations.vllm.documents.requests import DocumentRequest
from keyhole.reuse.base import Reuse


@dataclass(frozen=True)
class KeptPages:
    """The pages that each layer reads of a request.

    filled: per layer, the number of leading pages with kept tokens. question: the page of the
    question's first token; it and all later pages are read.
    """

    filled: tuple[int, ...]
    question: int


@dataclass(eq=False)
class KeptRows:
    """The rows of a step whose requests have `KeptPages`."""

    rows: list[tuple[int, KeptPages]]
    page_size: int
    _made: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def metadata(self, whole: Any, layer: int) -> Any:
        """A layer's metadata over its pages; layers that read the same pages share one object."""
        key = id(whole), *(kept.filled[layer] for _, kept in self.rows)
        if key not in self._made:
            self._made[key] = self._part(whole, layer)
        return self._made[key]

    def _part(self, whole: Any, layer: int) -> Any:
        part = copy.copy(whole)
        part.block_table, part.seq_lens = whole.block_table.clone(), whole.seq_lens.clone()
        per_block = self.page_size // whole.keyhole_builder.page_size
        for row, kept in self.rows:
            filled, question = kept.filled[layer] * per_block, kept.question * per_block
            rest = whole.block_table[row, question:]
            part.block_table[row, filled : filled + len(rest)] = rest
            part.seq_lens[row] -= (kept.question - kept.filled[layer]) * self.page_size
        whole.keyhole_builder.schedule(part, 0, False)
        return part


def choose(
    runner: Any,
    loader: DocumentLoader,
    name: str,
    request: DocumentRequest,
    tokens: Sequence[int],
    blocks: Sequence[int],
) -> tuple[KeptPages, RecordError | None]:
    """Lets the method choose, and fills the request's pages with what it keeps.

    name: of the request, whose probe tokens (the documents' ends) are loaded. tokens: its prompt.
    All ranks must call this in the same step, and none may stop half-way: an error from a record
    that cannot be read is returned, not raised.
    """
    size, num_layers = loader.page_size, loader.num_layers
    num_pages = max(len(blocks), request.end // size + 1)
    reuse, documents = loader.method(request), loader.documents(name)
    placed = loader.placed(request, documents)
    context = reuse.question_context(placed)
    query = None
    if context is not None:
        there = kept_positions(request, context)
        layout = Layout.of(there, num_pages, size, scratch=True)
        query = _queries(runner, reuse, request, tokens, [layout] * num_layers, blocks)
    plan = reuse.plan(placed, query)
    assert not plan.recomputed.any(), "methods that recompute here are refused"
    kept = [kept_positions(request, row) for row in plan.kept.cpu()]
    layouts = [Layout.of(row, num_pages, size) for row in kept]
    problem = None
    try:
        loader.write(request, documents, kept, layouts, blocks)
    except RecordError as error:
        problem = error
    loader.close(name)
    if request.runs:
        compute_runs(runner, tokens, request.runs, layouts, blocks)
    filled = tuple(layout.count // size for layout in layouts)
    return KeptPages(filled, request.end // size), problem


def _queries(
    runner: Any,
    reuse: Reuse,
    request: DocumentRequest,
    tokens: Sequence[int],
    layouts: Sequence[Layout],
    blocks: Sequence[int],
) -> list[Tensor]:
    """The question's queries over the probe tokens, of all heads: see `Reuse.plan`."""
    if request.runs:
        compute_runs(runner, tokens, request.runs, layouts, blocks)
    parts: list[list[Tensor]] = [[] for _ in layouts]

    def note(layer: int, query: Tensor) -> None:
        parts[layer].append(query.float())

    compute_runs(runner, tokens, [[request.end, len(tokens)]], layouts, blocks, note)
    found = [get_tp_group().all_gather(torch.cat(part), 1).cpu() for part in parts]
    return found if reuse.extremes else [query.mean(0) for query in found]
