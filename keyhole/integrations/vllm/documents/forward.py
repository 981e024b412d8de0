"""Computes tokens in the middle of a prompt whose other keys and values are in vLLM's pages.

vLLM computes a prompt from its first token without keys onwards. Here an additional forward pass of
its model computes any runs of earlier tokens: each run is a sequence of its own with the block
table of the request. A layer writes all keys of a pass before it attends, and a token reads up to
its own position, so later runs see the new keys of earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata

from keyhole.integrations.vllm.documents.layout import Layout

#: Called by each layer with its number and the rotated queries [T, Hq, D] of this rank.
Note = Callable[[int, Tensor], None]


def compute_runs(
    runner: Any,
    tokens: Sequence[int],
    runs: Sequence[Sequence[int]],
    layouts: Sequence[Layout],
    blocks: Sequence[int],
    note: Note | None = None,
) -> None:
    """Computes these runs of a prompt, first and last + 1, and writes their keys and values.

    tokens: of the prompt. layouts: one per layer; equal layers share one object. blocks: the
    request's blocks. runner: vLLM's, on this rank; all ranks must call this in the same step.
    """
    table = torch.tensor(blocks, dtype=torch.int64)
    for part in _parts(runs, int(runner.max_num_tokens)):
        _forward(runner, tokens, part, layouts, table, note)


def _parts(runs: Sequence[Sequence[int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """The runs in passes of at most `most` tokens."""
    part: list[tuple[int, int]] = []
    room = most
    for first, stop in runs:
        start = first
        while start < stop:
            end = min(stop, start + room)
            part.append((start, end))
            room -= end - start
            start = end
            if not room:
                yield part
                part, room = [], most
    if part:
        yield part


def _forward(
    runner: Any,
    tokens: Sequence[int],
    runs: list[tuple[int, int]],
    layouts: Sequence[Layout],
    blocks: Tensor,
    note: Note | None,
) -> None:
    device, config = runner.device, runner.vllm_config
    positions = torch.cat([torch.arange(*run) for run in runs])
    ids = torch.tensor([tokens[i] for i in positions.tolist()], dtype=torch.int32)
    metadata: dict[str, Any] = {}
    slots: dict[str, Tensor] = {}
    for group in runner.attn_groups[0]:
        builder = group.get_metadata_builder(0)
        page = int(builder.kv_cache_spec.block_size)
        built: dict[int, tuple[Any, Tensor]] = {}
        for name in group.layer_names:
            layout = layouts[extract_layer_index(name)]
            if id(layout) not in built:
                common = _metadata(runs, positions, layout, blocks, page, device)
                made = builder.build(0, common)
                made.keyhole_note = note
                built[id(layout)] = made, common.slot_mapping
            metadata[name], slots[name] = built[id(layout)]
    with set_forward_context(metadata, config, num_tokens=len(positions), slot_mapping=slots):
        runner.model(
            input_ids=ids.to(device),
            positions=positions.to(device),
            intermediate_tensors=None,
            inputs_embeds=None,
        )


def _metadata(
    runs: list[tuple[int, int]],
    positions: Tensor,
    layout: Layout,
    blocks: Tensor,
    page: int,
    device: torch.device,
) -> CommonAttentionMetadata:
    """Metadata in which each run is a sequence. page: tokens per page of the kernels; a block may
    have several.
    """
    counts = torch.tensor([stop - start for start, stop in runs])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    lengths = layout.places(torch.tensor([stop - 1 for _, stop in runs])).int() + 1
    per_block = layout.page_size // page
    there = layout.order[layout.order < len(blocks)]
    table = (blocks[there][:, None] * per_block + torch.arange(per_block)).flatten().int()
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(runs),
        num_actual_tokens=len(positions),
        max_query_len=int(counts.max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table.repeat(len(runs), 1).to(device),
        slot_mapping=layout.slots(positions, blocks).to(device),
        causal=True,
        is_prefilling=torch.ones(len(runs), dtype=torch.bool),
        positions=positions.to(device),
    )
