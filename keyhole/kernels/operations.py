"""The operations as everybody calls them; torch's dispatcher picks who computes.

Each is registered as `torch.ops.keyhole.<name>`: the reference for any device, our C++ for the CPU
and Triton kernels and FlashAttention for a GPU; these leave to the reference what they do not take.
Signature, shapes and meaning stand with the twin of the same name in `reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from keyhole.kernels import (
    blocks,
    chosen,
    chunks,
    clusters,
    cpu,
    cpu_attention,
    elastic,
    gpu,
    keeping,
    low_rank,
    reference,
    rotation,
    stamps,
    trimming,
)
from keyhole.kernels.gpu import paged_flash
from keyhole.kernels.selection import ScoreRequest, Selection

_library = Library("keyhole", "DEF")


def append(
    key_pages: Tensor,
    value_pages: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    slots: Tensor,
) -> None:
    """Writes new tokens into their pages, in place."""
    torch.ops.keyhole.append(key_pages, value_pages, key, value, slots)


def attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    selection: Selection | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query token per sequence over all, some pages or some tokens, [B, Hq, Dv]."""
    paged = (query, key_pages, value_pages, page_table, lengths)
    chosen = (None, None, 1)
    if selection is not None:
        chosen = (selection.indices, selection.counts, selection.unit)  # type: ignore[assignment]
    out: Tensor = torch.ops.keyhole.attend(*paged, *chosen, scale, window, softcap, sinks)
    return out


def attend_and_score(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    requests: tuple[ScoreRequest, ...],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`attend` over everything, and for each request the reduced weights, float32 [B, H, n]."""
    paged = (query, key_pages, value_pages, page_table, lengths)
    reduces, units = [r.reduce for r in requests], [r.unit for r in requests]
    out, scores = torch.ops.keyhole.attend_and_score(*paged, reduces, units, scale, softcap, sinks)
    return out, tuple(scores)


def head_scores(
    query: Tensor, key_pages: Tensor, page_table: Tensor, lengths: Tensor, *, scale: float
) -> Tensor:
    """Attention weights of each query head, the largest of each group: float32 [B, Hkv, N]."""
    scores: Tensor = torch.ops.keyhole.head_scores(query, key_pages, page_table, lengths, scale)
    return scores


def prefill(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    start: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of one sequence's tokens start .. start + T - 1, [T, Hq, Dv]."""
    out: Tensor = torch.ops.keyhole.prefill(
        query, key_pages, value_pages, pages, start, scale, window, softcap, sinks
    )
    return out


def prefill_chosen(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    pages: Tensor,
    positions: Tensor,
    tokens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of tokens at any places over chosen tokens that are not after them, [T, Hq, Dv]."""
    paged = (query, key_pages, value_pages, pages, positions, tokens)
    out: Tensor = torch.ops.keyhole.prefill_chosen(*paged, scale, window, softcap, sinks)
    return out


def page_bounds(
    key_pages: Tensor, low: Tensor, high: Tensor, pages: Tensor, filled: Tensor
) -> None:
    """Elementwise bounds of the keys of some pages, written in place."""
    torch.ops.keyhole.page_bounds(key_pages, low, high, pages, filled)


def bound_scores(query: Tensor, low: Tensor, high: Tensor, page_table: Tensor) -> Tensor:
    """Quest's bound of a query's score on every page, float32 [B, Hkv, M]."""
    scores: Tensor = torch.ops.keyhole.bound_scores(query, low, high, page_table)
    return scores


def top_indices(
    scores: Tensor, valid: Tensor, k: int, unit: int, *, first: int = 0, last: int = 0
) -> Selection:
    """The k best entries of each row; equal scores go to the earlier entry."""
    indices, counts = torch.ops.keyhole.top_indices(scores, valid, k, first, last)
    return Selection(indices, counts, unit)


def trim(
    chosen: Selection,
    scores: Tensor,
    valid: Tensor,
    share: float,
    *,
    least: int = 0,
    first: int = 0,
    last: int = 0,
) -> Selection:
    """As much of a choice as a share of the scores asks for."""
    places = (least, first, last)
    left, counts = torch.ops.keyhole.trim(chosen.indices, scores, valid, share, *places)
    return Selection(left, counts, chosen.unit)


def rotate(x: Tensor, by: Tensor, frequencies: Tensor, last: bool) -> Tensor:
    """Vectors rotated at any positions, turned `by` more; a new tensor."""
    turned: Tensor = torch.ops.keyhole.rotate(x, by, frequencies, last)
    return turned


def exchange(
    entries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    key_pages: Tensor,
    value_pages: Tensor | None,
    page_table: Tensor,
    lengths: Tensor,
    rows: Tensor,
    *,
    selection: Selection,
) -> tuple[Selection, Tensor]:
    """Brings what is selected into the buffers of sequences; what is there already stays."""
    chosen = (selection.indices, selection.unit)
    assert selection.indices.shape[2] < entries.shape[2], "the last slot is the newest entry's"
    used, counts, moved = torch.ops.keyhole.exchange(
        entries, keys, values, key_pages, value_pages, page_table, lengths, rows, *chosen
    )
    return Selection(used, counts, selection.unit), moved


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X W^T + bias for a few tokens, [..., O]."""
    out: Tensor = torch.ops.keyhole.linear(x, weight, bias)
    return out


recent_indices = reference.recent_indices
attend_and_score_chosen = chosen.attend_and_score_chosen
head_scores_chosen, gather_tokens = chosen.head_scores_chosen, chosen.gather_tokens
representative_keys = blocks.representative_keys
form_clusters, cluster_scores = clusters.form_clusters, clusters.cluster_scores
block_scores, block_pages = blocks.block_scores, blocks.block_pages
keep, kept, with_newer = keeping.keep, keeping.kept, keeping.with_newer
chunk_landmarks, chunk_scores = chunks.chunk_landmarks, chunks.chunk_scores
outlier_chunks = chunks.outlier_chunks
decompose, rebuilt_keys = low_rank.decompose, low_rank.rebuilt_keys
gather_selected, own_pages = low_rank.gather_selected, low_rank.own_pages
renew_stamps, drop_oldest = stamps.renew_stamps, stamps.drop_oldest


def use_triton(wanted: bool) -> None:
    """Whether Triton computes on a GPU what it can, as it does; a benchmark needs both."""
    global _triton
    _triton = wanted


_triton = True


def backend(device: torch.device) -> str:
    """Who computes on a device, for people."""
    if device.type == "cuda":
        who = "Triton" if gpu.usable() else "reference (PyTorch)"
        dense = paged_flash.version() if gpu.usable() else None
        who += "" if dense is None else f", dense steps by {dense}"
        return f"{who}, prompts by FlashAttention" if gpu.flash() else who
    if device.type != "cpu" or cpu.current() == cpu.REFERENCE:
        return "reference (PyTorch)"
    return f"C++ ({cpu.current()})"


def _attend(*operands: Any) -> Tensor:
    *paged, indices, counts, unit, scale, window, softcap, sinks = operands
    selection = None if indices is None else Selection(indices, counts, unit)
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    return reference.attend(*paged, selection=selection, scale=scale, **options)


def _attend_and_score(*operands: Any) -> tuple[Tensor, list[Tensor]]:
    *paged, reduces, units, scale, softcap, sinks = operands
    requests = tuple(ScoreRequest(*pair) for pair in zip(reduces, units, strict=True))
    options = {"requests": requests, "scale": scale, "softcap": softcap, "sinks": sinks}
    out, scores = reference.attend_and_score(*paged, **options)
    return out, list(scores)


def _attend_and_score_on_cpu(*operands: Any) -> tuple[Tensor, list[Tensor]]:
    reduces = operands[5]
    return (_attend_and_score if "none" in reduces else cpu_attention.attend_and_score)(*operands)


def _head_scores(*operands: Any) -> Tensor:
    *paged, scale = operands
    return reference.head_scores(*paged, scale=scale)


def _prefill(*operands: Any) -> Tensor:
    *paged, scale, window, softcap, sinks = operands
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    return reference.prefill(*paged, scale=scale, **options)


def _prefill_chosen(*operands: Any) -> Tensor:
    *paged, scale, window, softcap, sinks = operands
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    return chosen.prefill_chosen(*paged, scale=scale, **options)


def _top_indices(
    scores: Tensor, valid: Tensor, k: int, first: int, last: int
) -> tuple[Tensor, Tensor]:
    chosen = reference.top_indices(scores, valid, k, 1, first=first, last=last)
    return chosen.indices, chosen.counts.contiguous()


def _trim(
    indices: Tensor, scores: Tensor, valid: Tensor, share: float, least: int, first: int, last: int
) -> tuple[Tensor, Tensor]:
    # The twin knows padding by -1 and asks for no counts.
    whole, places = Selection(indices, indices, 1), {"least": least, "first": first, "last": last}
    left = trimming.trim(whole, scores, valid, share, **places)
    return left.indices, left.counts


def _exchange(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    *buffered, indices, unit = operands
    # The twin knows padding by -1 and asks for no counts.
    found, moved = elastic.exchange(*buffered, selection=Selection(indices, indices, unit))
    return found.indices, found.counts, moved


def _register(
    name: str, schema: str, plain: Callable[..., Any], on_cpu: Callable[..., Any]
) -> None:
    def chosen(*operands: Any) -> Any:
        return (on_cpu if cpu.takes(*operands) else plain)(*operands)

    def chosen_on_gpu(*operands: Any) -> Any:
        return (gpu.operation(name) if _triton and gpu.takes(name, *operands) else plain)(*operands)

    _library.define(name + schema)
    _library.impl(name, plain, "CompositeExplicitAutograd")
    _library.impl(name, chosen, "CPU")
    if gpu.has(name):
        _library.impl(name, chosen_on_gpu, "CUDA")


_QKV = "Tensor query, Tensor key_pages, Tensor value_pages"
_PAGED = f"({_QKV}, Tensor page_table, Tensor lengths"
_REST = "float? softcap, Tensor? sinks)"
_register(
    "append",
    "(Tensor(a!) key_pages, Tensor(b!)? value_pages, Tensor key, Tensor? value, Tensor slots)"
    " -> ()",
    reference.append,
    cpu.append,
)
_register(
    "attend",
    f"{_PAGED}, Tensor? indices, Tensor? counts, int unit, float scale, int? window, {_REST}"
    " -> Tensor",
    _attend,
    cpu_attention.attend,
)
_register(
    "attend_and_score",
    f"{_PAGED}, str[] reduces, int[] units, float scale, {_REST} -> (Tensor, Tensor[])",
    _attend_and_score,
    _attend_and_score_on_cpu,
)
_register(
    "head_scores",
    "(Tensor query, Tensor key_pages, Tensor page_table, Tensor lengths, float scale) -> Tensor",
    _head_scores,
    cpu_attention.head_scores,
)
_register(
    "prefill",
    f"({_QKV}, Tensor pages, int start, float scale, int? window, {_REST} -> Tensor",
    _prefill,
    cpu_attention.prefill,
)
_register(
    "prefill_chosen",
    f"({_QKV}, Tensor pages, Tensor positions, Tensor chosen, float scale, int? window, {_REST}"
    " -> Tensor",
    _prefill_chosen,
    cpu_attention.prefill_chosen,
)
_register(
    "page_bounds",
    "(Tensor key_pages, Tensor(a!) low, Tensor(b!) high, Tensor pages, Tensor filled) -> ()",
    reference.page_bounds,
    cpu.page_bounds,
)
_register(
    "bound_scores",
    "(Tensor query, Tensor low, Tensor high, Tensor page_table) -> Tensor",
    reference.bound_scores,
    cpu.bound_scores,
)
_register(
    "top_indices",
    "(Tensor scores, Tensor valid, int k, int first, int last) -> (Tensor, Tensor)",
    _top_indices,
    cpu.top_indices,
)
_register(
    "trim",
    "(Tensor indices, Tensor scores, Tensor valid, float share, int least, int first, int last)"
    " -> (Tensor, Tensor)",
    _trim,
    cpu.trim,
)
_register(
    "rotate",
    "(Tensor x, Tensor by, Tensor frequencies, bool last) -> Tensor",
    rotation.rotate,
    rotation.rotate,
)
_register(
    "exchange",
    "(Tensor(a!) entries, Tensor(b!) keys, Tensor(c!)? values, Tensor key_pages,"
    " Tensor? value_pages, Tensor page_table, Tensor lengths, Tensor rows, Tensor indices,"
    " int unit) -> (Tensor, Tensor, Tensor)",
    _exchange,
    cpu.exchange,
)
_register(
    "linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor", reference.linear, cpu.linear
)
