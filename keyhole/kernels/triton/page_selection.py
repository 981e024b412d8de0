"""Selection of pages: bounds of a page's keys, Quest's score from them, and the k best entries.

The k best entries of each row are found by radix selection, in ascending order of position.

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

from keyhole.kernels.selection import Selection
from keyhole.kernels.triton.attend import in_float32
from keyhole.kernels.triton.quantised import code, scales_of, widened


@triton.jit
def _page_bounds(
    key_pages,
    low,
    high,
    pages,
    filled,
    stride_kp,
    stride_kh,
    stride_kt,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    CODE: tl.constexpr,
):
    number, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    page, count = tl.load(pages + number), tl.load(filled + number)
    d = tl.arange(0, D_PADDED)
    least = tl.full([D_PADDED], float("inf"), tl.float32)
    most = tl.full([D_PADDED], float("-inf"), tl.float32)
    broken = tl.zeros([D_PADDED], tl.int32)
    for start in range(0, count.to(tl.int32), TOKENS):
        t = start + tl.arange(0, TOKENS)
        mask = (t < count)[:, None] & (d < D)[None]
        rows = key_pages + page * stride_kp + head * stride_kh + t * stride_kt
        key = tl.load(rows[:, None] + d[None], mask=mask, other=0)
        if CODE > 0:
            key = widened(key, CODE).to(tl.float32) * scales_of(rows, t < count, D, CODE)[:, None]
        key = key.to(tl.float32)
        least = tl.minimum(least, tl.min(tl.where(mask, key, float("inf")), 0))
        most = tl.maximum(most, tl.max(tl.where(mask, key, float("-inf")), 0))
        broken = tl.maximum(broken, tl.max((key != key).to(tl.int32), 0))
    # The hardware's minimum and maximum ignore NaN, which must propagate.
    least = tl.where(broken > 0, float("nan"), least)
    most = tl.where(broken > 0, float("nan"), most)
    into = (page * HEADS + head) * D + d
    tl.store(low + into, least.to(low.dtype.element_ty), mask=d < D)
    tl.store(high + into, most.to(high.dtype.element_ty), mask=d < D)


def page_bounds(
    key_pages: Tensor, low: Tensor, high: Tensor, pages: Tensor, filled: Tensor
) -> None:
    """As the reference."""
    assert low.is_contiguous()  # the cache allocates them contiguous
    assert high.is_contiguous()
    if not len(pages):
        return
    num_kv_heads, dim = key_pages.shape[1], low.shape[2]
    _page_bounds[len(pages), num_kv_heads](
        key_pages,
        low,
        high,
        pages.long().contiguous(),
        filled.long().contiguous(),
        *key_pages.stride()[:3],
        HEADS=num_kv_heads,
        D=dim,
        D_PADDED=triton.next_power_of_2(dim),
        TOKENS=16,
        CODE=code(key_pages),
    )


@triton.jit
def _bound_scores(
    query,
    low,
    high,
    page_table,
    out,
    stride_table,
    num_pages,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    FLOAT32: tl.constexpr,
    ROWS: tl.constexpr,
    PAGES: tl.constexpr,
    DIMS: tl.constexpr,
):
    number = tl.program_id(0)
    sequence, head = (number // HEADS).to(tl.int64), number % HEADS
    m = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    is_page = m < num_pages
    page = tl.load(page_table + sequence * stride_table + m, mask=is_page, other=0).to(tl.int64)
    bounds = (page * HEADS + head) * D
    g = tl.arange(0, ROWS)
    query += (sequence * HEADS + head) * GROUP * D
    score = tl.zeros([ROWS, PAGES], tl.float32)
    for start in tl.static_range(0, D, DIMS):
        d = start + tl.arange(0, DIMS)
        q = tl.load(query + g[:, None] * D + d[None], (g < GROUP)[:, None] & (d < D)[None], 0.0)
        mask = is_page[:, None] & (d < D)[None]
        most = tl.load(high + bounds[:, None] + d[None], mask=mask, other=0.0)
        least = tl.load(low + bounds[:, None] + d[None], mask=mask, other=0.0)
        if FLOAT32:
            q, most, least = q.to(tl.float32), most.to(tl.float32), least.to(tl.float32)
        # A positive q_d is bounded by high_d, a negative one by low_d.
        positive, negative = tl.where(q > 0, q, 0.0), tl.where(q < 0, q, 0.0)
        score += tl.dot(positive.to(q.dtype), tl.trans(most), input_precision="ieee")
        score += tl.dot(negative.to(q.dtype), tl.trans(least), input_precision="ieee")
    score = tl.where((g < GROUP)[:, None], score, float("-inf"))
    broken = tl.max((score != score).to(tl.int32), 0)
    best = tl.where(broken > 0, float("nan"), tl.max(score, 0))
    tl.store(out + number.to(tl.int64) * num_pages + m, best, mask=is_page)


def bound_scores(query: Tensor, low: Tensor, high: Tensor, page_table: Tensor) -> Tensor:
    """As the reference."""
    query, low, high = query.contiguous(), low.contiguous(), high.contiguous()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    (num_rows, num_heads, dim), num_kv_heads = query.shape, low.shape[1]
    num_pages, group, pages = page_table.shape[1], num_heads // num_kv_heads, 32
    shape = (num_rows, num_kv_heads, num_pages)
    out = torch.empty(shape, dtype=torch.float32, device=query.device)
    _bound_scores[num_rows * num_kv_heads, -(-num_pages // pages)](
        query,
        low,
        high,
        page_table,
        out,
        page_table.stride(0),
        num_pages,
        HEADS=num_kv_heads,
        GROUP=group,
        D=dim,
        FLOAT32=in_float32(query),
        ROWS=max(16, triton.next_power_of_2(group)),
        PAGES=pages,
        DIMS=min(64, max(16, triton.next_power_of_2(dim))),
    )
    return out


#: Entries per program: a row of 131,072 has 64. A row of up to `_ONE_BLOCK` has one: one launch
#: instead of seven.
_ENTRIES, _ONE_BLOCK = 2048, 8192
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
def _last_digit(tally, wanted, BINS: tl.constexpr):
    """The digit of the last of `wanted` entries from above, and how many with it are wanted."""
    from_here_on = tl.sum(tally, 0) - tl.cumsum(tally, 0) + tally
    digit = tl.sum((from_here_on >= wanted).to(tl.int32), 0) - 1
    return digit, wanted - tl.sum(tl.where(tl.arange(0, BINS) > digit, tally, 0), 0)


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
        tally = tl.load(tallies + (row * 4 + PASS - 1) * BINS + tl.arange(0, BINS))
        mine, wanted = _last_digit(tally, wanted, BINS)
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
def _put(order, known, entry, digits, wanted, above, equal, indices, chosen, k):
    """Writes what is above `digits`, and the first `wanted` equal ones, to a row of `indices`.

    above, equal: those in the blocks before. The padding of -1 follows after `chosen` entries.
    """
    same = (known & (order == digits)).to(tl.int32)
    among_same = equal + tl.cumsum(same, 0) - same
    taken = known & ((order > digits) | ((same > 0) & (among_same < wanted)))
    number = taken.to(tl.int32)
    place = above + tl.minimum(equal, wanted) + tl.cumsum(number, 0) - number
    tl.store(indices + place, entry, mask=taken)
    place = chosen + entry
    tl.store(indices + place, tl.zeros_like(entry) - 1, mask=place < k)


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
    indices += row.to(tl.int64) * k
    _put(order, known, entry, digits, wanted, above, equal, indices, tl.minimum(count, k), k)
    if block == 0:
        tl.store(counts + row, tl.minimum(count, k))


@triton.jit
def _choose(
    scores,
    valid,
    indices,
    counts,
    num_entries,
    k,
    first,
    last,
    LISTS: tl.constexpr,
    BINS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """The selected entries of a row of one block, in one launch: `_tally` and `_write`."""
    row = tl.program_id(0)
    count = tl.load(valid + row // LISTS).to(tl.int32)
    entry = tl.arange(0, ENTRIES)
    order = _order(scores, row, entry, count, num_entries, first, last)
    known = entry < count
    among, digits, wanted = known, tl.zeros([], tl.uint32), tl.minimum(count, k)
    for number in tl.static_range(4):
        digit = ((order >> (24 - 8 * number)) & 0xFF).to(tl.int32)
        mine, wanted = _last_digit(tl.histogram(digit, BINS, mask=among), wanted, BINS)
        digits = (digits << 8) | mine.to(tl.uint32)
        among = among & (digit == mine)
    indices += row.to(tl.int64) * k
    _put(order, known, entry, digits, wanted, 0, 0, indices, tl.minimum(count, k), k)
    tl.store(counts + row, tl.minimum(count, k))


def top_k(
    scores: Tensor, valid: Tensor, k: int, unit: int, *, first: int = 0, last: int = 0
) -> Selection:
    """As the reference."""
    scores, valid = scores.contiguous(), valid.contiguous()
    num_rows, lists, num_entries = scores.shape
    rows = num_rows * lists
    new = partial(torch.empty, dtype=torch.int32, device=scores.device)
    indices, counts = new(num_rows, lists, k), new(num_rows, lists)
    entries, sizes = max(num_entries, k), (num_entries, k, first, last)
    if entries <= _ONE_BLOCK:
        entries = max(_ENTRIES, triton.next_power_of_2(entries))
        constants = {"LISTS": lists, "BINS": _BINS, "ENTRIES": entries}
        warps = 4 * entries // _ENTRIES
        _choose[(rows,)](scores, valid, indices, counts, *sizes, **constants, num_warps=warps)
        return Selection(indices, counts, unit)
    blocks = -(-entries // _ENTRIES)
    tallies = new(rows, _PASSES, _BINS).zero_()
    found, in_blocks = new(rows, _PASSES, 2), new(rows, blocks, 2)
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
    return Selection(indices, counts, unit)
