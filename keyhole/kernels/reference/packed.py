"""Weights packed in 4, 6 or 8 bits: each group of a row has its own scale and minimum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

#: Weights whose codes are packed together. In 4 bits, byte j has weight j below and weight j + 32
#: above. In 6 bits, 32 such bytes have the lower 4 bits; byte j of the 16 bytes behind them has the
#: upper 2 bits of weights j, j + 16, j + 32 and j + 48, from below.
BLOCK = 64
_HALF, _QUARTER = BLOCK // 2, BLOCK // 4
#: Where the upper 2 bits of each quarter of a block are in their byte.
_SHIFTS = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
#: Weights that are packed at a time, so that float32 copies stay small.
_AT_ONCE = 1 << 22


class PackedWeight(NamedTuple):
    """A quantised weight [O, I]: code * scale + minimum, for groups of inputs.

    codes: uint8 [O, I * bits / 8]. scales, minimums: [O, groups], in the dtype of the layer. bits:
    4, 6 or 8. I is a multiple of 64 and of the group size, which is 32, 64 or 128, and may be 16
    with 6 bits.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor
    bits: int

    @property
    def num_inputs(self) -> int:
        """I."""
        return self.codes.shape[-1] * 8 // self.bits

    @property
    def group_size(self) -> int:
        """Inputs that share a scale and a minimum."""
        return self.num_inputs // self.scales.shape[-1]

    def rows(self, which: slice | Tensor) -> PackedWeight:
        """The weight of some outputs."""
        return PackedWeight(self.codes[which], self.scales[which], self.minimums[which], self.bits)


class BlockWeight(NamedTuple):
    """A weight [O, I] in llama.cpp's blocks, with I a multiple of 64.

    codes: uint8 [O, I * bits / 8], as in `PackedWeight`. block_scales: float16 numbers, as their
    bytes: uint8 [O, I / 32, 2] the scale of each block; or [O, I / 256, 2] that of a block's
    scales; or [O, I / 256, 4], and that of its minimums. group_scales: in these, int8 [O, 1,
    I / 16] the scale of each group, or uint8 [O, 2, I / 32] its scale and minimum; [O, 0, 0] for
    blocks of one group. bits: 4, 6 or 8. Without minimums a weight is code - 2**bits / 2, times
    its scale.
    """

    codes: Tensor
    block_scales: Tensor
    group_scales: Tensor
    bits: int

    def rows(self, which: slice | Tensor) -> BlockWeight:
        """The weight of some outputs."""
        codes, block_scales, group_scales = (part[which] for part in self[:3])
        return BlockWeight(codes, block_scales, group_scales, self.bits)

    @classmethod
    def beside(cls, weights: Sequence[BlockWeight], count: int) -> BlockWeight:
        """Weights of one format, each of `count` matrices, as those with the rows of all.

        The first has the first rows of every matrix.
        """
        columns = zip(*(weight[:3] for weight in weights), strict=True)
        parts = [torch.cat([x.unflatten(0, (count, -1)) for x in one], 1) for one in columns]
        codes, block_scales, group_scales = (part.flatten(0, 1) for part in parts)
        return cls(codes, block_scales, group_scales, weights[0].bits)

    def expand(self) -> PackedWeight:
        """The same weight with scales and minimums of all groups, in float32."""
        scales = self.block_scales.view(torch.float16).float().mT  # [O, 1 or 2, blocks]
        if self.group_scales.shape[1]:
            groups = self.group_scales.unflatten(2, (scales.shape[2], -1))
            scales = (scales[..., None] * groups).flatten(2)
        scale, *minimums = scales.unbind(1)
        minimum = minimums[0].neg() if minimums else scale * -(1 << self.bits - 1)
        return PackedWeight(self.codes, scale.contiguous(), minimum.contiguous(), self.bits)


def pack(weight: Tensor, bits: int, group_size: int) -> PackedWeight:
    """A quantised weight [O, I]; the codes of a group cover its range evenly."""
    (num_outputs, num_inputs), dtype = weight.shape, weight.dtype
    codes = torch.empty(num_outputs, num_inputs * bits // 8, dtype=torch.uint8)
    scales = torch.empty(num_outputs, num_inputs // group_size, dtype=dtype)
    minimums = torch.empty_like(scales)
    step = max(1, _AT_ONCE // num_inputs)
    for first in range(0, num_outputs, step):
        rows = slice(first, first + step)
        groups = weight[rows].float().unflatten(1, (-1, group_size))
        low, high = groups.aminmax(dim=2)
        minimums[rows] = low
        scales[rows] = (high - minimums[rows].float()) / (2**bits - 1)
        # The codes are chosen for the rounded scales, which the products use.
        scale, minimum = scales[rows].float()[..., None], minimums[rows].float()[..., None]
        found = torch.where(scale > 0, (groups - minimum) / scale, 0.0)
        whole = found.round().clamp(0, 2**bits - 1).to(torch.uint8).flatten(1)
        codes[rows] = join_codes(whole, bits)
    return PackedWeight(codes, scales, minimums, bits)


def join_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [O, I], one in a byte, as `PackedWeight` has them: uint8 [O, I * bits / 8]."""
    if bits == 8:
        return codes
    blocks = codes.unflatten(1, (-1, BLOCK))
    lower, upper = blocks & 15, blocks >> 4
    low, high = lower.unflatten(2, (2, _HALF)).unbind(2)
    joined = low | high << 4
    if bits == 6:
        quarters = upper.unflatten(2, (4, _QUARTER)) << _SHIFTS.to(codes.device)
        # The four do not overlap, so that their sum is all of them.
        joined = torch.cat([joined, quarters.sum(2, dtype=torch.uint8)], 2)
    rows: Tensor = joined.flatten(1)
    return rows


def _separate_codes(joined: Tensor, bits: int) -> Tensor:
    """The reverse of `join_codes`."""
    if bits == 8:
        return joined
    blocks = joined.unflatten(1, (-1, BLOCK * bits // 8))
    pairs = blocks[..., :_HALF]
    codes = torch.cat([pairs & 15, pairs >> 4], 2)
    if bits == 6:
        quarters = blocks[..., None, _HALF:] >> _SHIFTS.to(joined.device) & 3
        codes = codes | quarters.flatten(2) << 4
    separate: Tensor = codes.flatten(1)
    return separate


def unpack(packed: PackedWeight) -> Tensor:
    """The weight [O, I] in the dtype of its scales; computed in float32."""
    codes, scales, minimums, bits = packed
    groups = _separate_codes(codes, bits).float().unflatten(1, (scales.shape[1], -1))
    weight = torch.addcmul(minimums.float()[..., None], groups, scales.float()[..., None])
    return weight.flatten(1).to(scales.dtype)


def packed_linear(
    x: Tensor, packed: PackedWeight | BlockWeight, bias: Tensor | None = None
) -> Tensor:
    """X W^T + bias of a packed weight; x [..., I], bias [O]. Fast for a few tokens.

    With a weight in blocks it is computed in float32, with the numbers as stored.
    """
    if isinstance(packed, BlockWeight):
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), unpack(packed.expand()), wide_bias).to(x.dtype)
    return F.linear(x, unpack(packed), bias)
