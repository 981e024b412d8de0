"""What layers keep of prompts, against sets of Python."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keyhole.cache import page_list
from keyhole.cache.kept_tokens import KeptTokenTable
from keyhole.cache.packing import Packing
from keyhole.cache.page_list import PageList
from keyhole.cache.pages import PageCache
from keyhole.kernels import Selection
from tests.cache.test_pages import PLAIN, make_cache

LAYERS, PAGE = 3, 4


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[Tensor | None, int]]:
    """Sequences: what layers kept of their first tokens (None: all), and their lengths."""
    found: list[tuple[Tensor | None, int]] = []
    for _ in range(draw(st.integers(1, 4))):
        end = draw(st.integers(1, 20))
        seed = draw(st.integers(0, 1000))
        kept = torch.rand(LAYERS, end, generator=torch.Generator().manual_seed(seed)) < 0.4
        whole = draw(st.booleans())
        found.append((None if whole else kept, end + draw(st.integers(1, 9))))
    return found


def _has(kept: Tensor | None, layer: int, length: int) -> list[int]:
    if kept is None:
        return list(range(length))
    end = kept.shape[1]
    return [t for t in range(length) if t >= end or bool(kept[layer, t])]


def _lists(selection: Selection) -> list[list[list[int]]]:
    assert selection.unit == 1
    lists = []
    for row, counts in zip(selection.indices.tolist(), selection.counts.tolist(), strict=True):
        for entries, count in zip(row, counts, strict=True):
            assert all(entry >= 0 for entry in entries[:count])
            assert all(entry == -1 for entry in entries[count:])
        lists.append([entries[:count] for entries, count in zip(row, counts, strict=True)])
    return lists


def _view(batch: list[tuple[Tensor | None, int]], slots: list[int]):  # type: ignore[no-untyped-def]
    table = KeptTokenTable(LAYERS, 8, torch.device("cpu"), shares=False)
    # What stood in a slot before must not be seen.
    table.set(slots[0], torch.zeros(LAYERS, 30, dtype=torch.bool))
    table.clear(slots[0])
    for (kept, _), slot in zip(batch, slots, strict=True):
        if kept is not None:
            table.set(slot, kept)
    return table.rows(slots, [length for _, length in batch])


@given(rows(), st.permutations(range(8)), st.sampled_from([None, 1, 3, 50]))
def test_a_layer_has_its_kept_tokens_and_all_after_them(
    batch: list[tuple[Tensor | None, int]], order: list[int], window: int | None
) -> None:
    view = _view(batch, order[: len(batch)])
    for layer in range(LAYERS):
        found = _lists(view.selection(layer, window))
        for (kept, length), lists in zip(batch, found, strict=True):
            first = 0 if window is None else length - window
            assert lists == [[t for t in _has(kept, layer, length) if t >= first]]
    for (kept, length), lists in zip(batch, _lists(view.anywhere()), strict=True):
        assert lists == [sorted({t for n in range(LAYERS) for t in _has(kept, n, length)})]


@given(rows(), st.permutations(range(8)), st.data())
def test_a_selection_loses_what_is_not_there(
    batch: list[tuple[Tensor | None, int]], order: list[int], data: st.DataObject
) -> None:
    view = _view(batch, order[: len(batch)])
    unit = data.draw(st.sampled_from([1, PAGE]))
    heads = data.draw(st.sampled_from([1, 2]))
    chosen = []
    for _, length in batch:
        most = -(-length // unit)
        sets = [data.draw(st.sets(st.integers(0, most - 1))) for _ in range(heads)]
        chosen.append([sorted(entries) for entries in sets])
    width = max(1, *(len(entries) for row in chosen for entries in row))
    indices = [[entries + [-1] * (width - len(entries)) for entries in row] for row in chosen]
    counts = [[len(entries) for entries in row] for row in chosen]
    selection = Selection(
        torch.tensor(indices, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32), unit
    )
    for layer in range(LAYERS):
        found = _lists(view.within(layer, selection))
        for (kept, length), row, lists in zip(batch, chosen, found, strict=True):
            has = _has(kept, layer, length)
            assert lists == [[t for t in has if t // unit in entries] for entries in row]


@given(rows(), st.permutations(range(8)), st.booleans(), st.data())
def test_layers_that_share_a_selection_read_its_tokens_at_their_own_places(
    batch: list[tuple[Tensor | None, int]], order: list[int], packs: bool, data: st.DataObject
) -> None:
    """What one layer selects among its places are the same tokens in all others that have them."""
    geometry = make_cache(*[PLAIN] * LAYERS).geometry
    assert geometry.page_size == PAGE
    table = KeptTokenTable(LAYERS, 8, torch.device("cpu"), shares=True)
    table.set(order[0], torch.zeros(LAYERS, 30, dtype=torch.bool))  # stood there before
    table.clear(order[0])
    # By sequence and layer: the position in each place that is in use.
    positions: list[list[dict[int, int]]] = []
    for (kept, length), slot in zip(batch, order, strict=False):
        end = 0 if kept is None else kept.shape[1]
        after = {t: t for t in range(end, length)}
        if kept is None:
            positions.append([after] * LAYERS)
            continue
        packing = Packing.of(kept, geometry) if packs else None
        table.set(slot, kept if packing is None else packing.kept, packing)
        there = []
        for layer in range(LAYERS):
            tokens = kept[layer].nonzero()[:, 0].tolist()
            places = tokens if packing is None else packing.moves(layer)[1].tolist()
            there.append(dict(zip(places, tokens, strict=True)) | after)
        positions.append(there)
    view = table.rows(order[: len(batch)], [n for _, n in batch])
    unit = data.draw(st.sampled_from([1, PAGE]))
    chosen = [data.draw(st.sets(st.integers(0, (n - 1) // unit))) for _, n in batch]
    width = max(1, *map(len, chosen))
    indices = torch.full((len(batch), 1, width), -1, dtype=torch.int32)
    for row, entries in zip(indices, chosen, strict=True):
        row[0, : len(entries)] = torch.tensor(sorted(entries))
    selection = Selection(indices, torch.tensor([[len(x)] for x in chosen]).int(), unit)
    shared = view.at_positions(1, selection)
    for count, [tokens] in zip(shared.counts[:, 0].tolist(), shared.indices.tolist(), strict=True):
        assert count == len(tokens) - tokens.count(-1)
    for layer in range(LAYERS):
        for entries, there, [places] in zip(
            chosen, positions, _lists(view.within(layer, shared)), strict=True
        ):
            wanted = {token for place, token in there[1].items() if place // unit in entries}
            own = there[layer]
            assert places == sorted(places)
            assert {own[place] for place in places} == wanted & set(own.values())


@given(rows(), st.permutations(range(8)))
def test_a_page_is_there_if_any_of_it_is(
    batch: list[tuple[Tensor | None, int]], order: list[int]
) -> None:
    view = _view(batch, order[: len(batch)])
    for layer in range(LAYERS):
        found = view.pages(layer, 8, PAGE).tolist()
        for (kept, length), row in zip(batch, found, strict=True):
            has = {t // PAGE for t in _has(kept, layer, length)}
            within = -(-length // PAGE)
            assert row[:within] == [page in has for page in range(within)]


def test_slots_of_unpaged_keys_belong_to_the_last_prompt() -> None:
    table = KeptTokenTable(LAYERS, 3, torch.device("cpu"), shares=True)
    kept = torch.ones(LAYERS, 30, dtype=torch.bool)
    for slot in (0, 1, 2):
        table.set(slot, kept, None, torch.arange(30, dtype=torch.int32))
    table.set(0, kept[:, :4], None, torch.tensor([-1, 8, 9, -1], dtype=torch.int32))
    table.clear(1)
    view = table.rows([0, 1, 2], [35, 35, 35])
    assert view.unpaged is not None
    assert view.unpaged.tolist() == [[-1, 8, 9] + [-1] * 27, [-1] * 30, list(range(30))]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is there at once")
def test_memory_of_new_pages_is_taken_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps and loading took it before, several layers at once."""
    geometry = make_cache(PLAIN, PLAIN).geometry
    cache = PageCache(geometry, 9, dtype=torch.float32, device=torch.device("cpu"))
    monkeypatch.setattr(page_list, "HUGE_BYTES", 2 * cache.page_bytes // len(cache.keys))
    pages = PageList(cache, 20)
    assert pages.need(np.arange(20))
    for layer in cache.keys:
        layer[:] = 7
    written = [
        [int((layer == 0).any((1, 2, 3)).sum()) for layer in cache.keys] for _ in pages.clear()
    ]
    assert written == [[2, 0], [4, 0], [5, 0], [5, 2], [5, 4], [5, 5]]


def test_new_pages_hold_nothing_of_their_former_owner() -> None:
    """Else summaries of a page that is only in part of the sequence would see it."""
    cache = make_cache(PLAIN, PLAIN, most=2)
    others = cache.allocate(2)
    assert others is not None
    tensors = [*cache.keys, *cache.values]
    for tensor in tensors:
        tensor[:] = 7
    cache.release(others[:1])
    pages = PageList(cache, 12)
    assert pages.need(np.array([5, 6]))
    assert len(list(pages.clear())) == 2  # layer by layer
    assert list(pages.clear()) == []
    for tensor in tensors:
        assert not tensor[others[0]].any()
        assert (tensor[others[1]] == 7).all()
