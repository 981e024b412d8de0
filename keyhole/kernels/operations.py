"""The operations that backends compute, and the choice of the backend that computes a call.

An operation is defined by a function in plain PyTorch in `reference`, its twin: the twin's
signature is the operation's, its docstring says what goes in and out, and its result is the right
one. A backend's function has the same name and signature: C++ on a CPU (`cpu`, `cpu_attention`,
`cpu_layers`), Triton and FlashAttention on a GPU (`triton`). The twin computes operands that the
backend of their device does not accept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

from keyhole.kernels import cpu, cpu_attention, cpu_layers, reference, triton
from keyhole.kernels.selection import LowRank, Selection
from keyhole.kernels.triton import flash_attention

P = ParamSpec("P")
R = TypeVar("R")


def operation(
    twin: Callable[P, R],
    on_cpu: Callable[P, R] | None = None,
    takes: Callable[..., bool] = cpu.takes,
) -> Callable[P, R]:
    """The operation that `twin` defines, with its signature; on_cpu: the C++ extension's function.

    takes: whether that accepts the tensors among the operands.

    A Triton kernel is found by the twin's name. Any CUDA tensor among the operands makes it a call
    for the GPU; others may then be in pinned host memory.
    """
    name = twin.__name__

    @functools.wraps(twin)
    def dispatched(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors, chosen = _tensors((*args, *kwargs.values())), twin
        if on_cpu is not None and takes(*tensors):
            chosen = on_cpu
        elif _use_triton and triton.has(name) and any(x.is_cuda for x in tensors):
            chosen = triton.operation(name) if triton.takes(name, *tensors) else twin
        if not profiler._is_profiler_enabled:
            return chosen(*args, **kwargs)
        with profiler.record_function(f"keyhole::{name}"):
            return chosen(*args, **kwargs)

    return dispatched


def _tensors(operands: tuple[object, ...]) -> list[Tensor]:
    """The tensors among the operands; of low-rank keys those that have the keys' dtype."""
    found: list[Tensor] = []
    for operand in operands:
        if isinstance(operand, Tensor):
            found.append(operand)
        elif isinstance(operand, Selection):
            found += (operand.indices, operand.counts)
        elif isinstance(operand, LowRank):
            found += (operand.coefficients, operand.basis)
        elif isinstance(operand, tuple):
            found += _tensors(operand)
    return found


_use_triton = True


def use_triton(wanted: bool) -> None:
    """Turns the Triton kernels on or off (on by default); a benchmark compares both."""
    global _use_triton
    _use_triton = wanted


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


append = operation(reference.append, cpu.append)
attend = operation(reference.attend, cpu_attention.attend)
attend_and_score = operation(reference.attend_and_score, cpu_attention.attend_and_score)
head_scores = operation(reference.head_scores, cpu_attention.head_scores, cpu.takes_columns)
prefill = operation(reference.prefill, cpu_attention.prefill)
sparse_prefill = operation(reference.sparse_prefill, cpu_attention.sparse_prefill)
block_sparse_prefill = operation(reference.block_sparse_prefill, cpu_attention.block_sparse_prefill)
page_bounds = operation(reference.page_bounds, cpu.page_bounds, cpu.takes_columns)
bound_scores = operation(reference.bound_scores, cpu.bound_scores)
summary_scores = operation(reference.summary_scores, cpu.summary_scores)
spread_scores = operation(reference.spread_scores, cpu.spread_scores)
top_k = operation(reference.top_k, cpu.top_k)
top_p = operation(reference.top_p, cpu.top_p)
load_missing = operation(reference.load_missing, cpu.load_missing)
linear = operation(reference.linear, cpu_layers.linear)
packed_linear = operation(reference.packed_linear, cpu_layers.packed_linear)
unpack = operation(reference.unpack, cpu_layers.unpack)
shift_rope = operation(reference.shift_rope)
apply_rope = operation(reference.apply_rope, cpu_layers.apply_rope)
rms_norm = operation(reference.rms_norm, cpu_layers.rms_norm)
apply_rope_and_append = operation(reference.apply_rope_and_append, cpu_layers.apply_rope_and_append)
norm_linears = operation(reference.norm_linears, cpu_layers.norm_linears)
norm_swiglu = operation(reference.norm_swiglu, cpu_layers.norm_swiglu)
linear_add = operation(reference.linear_add, cpu_layers.linear_add)
