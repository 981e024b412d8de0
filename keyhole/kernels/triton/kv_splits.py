"""How a decode step is divided into programs: rows of query heads, and splits of tokens.

Split-K attention (Flash-Decoding): each split of a sequence's tokens returns the largest score, the
sum of exponentials and the weighted values; a second kernel combines the splits. Their number
depends on shapes only; the tokens per split depend on the sequence's length, read on the device, so
that every split has work in long and in short sequences.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

#: tl.dot multiplies blocks of at least 16 rows.
_LEAST_ROWS, _MOST_ROWS = 16, 64
#: Splits are combined in one block of registers.
_MOST_SPLITS = 128
#: The fewest tokens that justify a program.
_LEAST_TOKENS = 128
#: Programs per multiprocessor, so that one computes while another loads.
_PROGRAMS = 2
#: Shared memory for 64 heads and two blocks of 32 tokens of MLA: an A100 and later have more,
#: consumer GPUs less.
_LARGE = 150_000


@dataclass(frozen=True)
class Split:
    """How `num_rows` sequences are split.

    rows: query heads of a group in one program, padded. blocks: programs per group. splits: splits
    of the tokens. tokens: tokens loaded at a time.
    """

    rows: int
    blocks: int
    splits: int
    tokens: int


def split(query: Tensor, num_kv_heads: int, tokens: int, *, listed: bool = False) -> Split:
    """For a query [B, Hq, D] of sequences that read at most `tokens` tokens each.

    listed: whether a selection lists them. The numbers were tuned on an H200 (benchmarks/LOG.md).
    """
    num_rows, num_heads, dim = query.shape
    group = num_heads // num_kv_heads
    size, device = dim * query.itemsize, query.device
    # float32 products do not use tensor cores; large blocks of them take minutes to compile.
    small = query.dtype == torch.float32 or (size > 512 and _shared_memory(device) < _LARGE)
    rows = min(_LEAST_ROWS if small else _MOST_ROWS, triton.next_power_of_2(group))
    rows = max(_LEAST_ROWS, rows)
    blocks = -(-group // rows)
    wanted = -(-_PROGRAMS * _multiprocessors(device) // (num_rows * num_kv_heads * blocks))
    splits = max(1, min(wanted, -(-tokens // _LEAST_TOKENS), _MOST_SPLITS))
    at_a_time = 64 if size <= 256 else 16 if small and size > 1024 else 32
    if listed and size <= 256 and rows == _LEAST_ROWS and _shared_memory(device) >= _LARGE:
        at_a_time = 128  # listed tokens need a lookup first: more loads must be in flight
    return Split(rows, blocks, splits, at_a_time)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """16 under the interpreter, so that tests there cover splits."""
    if device.type != "cuda":
        return 16
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use."""
    if device.type != "cuda":
        return _LARGE
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def two_parts(dim: int) -> tuple[int, int]:
    """A head size as the sum of two powers of two: the first fits in it, the second is padded.

    MLA's 576 would have to be padded to 1024; 512 + 64 is exact, and so are 80 and 96.
    """
    first = max(16, 1 << (dim.bit_length() - 1))
    rest = dim - first
    return first, max(16, triton.next_power_of_2(rest)) if rest > 0 else 0


def in_float32(tensor: Tensor) -> bool:
    """Whether products are computed in float32.

    Under the interpreter bfloat16 is too: it stores bfloat16 as integers and would multiply those.
    """
    interpreted = tensor.device.type != "cuda" and tensor.dtype == torch.bfloat16
    return tensor.dtype == torch.float32 or interpreted
