"""Kept tokens of a prompt move together, in order, layer by layer."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole import kernels
from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.cache.packing import Packing, move_tokens
from keyhole.cache.page_list import NO_PAGE, PageList
from keyhole.cache.pages import PageCache


@st.composite
def kept_tokens(draw: st.DrawFn) -> torch.Tensor:
    """Bool [3, C], with and without equally many in every layer."""
    length = draw(st.integers(1, 70))
    rows = draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=3))
    return torch.tensor(rows[:3])


def shape(page_size: int, *windows: int | None) -> Geometry:
    """Three layers with full attention, or with these windows."""
    layers = tuple(
        LayerLayout(num_kv_heads=1, key_dim=2, value_dim=2, window=window)
        for window in windows or (None, None, None)
    )
    return Geometry(layers=layers, num_query_heads=1, page_size=page_size, itemsize=4)


@given(kept_tokens(), st.sampled_from([1, 4, 16]))
def test_a_token_has_one_place_and_a_place_one_token(kept: torch.Tensor, size: int) -> None:
    packing = Packing.of(kept, shape(size))
    for layer, row in enumerate(kept):
        tokens = row.nonzero()[:, 0].tolist()
        places = packing.kept[layer].nonzero()[:, 0].tolist()
        first, rest = tokens[:size], tokens[size:]
        end = kept.shape[1]
        assert places == [*range(len(first)), *range(end - len(rest), end)]
        assert [int(packing.positions[layer, place]) for place in places] == tokens
        assert (packing.positions[layer][~packing.kept[layer]] == -1).all()
        found, at = packing.moves(layer)
        assert (found.tolist(), at.tolist()) == (tokens, places)


@given(kept_tokens(), st.integers(1, 80))
def test_what_a_window_still_sees_stays_at_its_positions(kept: torch.Tensor, window: int) -> None:
    packing, end = Packing.of(kept, shape(4, None, window, None)), kept.shape[1]
    plain = Packing.of(kept, shape(4))
    for layer in (0, 2):
        assert torch.equal(packing.positions[layer], plain.positions[layer])
    # The next token sees itself and `window` - 1 tokens before it.
    seen = [t for t in range(max(0, end - window + 1), end) if kept[1, t]]
    assert packing.kept[1].nonzero()[:, 0].tolist() == seen
    positions, places = packing.moves(1)
    assert positions.tolist() == places.tolist() == seen


@given(kept_tokens())
def test_marks_by_place_become_marks_by_position(kept: torch.Tensor) -> None:
    packing, end = Packing.of(kept, shape(4)), kept.shape[1]
    for layer in range(len(kept)):
        positions, places = packing.moves(layer)
        marks = np.zeros((2, end + 3), bool)
        marks[0, places[::2]] = marks[1, end] = True
        found = packing.at_positions(layer, marks)
        assert found[0].nonzero()[0].tolist() == positions[::2].tolist()
        assert found[1].nonzero()[0].tolist() == [end]


def cache(max_pages: int) -> PageCache:
    layer = LayerLayout(num_kv_heads=1, key_dim=2, value_dim=2)
    geometry = Geometry(layers=(layer,), num_query_heads=1, page_size=4, itemsize=4)
    return PageCache(geometry, max_pages, dtype=torch.float32, device=torch.device("cpu"))


def test_pages_serve_other_positions_and_the_rest_is_freed_later() -> None:
    pages = cache(9)
    table = PageList(pages, 40)
    assert table.need(np.array([2, 9, 17, 21, 38]))  # entries 0, 2, 4, 5 and 9
    before = table.table()
    assert table.move(np.array([1, 26, 30, 39]))  # entries 0, 6, 7 and 9
    listed = np.array(table.listed(40))
    assert (listed != NO_PAGE).nonzero()[0].tolist() == [0, 6, 7, 9]
    assert listed[[0, 9]].tolist() == before[[0, 9]].tolist()
    assert set(listed[[6, 7]]) < set(before[[2, 4, 5]])
    assert pages.in_use == 5
    assert sorted(table.present()) == sorted(before[[0, 2, 4, 5, 9]])
    table.settle()
    assert sorted(table.present()) == sorted(table.listed_pages())
    assert pages.in_use == 4
    pages.check_integrity([table.present().tolist()])


def test_pages_are_allocated_where_there_are_too_few() -> None:
    pages = cache(4)
    table = PageList(pages, 40)
    assert table.need(np.array([0, 9]))
    assert not table.move(np.arange(40))
    assert table.move(np.arange(12, 28))
    table.settle()
    assert pages.in_use == 4
    table.release()
    assert pages.in_use == 0


def test_what_is_left_over_is_released_too() -> None:
    pages = cache(4)
    table = PageList(pages, 40)
    assert table.need(np.array([0, 9, 20]))
    assert table.move(np.array([39]))
    table.release()
    assert pages.in_use == 0


@given(kept_tokens(), st.integers(0, 1000), st.sampled_from([1, 4, 16]))
def test_tokens_move_from_positions_to_places_and_on(
    needed: torch.Tensor, seed: int, size: int
) -> None:
    """To those of all that is needed first, and of these to those of what is kept."""
    length = needed.shape[1]
    kept = needed & (torch.rand(needed.shape, generator=torch.Generator().manual_seed(seed)) < 0.5)
    geometry = shape(size)
    pool = PageCache(geometry, 200, dtype=torch.float32, device=torch.device("cpu"))
    pages = PageList(pool, length + 3)
    assert pages.need(np.arange(length))
    slots = torch.from_numpy(pages.slots(np.arange(length)))
    for layer in range(3):
        rows = 100.0 * layer + torch.arange(length)[:, None, None].expand(-1, 1, 2)
        kernels.append(pool.keys[layer], pool.values[layer], rows, -rows, slots)
    old = None
    for wanted in (needed, kept):
        new, before = Packing.of(wanted, geometry), torch.from_numpy(pages.table())
        assert pages.move(np.append(np.flatnonzero(new.kept.any(0).numpy()), length - 1))
        for _ in move_tokens(pool, pages, before, old, new, torch.ones_like(needed)):
            pass
        pages.settle()
        old = new
        assert pool.in_use <= max(wanted.sum(1).tolist()) // size + 3
        for layer, row in enumerate(wanted):
            found, places = new.moves(layer)
            assert found.tolist() == row.nonzero()[:, 0].tolist()
            where = torch.from_numpy(pages.slots(places))
            keys, values = (
                x[layer][where // size, 0, where % size] for x in (pool.keys, pool.values)
            )
            assert keys.tolist() == [[100.0 * layer + token] * 2 for token in found.tolist()]
            assert torch.equal(values, -keys)


def test_a_page_of_another_sequence_takes_the_place_of_an_own_one() -> None:
    pages = cache(9)
    first, second = PageList(pages, 12), PageList(pages, 12)
    assert first.need(np.arange(12))
    assert second.need(np.arange(8))
    page = first.page(1)
    second.take(1, page)
    second.take(1, page)  # it has it already
    second.take(2, first.page(2))  # it had none
    assert second.table().tolist()[1:] == first.table().tolist()[1:]
    pages.check_integrity([first.present().tolist(), second.present().tolist()])
    first.release()
    assert pages.in_use == 3
    second.release()
    assert pages.in_use == 0


def test_pages_of_equal_tokens_are_shared_and_only_the_last_is_copied() -> None:
    """Of its page, nothing is seen that the other sequence has behind the shared tokens."""
    pages = cache(9)
    first, second = PageList(pages, 12), PageList(pages, 12)
    assert first.need(np.arange(12))
    tokens = np.arange(12)
    where = first.slots(tokens)
    pages.keys[0][where // 4, 0, where % 4, 0] = torch.arange(1.0, 13)
    pages.values[0][where // 4, 0, where % 4, 0] = -torch.arange(1.0, 13)
    assert second.adopt(first.table().tolist()[:2], 6)
    assert second.table()[0] == first.table()[0]
    assert second.table()[1] != first.table()[1]
    assert pages.in_use == 4
    found = second.slots(tokens[:8])
    for stored, sign in ((pages.keys[0], 1), (pages.values[0], -1)):
        assert stored[found // 4, 0, found % 4, 0].tolist() == [
            *(sign * token for token in range(1, 7)),
            *(0, 0),
        ]
        assert stored[where // 4, 0, where % 4, 0].tolist() == [
            sign * token for token in range(1, 13)
        ]
    pages.check_integrity([first.present().tolist(), second.present().tolist()])
