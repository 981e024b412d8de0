"""The keys and values of one sequence, serialised as llama.cpp's state.

    magic, sequence, number of streams
    for each stream (one per sequence): number of cells, and only if there are any:
        position, number of owners, owner      for each cell
        are values transposed, number of layers
        type, bytes of a row, keys [N, Hkv, D]      for each layer
        the same with values, or if transposed:
        type, bytes of a number, Hkv * D, values [Hkv, D, N]      for each layer

This is the format of `llama_kv_cache::state_write` in the version that benchmarks/peers.txt names.
Values are transposed except with flash attention. llama.cpp's RoPE rotates adjacent pairs, so the
two halves of a head's keys are interleaved.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from keyhole.bench.model import RandomKV

#: ggml's type code of float16.
_F16 = 1
_MAGIC = 0xAF143CD8
_ITEM_BYTES = 2


def interleaved(heads: Tensor, dim: int) -> Tensor:
    """Interleaves the two halves of every head along `dim` (>= 0)."""
    first, second = heads.chunk(2, dim)
    return torch.stack([first, second], dim + 1).flatten(dim, dim + 1)


def num_bytes(numbers: RandomKV) -> int:
    """The size of one sequence's state; transposed values take the same size."""
    cells = numbers.context * struct.calcsize("<iIi")
    row = numbers.num_kv_heads * numbers.head_dim * _ITEM_BYTES
    tensors = 2 * numbers.num_layers * (struct.calcsize("<iQ") + numbers.context * row)
    return struct.calcsize("<IiI") + 4 * numbers.batch + cells + struct.calcsize("<II") + tensors


def pieces(numbers: RandomKV, sequence: int, transposed: bool) -> Iterator[bytes | memoryview]:
    """Yields the state of one sequence in pieces, with one layer in memory at a time."""
    before, after = sequence, numbers.batch - 1 - sequence
    yield struct.pack("<IiI", _MAGIC, sequence, numbers.batch) + bytes(4 * before)
    yield struct.pack("<I", numbers.context)
    cells = np.empty((numbers.context, 3), "<i4")
    cells[:, 0] = np.arange(numbers.context)
    cells[:, 1:] = 1, sequence
    yield cells.tobytes()
    yield struct.pack("<II", transposed, numbers.num_layers)
    width = numbers.num_kv_heads * numbers.head_dim
    for layer in range(numbers.num_layers):
        yield struct.pack("<iQ", _F16, width * _ITEM_BYTES)
        yield _bytes(interleaved(numbers.keys(layer, sequence), 2).transpose(0, 1))
    for layer in range(numbers.num_layers):
        values = numbers.values(layer, sequence)
        if transposed:
            yield struct.pack("<iII", _F16, _ITEM_BYTES, width)
            yield _bytes(values.transpose(1, 2))
        else:
            yield struct.pack("<iQ", _F16, width * _ITEM_BYTES)
            yield _bytes(values.transpose(0, 1))
    yield bytes(4 * after)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.to("cpu", torch.float16).contiguous().numpy().data.cast("B")
