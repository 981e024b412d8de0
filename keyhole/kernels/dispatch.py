"""Dispatch of operations: by device through torch, then by operands in each implementation.

Each is registered as `torch.ops.keyhole.<name>`: the reference for any device, our C++ for the CPU
and Triton kernels and FlashAttention for a GPU. These fall back to the reference for operands that
they do not accept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from keyhole.kernels import cpu, cpu_attention, reference, triton
from keyhole.kernels.reference import (
    gathered_attention,
    low_rank,
    resident_buffer,
    rope,
    selections,
)
from keyhole.kernels.selection import ScoreRequest, Selection
from keyhole.kernels.triton import flash_attention

_library = Library("keyhole", "DEF")


def use_triton(wanted: bool) -> None:
    """Turns the Triton kernels on or off (on by default); a benchmark compares both."""
    global _triton
    _triton = wanted


_triton = True


def backend(device: torch.device) -> str:
    """The backend of a device, as text for people."""
    if device.type == "cuda":
        who = "Triton" if triton.usable() else "reference (PyTorch)"
        dense = flash_attention.version() if triton.usable() else None
        who += "" if dense is None else f", dense steps by {dense}"
        return f"{who}, prompts by FlashAttention" if triton.flash() else who
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


def _sparse_prefill(*operands: Any) -> Tensor:
    *paged, scale, window, softcap, sinks = operands
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    return gathered_attention.sparse_prefill(*paged, scale=scale, **options)


def _top_k(scores: Tensor, valid: Tensor, k: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    chosen = reference.top_k(scores, valid, k, 1, first=first, last=last)
    return chosen.indices, chosen.counts.contiguous()


def _trim(
    indices: Tensor, scores: Tensor, valid: Tensor, share: float, least: int, first: int, last: int
) -> tuple[Tensor, Tensor]:
    # The twin recognizes padding by -1 and needs no counts.
    whole, places = Selection(indices, indices, 1), {"least": least, "first": first, "last": last}
    left = selections.trim(whole, scores, valid, share, **places)
    return left.indices, left.counts


def _load_missing(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    *buffered, indices, unit = operands
    # The twin recognizes padding by -1 and needs no counts.
    found, moved = resident_buffer.load_missing(
        *buffered, selection=Selection(indices, indices, unit)
    )
    return found.indices, found.counts, moved


def _register(
    name: str,
    schema: str,
    plain: Callable[..., Any],
    on_cpu: Callable[..., Any],
    first: int | None = None,
) -> None:
    """first: check only this many operands against the CPU kernel's dtypes; None: all."""

    def chosen(*operands: Any) -> Any:
        return (on_cpu if cpu.takes(*operands[:first]) else plain)(*operands)

    def chosen_on_gpu(*operands: Any) -> Any:
        return (triton.operation(name) if _triton and triton.takes(name, *operands) else plain)(
            *operands
        )

    _library.define(name + schema)
    _library.impl(name, plain, "CompositeExplicitAutograd")
    _library.impl(name, chosen, "CPU")
    if triton.has(name):
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
    "attend_low_rank",
    f"{_PAGED}, Tensor indices, Tensor counts, Tensor coefficients, Tensor basis, Tensor first,"
    " Tensor taken, int chunk, float scale, float? softcap, Tensor? sinks, Tensor? frequencies,"
    " bool last) -> Tensor",
    low_rank.attend_low_rank,
    cpu_attention.attend_low_rank,
    first=-2,  # frequencies are float64
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
    "sparse_prefill",
    f"({_QKV}, Tensor pages, Tensor positions, Tensor chosen, float scale, int? window, {_REST}"
    " -> Tensor",
    _sparse_prefill,
    cpu_attention.sparse_prefill,
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
    "summary_scores",
    "(Tensor query, Tensor summaries, Tensor page_table, Tensor valid) -> Tensor",
    reference.summary_scores,
    cpu.summary_scores,
)
_register(
    "spread_scores",
    "(Tensor scores, Tensor numbers, Tensor page_table, int first, Tensor ends) -> Tensor",
    reference.spread_scores,
    cpu.spread_scores,
)
_register(
    "top_k",
    "(Tensor scores, Tensor valid, int k, int first, int last) -> (Tensor, Tensor)",
    _top_k,
    cpu.top_k,
)
_register(
    "trim",
    "(Tensor indices, Tensor scores, Tensor valid, float share, int least, int first, int last)"
    " -> (Tensor, Tensor)",
    _trim,
    cpu.trim,
)
_register(
    "shift_rope",
    "(Tensor x, Tensor by, Tensor frequencies, bool last) -> Tensor",
    rope.shift_rope,
    rope.shift_rope,
)
_register(
    "load_missing",
    "(Tensor(a!) entries, Tensor(b!) keys, Tensor(c!)? values, Tensor key_pages,"
    " Tensor? value_pages, Tensor page_table, Tensor lengths, Tensor rows, Tensor indices,"
    " int unit) -> (Tensor, Tensor, Tensor)",
    _load_missing,
    cpu.load_missing,
)
_register(
    "apply_rope",
    "(Tensor query, Tensor key, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    reference.apply_rope,
    reference.apply_rope,
)
_register(
    "linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor", reference.linear, cpu.linear
)
