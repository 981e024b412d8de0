"""Elastic loading of buffers, against sets of Python and dictionaries from tokens to numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keyhole import kernels
from keyhole.cache.layout import LayerLayout
from keyhole.cache.resident_buffer import Frame, ResidentBuffer
from keyhole.config import SCALE_BYTES
from keyhole.kernels import PagedQuery, Selection, reference
from keyhole.kernels.reference.quantised import STORED
from tests.effort import examples
from tests.kernels.paged import DTYPES, assert_close
from tests.kernels.test_quantised import KV_DTYPES, largest_change, largest_errors, stored
from tests.oracle import attention, float64, tokens_of

ROWS, MOST = 4, 40


@dataclass
class World:
    """Buffers for ROWS sequences of up to MOST tokens, whose keys and values are drawn at once."""

    size: int
    unit: int
    heads: int
    dtype: torch.dtype
    shared: bool
    places: int  # for entries besides the newest
    seed: int
    entries: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.dims = (6, 4 if self.shared else 5)
        pages = -(-MOST // self.size)
        self.table = torch.randperm(ROWS * pages, generator=self.random).view(ROWS, -1).int()
        numbers = (ROWS, self.heads, pages * self.size, 6 + self.dims[1])
        self.tokens = torch.randn(numbers, generator=self.random).to(self.dtype)
        tokens = -(-(self.places + 1) * self.unit // self.size) * self.size
        self.places = tokens // self.unit - 1
        shape = (ROWS, self.heads, self.places + 1)
        self.entries = torch.full(shape, -1, dtype=torch.int32)
        width = self.size * (6 if self.shared else 11)
        stored = torch.full((ROWS * tokens // self.size, self.heads, width), torch.nan)
        self.keys, self.values = self.views(stored.to(self.dtype))

    def views(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        keys = stored[..., : 6 * self.size].unflatten(-1, (self.size, 6))
        if self.shared:
            return keys, keys[..., :4]
        return keys, stored[..., 6 * self.size :].unflatten(-1, (self.size, 5))

    def key_value(self, row: int, head: int, position: int) -> Tensor:
        token = self.tokens[row, head, position]
        return torch.cat([token[:6], token[:4]]) if self.shared else token

    def offloaded(self, lengths: dict[int, int]) -> tuple[Tensor, Tensor]:
        """All tokens before the newest one in their pages, NaN elsewhere."""
        width = self.size * (6 if self.shared else 11)
        stored = torch.full((self.table.numel(), self.heads, width), torch.nan).to(self.dtype)
        keys, values = self.views(stored)
        for row, length in lengths.items():
            for position in range(length - 1):
                page, place = self.table[row, position // self.size], position % self.size
                keys[page, :, place] = self.tokens[row, :, position, :6]
                if not self.shared:
                    values[page, :, place] = self.tokens[row, :, position, 6:]
        return keys, values

    def held(self, row: int, head: int, slot: int, place: int) -> Tensor:
        """Key and value in a place of a slot."""
        token = slot * self.unit + place
        page = row * (self.places + 1) * self.unit // self.size + token // self.size
        index = page, head, token % self.size
        return torch.cat([self.keys[index], self.values[index]])

    def load_missing(
        self, lengths: dict[int, int], selection: Selection
    ) -> tuple[Selection, Tensor]:
        rows = list(lengths)
        keys, values = self.offloaded(lengths)
        return kernels.load_missing(
            self.entries,
            self.keys,
            None if self.shared else self.values,
            keys,
            None if self.shared else values,
            self.table[rows],
            torch.tensor(list(lengths.values()), dtype=torch.int32),
            torch.tensor(rows),
            selection=selection,
        )


worlds = st.builds(
    World,
    size=st.shared(st.sampled_from((1, 4, 16)), key="size"),
    unit=st.sampled_from((True, False)).flatmap(
        lambda page: st.shared(st.sampled_from((1, 4, 16)), key="size") if page else st.just(1)
    ),
    heads=st.sampled_from((1, 2, 3)),
    dtype=st.sampled_from(DTYPES),
    shared=st.booleans(),
    places=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)


def draw_lists(data: st.DataObject, world: World, lengths: dict[int, int]) -> list[list[list[int]]]:
    """Entries per sequence and list, the newest among them: also twice and in any order."""
    heads = data.draw(st.sampled_from((1, world.heads)))
    lists = []
    for length in lengths.values():
        newest = (length - 1) // world.unit
        entry = st.one_of(st.integers(0, newest), st.just(newest), st.just(-1))
        some = st.lists(entry, max_size=world.places - 1)
        wild = some.flatmap(lambda entries, newest=newest: st.permutations([*entries, newest]))
        tidy = wild.map(lambda entries: sorted({*entries} - {-1}))
        lists.append([data.draw(st.one_of(tidy, tidy, wild)) for _ in range(heads)])
    return lists


def as_selection(lists: list[list[list[int]]], width: int, unit: int) -> Selection:
    padded = [[entries + [-1] * (width - len(entries)) for entries in row] for row in lists]
    counts = [[len(entries) for entries in row] for row in lists]
    return Selection(torch.tensor(padded).int(), torch.tensor(counts).int(), unit)


@given(world=worlds, data=st.data())
@examples(120)
def test_a_buffer_holds_what_is_selected_and_only_the_difference_is_copied(
    world: World, data: st.DataObject
) -> None:
    unit = world.unit
    length = dict.fromkeys(range(ROWS), 1)
    before: dict[tuple[int, int], dict[int, int]] = {}  # (row, head): entry -> slot
    for _ in range(data.draw(st.integers(1, 6))):
        rows = data.draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=3, unique=True))
        for row in rows:
            more = data.draw(st.sampled_from((-5, 0, 1, 1, 1, 5, 17)))
            length[row] = max(1, min(MOST, length[row] + more))
        lengths = {row: length[row] for row in rows}
        lists = draw_lists(data, world, lengths)
        others = [r for r in range(ROWS) if r not in rows]
        untouched = world.entries[others].clone()
        found, moved = world.load_missing(lengths, as_selection(lists, world.places, unit))
        assert torch.equal(world.entries[others], untouched)
        assert found.unit == unit
        for b, row in enumerate(rows):
            for head in range(world.heads):
                now = {e for e in lists[b][head % len(lists[b])] if e >= 0}
                newest = (length[row] - 1) // unit
                now -= {newest}
                known = length[row] - 1 - newest * unit
                last = before.get((row, head), {})
                last = {e: s for e, s in last.items() if e < newest}
                count = int(found.counts[b, head])
                slots = found.indices[b, head].tolist()
                assert slots[count:] == [-1] * (world.places - count)
                slots = slots[:count]
                assert len(slots) == len(set(slots))
                assert slots[-1] == world.places
                held = world.entries[row, head].tolist()
                assert held[-1] == newest
                assert [held[s] for s in slots[:-1]] == sorted(now)
                # What was there stays where it was.
                assert all(held[last[e]] == e for e in now & set(last))
                assert int(moved[b, head]) == len(now - set(last)) * unit + known
                # No entry twice, and all that is there is what the offloaded layer has.
                resident = {e: s for s, e in enumerate(held[:-1]) if e >= 0}
                assert len(resident) == sum(e >= 0 for e in held[:-1])
                before[row, head] = resident
                for entry, slot in resident.items():
                    for place in range(unit):
                        wanted = world.key_value(row, head, entry * unit + place)
                        assert torch.equal(world.held(row, head, slot, place), wanted)
                for place in range(known):
                    wanted = world.key_value(row, head, newest * unit + place)
                    assert torch.equal(world.held(row, head, world.places, place), wanted)


@given(world=worlds, data=st.data())
@examples(60)
def test_it_is_what_its_twin_does(world: World, data: st.DataObject) -> None:
    twin = World(
        world.size, world.unit, world.heads, world.dtype, world.shared, world.places, world.seed
    )
    length = dict.fromkeys(range(ROWS), 1)
    for _ in range(data.draw(st.integers(1, 4))):
        for row in length:
            length[row] = min(MOST, length[row] + data.draw(st.sampled_from((1, 1, 9, -2))))
            length[row] = max(1, length[row])
        lengths = dict(list(length.items())[1:])
        selection = as_selection(draw_lists(data, world, lengths), world.places, world.unit)
        keys, values = world.offloaded(lengths)
        operands = (
            keys,
            None if world.shared else values,
            world.table[1:],
            torch.tensor(list(lengths.values()), dtype=torch.int32),
            torch.tensor(list(lengths)),
        )
        results = [
            operation(
                w.entries,
                w.keys,
                None if w.shared else w.values,
                *operands,
                selection=selection,
            )
            for operation, w in (
                (kernels.load_missing, world),
                (reference.load_missing, twin),
            )
        ]
        (found, moved), (wanted, twin_moved) = results
        assert torch.equal(found.indices, wanted.indices)
        assert torch.equal(found.counts, wanted.counts)
        assert torch.equal(moved, twin_moved)
        assert torch.equal(world.entries, twin.entries)
        for a, b in ((world.keys, twin.keys), (world.values, twin.values)):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@given(
    kv_dtype=st.sampled_from(KV_DTYPES), unit=st.sampled_from((1, 4)), seed=st.integers(0, 2**31)
)
@examples(50)
def test_attention_over_a_buffer_of_8_bits_has_the_error_of_8_bits_once(
    kv_dtype: str, unit: int, seed: int
) -> None:
    """Compared with the keys and values that were given, in float64: rows move as they are."""
    size, heads, dims, count, room = 4, 2, (16, 12), 10, 16
    random = torch.Generator().manual_seed(seed)
    layout = LayerLayout(
        num_kv_heads=heads, key_dim=dims[0], value_dim=dims[1], scale_bytes=SCALE_BYTES
    )
    empty = torch.empty(0, dtype=STORED[kv_dtype])
    buffer = ResidentBuffer(layout, empty, page_size=size, num_rows=3, num_tokens=room)
    table = torch.randperm(2 * count, generator=random).view(2, count)
    pages = [torch.randn(2 * count, heads, size, n, generator=random) for n in dims]
    rows = [stored(x, kv_dtype) for x in pages]
    # [2, Hkv, N, D], and as the rows hold them
    given_ = [float64(x[table].transpose(1, 2).flatten(2, 3)) for x in pages]
    held = [float64(kernels.dequantised(x)[table].transpose(1, 2).flatten(2, 3)) for x in rows]
    errors = [largest_errors(kv_dtype, x) for x in given_]
    lengths, of_sequences = torch.tensor([9, 14]), torch.tensor([2, 0])
    for _ in range(4):
        lengths += torch.randint(1, 4, (2,), generator=random)
        below = [x.clone() for x in rows]
        lists = []
        for b, length in enumerate(lengths.tolist()):
            for token in range(length - 1, count * size):  # not written yet
                for x in below:
                    x[table[b, token // size], :, token % size] = 77
            newest = (length - 1) // unit
            most = min(newest, (room - size) // unit - 1)
            drawn = [torch.randperm(newest, generator=random)[:most] for _ in range(heads)]
            lists.append([[*sorted(x.tolist()), newest] for x in drawn])
        chosen = as_selection(lists, (room - size) // unit, unit)
        frame = Frame.of(
            of_sequences, table.int(), lengths.int(), num_tokens=room, page_size=size, unit=unit
        )
        resident = buffer.load_missing(chosen, frame, *below)
        last = [lengths - 1, table[torch.arange(2), (lengths - 1) // size]]
        resident.append(*(x[last[1], :, last[0] % size] for x in pages))
        query, scale = torch.randn(2, 6, dims[0], generator=random) / 2, dims[0] ** -0.5
        paged = PagedQuery(query, *resident.paged)
        found = kernels.attend(paged, selection=resident.selection, scale=scale)
        for b, length in enumerate(lengths.tolist()):
            read = [tokens_of(x, unit, length) for x in lists[b]]
            one, (keys, values) = float64(query[b]), (x[b] for x in given_)
            wanted, _ = attention(one, keys, values, read, scale=scale)
            bound = largest_change(one, values, (errors[0][b], errors[1][b]), read, scale)
            assert (np.abs(float64(found[b]) - wanted) <= bound + 1e-5).all()
            exact, _ = attention(one, *(x[b] for x in held), read, scale=scale)
            assert_close(found[b], exact, torch.float32)


@pytest.mark.slow
def test_thousands_of_tokens_and_what_comes_back_is_still_there() -> None:
    """Large enough for several threads, and for entries beyond a word of the kernel's bits."""
    random = torch.Generator().manual_seed(0)
    size, heads, budget, length = 16, 4, 1024, 5000
    pages = -(-length // size)
    keys = torch.randn(pages, heads, size, 64, generator=random)
    values = torch.randn(pages, heads, size, 64, generator=random)
    table = torch.randperm(pages, generator=random)[None].int()
    slots = budget + 3 * size
    buffers = [torch.zeros(2 * slots // size, heads, size, 64) for _ in range(2)]
    entries = torch.full((2, heads, slots), -1, dtype=torch.int32)

    def load(first: int) -> tuple[Selection, Tensor]:
        chosen = torch.arange(first, first + 3 * budget, 3).int()
        chosen[-1] = length - 1
        selection = Selection(chosen.expand(1, heads, -1), torch.tensor([[budget]]).int(), 1)
        place = torch.tensor([length]).int(), torch.tensor([1])
        return kernels.load_missing(
            entries, *buffers, keys, values, table, *place, selection=selection
        )

    assert load(0)[1].tolist() == [[budget - 1] * heads]
    assert load(3)[1].tolist() == [[1] * heads]
    # There were free places, so nothing had to go.
    assert load(0)[1].tolist() == [[0] * heads]
    selection, moved = load(1)
    assert moved.tolist() == [[budget - 1] * heads]
    assert entries[0].eq(-1).all()
    for head in range(heads):
        for slot in selection.indices[0, head, : budget - 1].tolist():
            entry = int(entries[1, head, slot])
            source = int(table[0, entry // size]), head, entry % size
            target = (slots + slot) // size, head, slot % size
            assert torch.equal(buffers[0][target], keys[source])
            assert torch.equal(buffers[1][target], values[source])


def test_a_selection_that_leaves_no_place_for_the_newest_is_a_mistake() -> None:
    world = World(4, 1, 1, torch.float32, False, 3, 0)
    with pytest.raises(AssertionError, match="newest"):
        world.load_missing({0: 9}, as_selection([[[0, 1, 2, 8]]], 4, 1))


def test_a_full_list_without_the_newest_is_not_written_past_its_end() -> None:
    """No policy may give one: what has no place in it is left out."""
    world = World(4, 1, 2, torch.float32, False, 3, 0)
    lists = [[[0, 1, 2], [3, 4, 6]]]
    found, _ = world.load_missing({1: 9}, as_selection(lists, 3, 1))
    assert found.indices.shape == (1, 2, 3)
    assert found.counts.tolist() == [[3, 3]]
    for head, entries in enumerate(lists[0]):
        held = world.entries[1, head].tolist()
        assert [held[slot] for slot in found.indices[0, head].tolist()] == entries
