"""Keys of tokens without a page: slots, holders, and the memory that pages leave to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.cache.pages import PageCache
from keyhole.cache.unpaged_keys import UnpagedKeys


def cache(max_pages: int) -> PageCache:
    layer = LayerLayout(num_kv_heads=1, key_dim=2, value_dim=2)
    geometry = Geometry(layers=(layer,), num_query_heads=1, page_size=4, itemsize=4)
    return PageCache(geometry, max_pages, dtype=torch.float32, device=torch.device("cpu"))


def test_a_slot_belongs_to_one_token_until_its_last_holder_ends() -> None:
    keys = UnpagedKeys(cache(100), 1, 2)
    first = keys.hold(np.array([1, 4, 5]), 7)
    assert first is not None
    keys.keys[first.table[[1, 4, 5]].long()] = torch.tensor([1.0, 2.0, 3.0])[:, None, None]
    second = keys.hold(np.arange(40), 40)
    assert second is not None
    assert not {*first.table[[1, 4, 5]].tolist()} & {*second.table.tolist()}
    assert first.table[[0, 2, 3, 6]].tolist() == [-1] * 4
    assert keys.keys[first.table[[1, 4, 5]].long(), 0, 0].tolist() == [1, 2, 3]  # it has grown
    assert first.share() is first
    first.release()
    second.release()
    assert first.is_held
    assert keys.in_use == 3
    third = keys.hold(np.arange(5), 5)
    assert third is not None
    assert not {*first.table[[1, 4, 5]].tolist()} & {*third.table.tolist()}
    third.release()
    first.release()
    assert not first.is_held
    assert keys.in_use == len(keys.keys) == 0


def test_its_memory_is_taken_from_that_of_pages() -> None:
    """A page has 64 bytes and a key 8: eight keys are as large as a page."""
    pages = cache(6)
    keys = UnpagedKeys(pages, 1, 2)
    held = pages.allocate(3)
    assert held is not None
    first = keys.hold(np.arange(9), 9)
    assert first is not None
    assert pages.reserved == 2
    assert pages.available == 1
    assert pages.allocate(2) is None
    second = keys.hold(np.arange(15), 15)  # three pages in all, not the four of twice as many
    assert second is not None
    assert pages.reserved == 3
    assert keys.hold(np.arange(1), 1) is None
    assert keys.in_use == 24
    pages.release(held[:1])
    third = keys.hold(np.arange(1), 1)
    assert third is not None
    for one in (first, second, third):
        one.release()
    assert pages.reserved == 0
    assert pages.available == 4


def test_the_keys_of_all_heads_count() -> None:
    """Two heads: a key has 16 bytes, four are as large as a page."""
    pages = cache(6)
    keys = UnpagedKeys(pages, 2, 2)
    held = keys.hold(np.arange(9), 9)
    assert held is not None
    assert pages.reserved == 3


def test_without_memory_nothing_is_taken_from_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = cache(100)
    keys = UnpagedKeys(pages, 1, 2)
    first = keys.hold(np.arange(9), 9)
    assert first is not None
    reserved = pages.reserved
    with monkeypatch.context() as without:
        without.setattr(torch.Tensor, "new_empty", raise_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            keys.hold(np.arange(40), 40)
    assert pages.reserved == reserved
    assert keys.in_use == 9


def raise_out_of_memory(*_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError
