"""How the tokens of a decode step are split over the programs of a kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

#: tl.dot multiplies blocks of at least 16 rows.
_LEAST_ROWS, _MOST_ROWS = 16, 64
#: Splits are combined in one block of registers.
_MOST_SPLITS = 128
#: The fewest tokens that justify a program.
_LEAST_TOKENS = 128
#: Shared memory for 64 heads and two blocks of 32 tokens of MLA: an A100 and later have more,
#: consumer GPUs less.
_LARGE = 150_000


@dataclass(frozen=True)
class Split:
    """How `num_rows` sequences are split.

    rows: query heads of a group in one program, padded. blocks: programs per group. splits: splits
    of the tokens. tokens: tokens loaded at a time. stages: loads in flight.
    """

    rows: int
    blocks: int
    splits: int
    tokens: int
    stages: int


class Launch(NamedTuple):
    """Tokens at a time, loads in flight, and programs per multiprocessor at most."""

    tokens: int
    stages: int
    programs: int


#: By the bytes of a head up to which they count, and whether a selection lists the tokens; tuned on
#: an H200 (benchmarks/LOG.md). With three loads in flight listed tokens of 256 bytes failed under
#: Triton 3.6: illegal memory access.
_LAUNCHES = {
    (128, False): Launch(128, 2, 4),
    (128, True): Launch(128, 2, 3),
    (256, False): Launch(64, 2, 3),
    (256, True): Launch(128, 2, 1),
}


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
    launch = Launch(16 if small and size > 1024 else 32, 2, 2)
    if size <= 256:
        launch = Launch(64, 2, 2)
        if rows == _LEAST_ROWS and _shared_memory(device) >= _LARGE:
            launch = _LAUNCHES[128 if size <= 128 else 256, listed]
    programs = launch.programs * _multiprocessors(device)
    wanted = -(-programs // (num_rows * num_kv_heads * blocks))
    splits = max(1, min(wanted, -(-tokens // _LEAST_TOKENS), _MOST_SPLITS))
    return Split(rows, blocks, splits, launch.tokens, launch.stages)


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
