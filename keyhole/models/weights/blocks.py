"""llama.cpp's blocks of weights, Q8_0, Q4_0, Q4_K, Q5_K and Q6_K, multiplied as they are stored.

A row of a matrix is cut into blocks with scales of their own (ggml-quants.c in llama.cpp):

    Q8_0: 32 weights, d * q, with q from -128 to 127
    Q4_0: 32 weights, d * (q - 8), with q from 0 to 15
    Q4_K: 256 weights in 8 groups of 32, d * s * q - e * m, with q from 0 to 15
    Q5_K: as Q4_K, with q from 0 to 31
    Q6_K: 256 weights in 16 groups of 16, d * s * (q - 32), with q from 0 to 63

d and e are float16, s and m whole numbers of 6 bits, in Q6_K of 8 bits with a sign. Each format is
an affine code of groups of weights, as `kernels.packed_linear` multiplies them; the codes are put
in its order once. Codes of 5 bits take 6. The scales stay as small as they are; products make them
float32, which holds them exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.kernels import BlockWeight, join_codes

#: Weights of a group of Q4_K and Q5_K.
_GROUP = 32


def from_q8_0(data: Tensor) -> BlockWeight:
    """Q8_0 from the bytes of its rows, uint8 [O, I / 32 * 34]."""
    blocks = data.unflatten(1, (-1, 34))
    codes = (blocks[..., 2:] ^ 128).flatten(1)  # from -128..127 to 0..255
    return BlockWeight(codes, blocks[..., :2].contiguous(), _no_groups(data), 8)


def from_q4_0(data: Tensor) -> BlockWeight:
    """Q4_0 from the bytes of its rows, uint8 [O, I / 32 * 18]."""
    blocks = data.unflatten(1, (-1, 18))
    # Byte j of a block holds weights j and j + 16; ours, of two blocks, j and j + 32.
    first, second = blocks[..., 2:].unflatten(1, (-1, 2)).unbind(2)
    low = (first & 15) | (second & 15) << 4
    high = (first >> 4) | (second & 240)
    codes = torch.cat([low, high], 2).flatten(1)
    return BlockWeight(codes, blocks[..., :2].contiguous(), _no_groups(data), 4)


def from_q4_k(data: Tensor) -> BlockWeight:
    """Q4_K from the bytes of its rows, uint8 [O, I / 256 * 144]."""
    blocks = data.unflatten(1, (-1, 144))
    codes = blocks[..., 16:].flatten(1).contiguous()  # in our order already
    return BlockWeight(codes, blocks[..., :4].contiguous(), _groups(blocks), 4)


def from_q5_k(data: Tensor) -> BlockWeight:
    """Q5_K from the bytes of its rows, uint8 [O, I / 256 * 176]."""
    blocks = data.unflatten(1, (-1, 176))
    # Bit g of byte j is the fifth bit of weight j of group g; two groups share each 32 bytes of
    # lower bits.
    fifth = blocks[..., None, 16:48] >> _shifts(data, 8, 1) & 1
    lower = blocks[..., 48:].unflatten(2, (-1, _GROUP))
    codes = torch.stack([lower & 15, lower >> 4], 3).flatten(2, 3) | fifth << 4
    codes = join_codes(codes.flatten(1), 6)
    return BlockWeight(codes, blocks[..., :4].contiguous(), _groups(blocks), 6)


def from_q6_k(data: Tensor) -> BlockWeight:
    """Q6_K from the bytes of its rows, uint8 [O, I / 256 * 210]."""
    blocks = data.unflatten(1, (-1, 210))
    # Of each 128 weights, byte j holds the lower bits of weights j and j + 64; byte j of the upper
    # bits holds those of weights j, j + 32, j + 64 and j + 96, from below.
    lower = blocks[..., :128].unflatten(2, (2, 1, 64)) >> _shifts(data, 2, 4) & 15
    upper = blocks[..., 128:192].unflatten(2, (2, 1, 32)) >> _shifts(data, 4, 2) & 3
    codes = join_codes(lower.flatten(1) | upper.flatten(1) << 4, 6)
    scales = blocks[..., 192:208].reshape(len(data), 1, -1).view(torch.int8)
    return BlockWeight(codes, blocks[..., 208:].contiguous(), scales, 6)


def _shifts(data: Tensor, count: int, bits: int) -> Tensor:
    """By how much `count` parts of a byte are shifted, uint8 [count, 1]."""
    return torch.arange(0, count * bits, bits, dtype=torch.uint8, device=data.device)[:, None]


def _groups(blocks: Tensor) -> Tensor:
    """The scale and the minimum of each group, uint8 [O, 2, I / 32], from Q4_K or Q5_K blocks."""
    packed = blocks[..., 4:16]
    first, second, rest = packed.split(4, 2)
    # The first four scales and minimums are 6 bits of a byte; the two bits above them belong to the
    # other four, whose lower bits share a byte.
    scales = torch.cat([first & 63, (rest & 15) | (first >> 6) << 4], 2)
    minimums = torch.cat([second & 63, (rest >> 4) | (second >> 6) << 4], 2)
    return torch.stack([scales.flatten(1), minimums.flatten(1)], 1)


def _no_groups(data: Tensor) -> Tensor:
    return data.new_empty(len(data), 0, 0)


#: How each format is read, by its name.
FORMATS = {
    "Q8_0": from_q8_0,
    "Q4_0": from_q4_0,
    "Q4_K": from_q4_k,
    "Q5_K": from_q5_k,
    "Q6_K": from_q6_k,
}
