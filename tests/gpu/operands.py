"""What the tests of the Triton kernels share: shapes and types, random pages, and a way to call.

On a GPU kernels are called by way of the dispatcher. `test_interpreted.py` runs their tests with
TRITON_INTERPRET=1, on tensors of the CPU; and with KEYHOLE_COMPILE_ONLY, where a launch only
compiles and no result counts (`compile_only.py`).
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from keyhole.kernels import Selection, operations, reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILED = os.environ.get("KEYHOLE_COMPILE_ONLY")  # all, few, or not at all
DEVICE = "cpu" if INTERPRETED or COMPILED else "cuda"
#: Of every file with tests of these.
MARKS = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)

PAGE = 16
#: Relative to the largest number: sums in another order; weights and results in the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
#: The values are the first numbers of the keys.
MLA = ((96, 40), (24, 16), (576, 512))
#: KV heads, group, key dim, value dim.
SHAPES = ((2, 3, 64, 32), (1, 1, 16, 16), (2, 4, 80, 80), (1, 20, 96, 40), (1, 66, 24, 16))
LENGTHS = (2 * PAGE, 150) if DEVICE == "cpu" else (1, PAGE - 1, PAGE, 300, 4097, 9000)
#: With the values among the keys, one KV head for all query heads.
LATENTS = ((1, 20, 96, 40), (1, 6, 24, 16))
if not INTERPRETED:
    LATENTS += ((1, 16, 576, 512),)
    SHAPES += ((8, 4, 128, 128), (2, 2, 256, 256), (1, 128, 576, 512))
#: Of prompts. A program has one query head: the interpreter runs few, a GPU as many as in decoding.
PROMPTS = tuple((h, min(g, 3), *dims) for h, g, *dims in SHAPES) if INTERPRETED else SHAPES
#: For cases that no shape distinguishes: every dtype in turn, except in a quick compiler check.
EACH_DTYPE = DTYPES[2:] if COMPILED == "few" else DTYPES


def cases(shapes: tuple[tuple[int, ...], ...]) -> pytest.MarkDecorator:
    """Shapes with all types in turn, and on a GPU with bfloat16 too.

    On a GPU each is compiled, which takes a second; under the interpreter it takes one to run.
    """
    found = [(shape, DTYPES[i % len(DTYPES)]) for i, shape in enumerate(shapes)]
    if COMPILED == "few":
        found = [(shapes[0], torch.bfloat16)]
    elif not INTERPRETED:
        found += [
            (shape, torch.bfloat16) for shape in shapes if (shape, torch.bfloat16) not in found
        ]
    return pytest.mark.parametrize(("shape", "dtype"), found)


# Interpreted or compiled here they are called by name, as the dispatcher has them on a GPU alone.
gpu = importlib.import_module("keyhole.kernels.triton") if DEVICE == "cpu" else None


@dataclass
class Cache:
    """Random pages of sequences of different lengths; NaN where no token is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    size: int = PAGE

    def __post_init__(self) -> None:
        heads, group, dim, value_dim = self.shape
        random = torch.Generator().manual_seed(sum(self.shape))
        counts = [-(-length // self.size) for length in LENGTHS]
        order = torch.randperm(sum(counts), generator=random).split(counts)
        table = torch.zeros(len(LENGTHS), max(counts) + 1, dtype=torch.int32)
        keys = torch.randn(sum(counts), heads, self.size, dim, generator=random)
        values = torch.randn(sum(counts), heads, self.size, value_dim, generator=random)
        for row, (pages, length) in enumerate(zip(order, LENGTHS, strict=True)):
            table[row, : len(pages)] = pages
            filled = (length - 1) % self.size + 1
            keys[pages[-1], :, filled:] = values[pages[-1], :, filled:] = torch.nan
        self.keys = keys.to(DEVICE, self.dtype)
        self.values = values.to(DEVICE, self.dtype)
        if (dim, value_dim) in MLA:
            self.values = self.keys[..., :value_dim]
        query = torch.randn(len(LENGTHS), heads * group, dim, generator=random)
        self.query = query.to(DEVICE, self.dtype)
        self.sinks = torch.randn(heads * group, generator=random).to(DEVICE, self.dtype)
        self.table = table.to(DEVICE)
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
        self.scale = dim**-0.5
        self.random = random

    def quantise(self, kv_dtype: torch.dtype) -> None:
        """Stores keys and values in 8 bits; where no token is, the scale is NaN."""
        self.keys, self.values = (reference.quantise(x, kv_dtype) for x in (self.keys, self.values))

    @property
    def paged(self) -> tuple[Tensor, ...]:
        return self.query, self.keys, self.values, self.table, self.lengths

    def selection(self, k: int, unit: int, lists: int) -> Selection:
        """The best of random scores, and the newest."""
        entries = self.table.shape[1] * self.size // unit
        scores = torch.randn(len(LENGTHS), lists, entries, generator=self.random).to(DEVICE)
        valid = (self.lengths + unit - 1) // unit
        return reference.top_k(scores, valid, k, unit, last=1)


def run(name: str, *operands: Any, **options: Any) -> Any:
    """By the kernel itself where it is interpreted, else by way of the dispatcher."""
    if gpu is not None:
        return gpu.operation(name)(*operands, **options)
    assert operations.backend(torch.device(DEVICE)).startswith("Triton")
    return getattr(operations, name)(*operands, **options)


def check(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    if COMPILED:  # what follows is to be compiled, too
        return
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert not found.isnan().any()
    allowed = TOLERANCE[dtype] * wanted.float().abs().max() + 1e-6
    assert (found.float() - wanted.float()).abs().max() <= allowed


def twice(tensor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return tensor, None if tensor is None else tensor.clone()
