"""The k best entries of each row by radix selection, in ascending order of position.

The bits of a float, inverted where it is negative, are an integer that sorts as the float does.
The k-th largest of these is found digit by digit from the top: a histogram of one digit, among the
entries that agree in all digits before it, says which digit the k-th largest has (Alabi et al.,
Fast k-selection algorithms for graphics processing units, ACM JEA 17, 2012). Then each block counts
its entries above that one and those equal to it, and writes its selected entries after those of the
blocks before it, so that the result is in order and ties go to the earlier entry. No row is ever
sorted.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Entries per program: a row of 131,072 has 64.
_ENTRIES = 2048
#: Four digits of 8 bits: fewer and longer ones have histograms that no longer fit in registers.
_PASSES, _BINS = 4, 256


@triton.jit
def _order(scores, row, entry, count, num_entries, first, last):
    """Numbers, uint32, that sort as the scores do: NaN above all others, -0.0 as 0.0."""
    scores += row.to(tl.int64) * num_entries
    score = tl.load(scores + entry, mask=entry < count, other=0.0).to(tl.float32)
    score = tl.where((entry < first) | (entry >= count - last), float("inf"), score)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    order = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return tl.where(score != score, 0xFFFFFFFF, order)


@triton.jit
def _tally(
    scores,
    valid,
    tallies,
    found,
    in_blocks,
    num_entries,
    k,
    first,
    last,
    LISTS: tl.constexpr,
    PASS: tl.constexpr,
    BINS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """One digit of a block of entries of a row; after all digits, the block's selected entries.

    tallies int32 [rows, 4, BINS], zeros at first. found int32 [rows, 4, 2]: after each pass the
    digits so far, and how many of the entries that have them are chosen. in_blocks int32
    [rows, blocks, 2]: entries above the last chosen one, and equal to it.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    count = tl.load(valid + row // LISTS).to(tl.int32)
    digits, wanted = tl.zeros([], tl.uint32), tl.minimum(count, k)
    if PASS > 1:
        digits = tl.load(found + (row * 4 + PASS - 2) * 2).to(tl.uint32, bitcast=True)
        wanted = tl.load(found + (row * 4 + PASS - 2) * 2 + 1)
    if PASS > 0:
        digit = tl.arange(0, BINS)
        tally = tl.load(tallies + (row * 4 + PASS - 1) * BINS + digit)
        from_here_on = tl.sum(tally, 0) - tl.cumsum(tally, 0) + tally
        mine = tl.sum((from_here_on >= wanted).to(tl.int32), 0) - 1
        wanted -= tl.sum(tl.where(digit > mine, tally, 0), 0)
        digits = (digits << 8) | mine.to(tl.uint32)
        if block == 0:
            tl.store(found + (row * 4 + PASS - 1) * 2, digits.to(tl.int32, bitcast=True))
            tl.store(found + (row * 4 + PASS - 1) * 2 + 1, wanted)

    entry = block * ENTRIES + tl.arange(0, ENTRIES)
    order = _order(scores, row, entry, count, num_entries, first, last)
    known = entry < count
    if PASS < 4:
        if PASS > 0:
            known = known & (order >> (32 - 8 * PASS) == digits)
        digit = ((order >> (24 - 8 * PASS)) & 0xFF).to(tl.int32)
        tally = tl.histogram(digit, BINS, mask=known)
        into = tallies + (row * 4 + PASS) * BINS + tl.arange(0, BINS)
        tl.atomic_add(into, tally, mask=tally > 0, sem="relaxed")
    else:
        into = in_blocks + (row * tl.num_programs(1) + block) * 2
        tl.store(into, tl.sum((known & (order > digits)).to(tl.int32), 0))
        tl.store(into + 1, tl.sum((known & (order == digits)).to(tl.int32), 0))


@triton.jit
def _write(
    scores,
    valid,
    found,
    in_blocks,
    indices,
    counts,
    num_entries,
    k,
    first,
    last,
    LISTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
):
    """Writes the selected entries of a block, and the padding of -1 after the last of the row."""
    row, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    count = tl.load(valid + row // LISTS).to(tl.int32)
    digits = tl.load(found + (row * 4 + 3) * 2).to(tl.uint32, bitcast=True)
    wanted = tl.load(found + (row * 4 + 3) * 2 + 1)
    b = tl.arange(0, BLOCKS_PADDED)
    before = in_blocks + (row * blocks + b) * 2
    above = tl.sum(tl.load(before, mask=b < block, other=0), 0)
    equal = tl.sum(tl.load(before + 1, mask=b < block, other=0), 0)

    entry = block * ENTRIES + tl.arange(0, ENTRIES)
    order = _order(scores, row, entry, count, num_entries, first, last)
    known = entry < count
    same = (known & (order == digits)).to(tl.int32)
    among_same = equal + tl.cumsum(same, 0) - same
    taken = known & ((order > digits) | ((same > 0) & (among_same < wanted)))
    number = taken.to(tl.int32)
    place = above + tl.minimum(equal, wanted) + tl.cumsum(number, 0) - number
    indices += row.to(tl.int64) * k
    tl.store(indices + place, entry, mask=taken)

    chosen = tl.minimum(count, k)
    place = chosen + entry
    tl.store(indices + place, tl.full([ENTRIES], -1, tl.int32), mask=place < k)
    if block == 0:
        tl.store(counts + row, chosen)


def top_k(scores: Tensor, valid: Tensor, k: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """As the reference, the selection in parts."""
    scores, valid = scores.contiguous(), valid.contiguous()
    num_rows, lists, num_entries = scores.shape
    rows = num_rows * lists
    blocks = -(-max(num_entries, k) // _ENTRIES)
    new = partial(torch.empty, dtype=torch.int32, device=scores.device)
    tallies = new(rows, _PASSES, _BINS).zero_()
    found, in_blocks = new(rows, _PASSES, 2), new(rows, blocks, 2)
    indices, counts = new(num_rows, lists, k), new(num_rows, lists)
    sizes = (num_entries, k, first, last)
    for digit in range(_PASSES + 1):
        _tally[rows, blocks](
            scores,
            valid,
            tallies,
            found,
            in_blocks,
            *sizes,
            LISTS=lists,
            PASS=digit,
            BINS=_BINS,
            ENTRIES=_ENTRIES,
        )
    _write[rows, blocks](
        scores,
        valid,
        found,
        in_blocks,
        indices,
        counts,
        *sizes,
        LISTS=lists,
        ENTRIES=_ENTRIES,
        BLOCKS_PADDED=triton.next_power_of_2(blocks),
    )
    return indices, counts
