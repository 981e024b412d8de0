"""llama.cpp's blocks of weights, Q8_0, Q4_0, Q4_K and Q5_K, multiplied as they are stored.

A row of a matrix is cut into blocks with scales of their own (ggml-quants.c in llama.cpp):

    Q8_0: 32 weights, d * q, with q from -128 to 127
    Q4_0: 32 weights, d * (q - 8), with q from 0 to 15
    Q4_K: 256 weights in 8 groups of 32, d * s * q - e * m, with q from 0 to 15
    Q5_K: as Q4_K, with q from 0 to 31

d and e are float16, s and m whole numbers of 6 bits. Each is an affine code of groups of 32
weights, as `kernels.packed_linear` multiplies them; the codes are put in its order once. Codes
of 5 bits take 8. The scales stay as small as they are and are expanded to float32 at each product,
which holds them exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keyhole.kernels import PackedWeight

#: Weights that share a scale and a minimum in all formats.
_GROUP = 32
#: Groups of a block of Q4_K and Q5_K.
_GROUPS = 8


class BlockWeight(NamedTuple):
    """A weight [O, I] in blocks, with I a multiple of 64.

    codes: uint8 [O, I * bits / 8], as in `PackedWeight`. block_scales: float16 numbers, as their
    bytes: uint8 [O, I / 32, 2] the scale of each block, or [O, I / 256, 4] the scale of a block's
    scales and that of its minimums. group_scales: uint8 [O, I / 32, 2], the scale and the minimum
    of each group in these; [O, 0, 2] for blocks of one group. bits: 4 or 8.
    """

    codes: Tensor
    block_scales: Tensor
    group_scales: Tensor
    bits: int

    def rows(self, which: slice | Tensor) -> BlockWeight:
        """The weight of some outputs."""
        codes, block_scales, group_scales = (part[which] for part in self[:3])
        return BlockWeight(codes, block_scales, group_scales, self.bits)

    def expand(self) -> PackedWeight:
        """The same weight with scales and minimums of all groups, in float32."""
        scales = self.block_scales.view(torch.float16).float()
        if not self.group_scales.shape[1]:
            scale = scales[..., 0]
            return PackedWeight(self.codes, scale, scale * -(1 << self.bits - 1), self.bits)
        groups = self.group_scales.unflatten(1, (-1, _GROUPS))
        both = scales[:, :, None] * groups
        scale, minimum = both.flatten(1, 2).unbind(2)
        return PackedWeight(self.codes, scale.contiguous(), minimum.neg(), self.bits)


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
    groups = torch.arange(_GROUPS, dtype=torch.uint8, device=data.device)
    fifth = (blocks[..., 16:48].unsqueeze(-2) >> groups[:, None]) & 1
    lower = blocks[..., 48:].unflatten(2, (-1, _GROUP))
    codes = torch.stack([lower & 15, lower >> 4], 3).flatten(2, 3) | fifth << 4
    return BlockWeight(codes.flatten(1), blocks[..., :4].contiguous(), _groups(blocks), 8)


def _groups(blocks: Tensor) -> Tensor:
    """The scale and the minimum of each group, uint8 [O, I / 32, 2], from Q4_K or Q5_K blocks."""
    packed = blocks[..., 4:16]
    first, second, rest = packed.split(4, 2)
    # The first four scales and minimums are 6 bits of a byte; the two bits above them belong to the
    # other four, whose lower bits share a byte.
    scales = torch.cat([first & 63, (rest & 15) | (first >> 6) << 4], 2)
    minimums = torch.cat([second & 63, (rest >> 4) | (second >> 6) << 4], 2)
    return torch.stack([scales, minimums], 3).flatten(1, 2)


def _no_groups(data: Tensor) -> Tensor:
    return data.new_empty(len(data), 0, 2)


#: How each format is read, by its name.
FORMATS = {"Q8_0": from_q8_0, "Q4_0": from_q4_0, "Q4_K": from_q4_k, "Q5_K": from_q5_k}
