"""Pages: their bytes, their growth, and mistakes that are refused."""

from __future__ import annotations

import pytest
import torch

from keyhole.cache import huge_pages
from keyhole.cache import pages as pages_module
from keyhole.cache.layout import Geometry, LayerLayout, bytes_per_page
from keyhole.cache.pages import PageCache
from keyhole.errors import CapacityError

PLAIN = LayerLayout(num_kv_heads=2, key_dim=8, value_dim=6)
LATENT = LayerLayout(num_kv_heads=1, key_dim=10, value_dim=7, shared_values=True)


def make_cache(
    *layers: LayerLayout, most: int = 8, dtype: torch.dtype = torch.float32, size: int = 4
) -> PageCache:
    geometry = Geometry(
        layers=layers or (PLAIN,), num_query_heads=2, page_size=size, itemsize=dtype.itemsize
    )
    data = [{"low": (layer.num_kv_heads, 3), "stamp": ()} for layer in geometry.layers]
    return PageCache(geometry, most, dtype=dtype, device=torch.device("cpu"), page_data=data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [(PLAIN,), (PLAIN, PLAIN), (LATENT, LATENT), (PLAIN, LATENT)])
def test_page_bytes_are_those_of_the_tensors(
    layers: tuple[LayerLayout, ...], dtype: torch.dtype
) -> None:
    cache = make_cache(*layers, dtype=dtype)
    cache.allocate(3)
    tensors = [*cache.keys, *cache.values, *(t for data in cache.data for t in data.values())]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(storages.values()) == cache.max_pages * cache.page_bytes
    assert cache.resident_bytes == cache.capacity * cache.page_bytes


def test_page_bytes_count_side_data_in_the_cache_s_dtype() -> None:
    geometry = Geometry(layers=(PLAIN, LATENT), num_query_heads=2, page_size=4, itemsize=2)
    tokens = 4 * (2 * (8 + 6) + 10) * 2
    assert bytes_per_page(geometry, [{}, {}]) == tokens
    assert bytes_per_page(geometry, [{"low": (2, 3)}, {"stamp": ()}]) == tokens + (6 + 1) * 2


def test_pages_are_contiguous_per_head() -> None:
    cache = make_cache(PLAIN)
    cache.allocate(2)
    assert cache.keys[0].shape == (8, 2, 4, 8)
    assert cache.values[0].shape == (8, 2, 4, 6)
    assert cache.keys[0][1, 1].is_contiguous()


def test_shared_values_are_the_start_of_the_keys_also_after_growth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages_module, "_FIRST_PAGES", 1)
    cache = make_cache(LATENT)
    for number in range(4):
        pages = cache.allocate(1)
        assert pages is not None
        cache.keys[0][pages[0]] = number
    assert cache.capacity == 4
    assert cache.values[0].data_ptr() == cache.keys[0].data_ptr()
    assert cache.values[0].shape == (4, 1, 4, 7)
    assert cache.values[0][:, 0, 0, 0].tolist() == [0, 1, 2, 3]


def test_nothing_is_allocated_before_it_is_needed() -> None:
    cache = make_cache(most=10**6)
    assert cache.capacity == 0
    cache.allocate(1)
    assert cache.capacity == 64
    assert cache.available == 10**6 - 1


def test_the_most_pages_in_use_at_once_are_remembered() -> None:
    cache = make_cache(most=8)
    assert cache.peak_pages == 0
    first = cache.allocate(3)
    assert first is not None
    cache.release(first[:2])
    cache.allocate(4)
    assert cache.peak_pages == 5
    cache.release(first[2:])
    cache.allocate(1)
    assert cache.allocate(4) is None
    assert cache.peak_pages == 5


def test_pages_that_are_left_come_next_and_none_is_lost() -> None:
    """Decoding requests jumped behind a question's pages: new memory in every layer at once."""
    cache = make_cache(most=40)
    assert cache.allocate(3) == [0, 1, 2]
    assert cache.allocate(4, leave=8) == [11, 12, 13, 14]
    assert cache.allocate(9) == [3, 4, 5, 6, 7, 8, 9, 10, 15]
    assert cache.allocate(22, leave=8) == list(range(18, 40))
    assert cache.allocate(3, leave=8) is None
    assert cache.allocate(2, leave=8) == [16, 17]
    cache.check_integrity([range(40)])


def test_pages_are_left_only_if_there_is_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(most=400)
    taken = cache.allocate(64)
    assert taken is not None
    cache.release(taken[60:])

    def fails() -> None:
        raise CapacityError("no memory")

    monkeypatch.setattr(cache, "_grow", fails)
    assert cache.allocate(4, leave=8) is not None
    with pytest.raises(CapacityError, match="no memory"):
        cache.allocate(1)
    cache.check_integrity([range(64)])


def test_new_pages_come_after_those_that_were_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "_FIRST_PAGES", 8)
    cache = make_cache(most=40)
    assert cache.allocate(6) == [0, 1, 2, 3, 4, 5]
    assert cache.allocate(8) == [6, 7, 8, 9, 10, 11, 12, 13]
    cache.check_integrity([range(14)])


def test_too_many_pages_change_nothing() -> None:
    cache = make_cache(most=3)
    assert cache.allocate(4) is None
    assert cache.available == 3
    assert cache.allocate(3) is not None
    assert cache.allocate(1) is None
    assert cache.allocate(0) == []


def test_missing_memory_is_an_error_with_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make_cache(PLAIN, PLAIN, most=100)
    first = cache.allocate(2)
    assert first is not None
    cache.keys[1][first] = 7.0
    enlarged = huge_pages.enlarged
    calls = iter(range(100))

    def fails_half_way(tensor: torch.Tensor, count: int, most: int) -> torch.Tensor:
        if next(calls) == 3:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return enlarged(tensor, count, most)

    monkeypatch.setattr(huge_pages, "enlarged", fails_half_way)
    with pytest.raises(CapacityError, match="memory="):
        cache.allocate(63)
    assert cache.available == 98
    cache.check_integrity([first])
    # What is free in the old size can still be had, and growth can be tried again.
    second = cache.allocate(62)
    third = cache.allocate(30)
    assert second is not None
    assert third is not None
    assert cache.capacity == 100
    assert (cache.keys[1][first] == 7.0).all()
    cache.check_integrity([first, second, third])


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    cache = make_cache(PLAIN, LATENT)
    pages = cache.allocate(1)
    assert pages is not None
    page = pages[0]
    assert cache.writable(page) == page
    tensors = [*cache.keys, *cache.values, *(t for data in cache.data for t in data.values())]
    for number, tensor in enumerate(tensors):
        tensor[page] = number
    cache.share(pages)
    copy = cache.writable(page)
    assert copy is not None
    assert copy != page
    assert [cache.references(page), cache.references(copy)] == [1, 1]
    for tensor in tensors:
        assert torch.equal(tensor[copy], tensor[page])
    for tensor in tensors:
        tensor[copy] = -1.0
        assert (tensor[page] >= 0).all()


def test_copied_pages_have_the_content_of_others_and_nothing_of_them_changes() -> None:
    cache = make_cache(PLAIN, LATENT)
    pages = cache.allocate(6)
    assert pages is not None
    tensors = [*cache.keys, cache.values[0], *(t for data in cache.data for t in data.values())]
    for tensor in tensors:
        for page in pages:
            tensor[page] = page + 1
    source, target = [pages[4], pages[0]], [pages[1], pages[5]]
    cache.copy(source, target)
    for tensor in tensors:
        for page in pages:
            origin = source[target.index(page)] if page in target else page
            assert (tensor[page] == origin + 1).all()


def test_no_page_is_left_for_a_copy() -> None:
    cache = make_cache(most=1)
    pages = cache.allocate(1)
    assert pages is not None
    cache.share(pages)
    assert cache.writable(pages[0]) is None
    assert cache.references(pages[0]) == 2


def test_a_page_that_is_free_can_neither_be_shared_nor_released() -> None:
    cache = make_cache()
    pages = cache.allocate(1)
    assert pages is not None
    cache.release(pages)
    with pytest.raises(AssertionError, match="free"):
        cache.release(pages)
    with pytest.raises(AssertionError, match="free"):
        cache.share(pages)


def test_integrity_sees_a_lost_and_a_borrowed_page() -> None:
    cache = make_cache()
    pages = cache.allocate(2)
    assert pages is not None
    cache.check_integrity([pages])
    with pytest.raises(AssertionError, match="references"):
        cache.check_integrity([pages[:1]])
    with pytest.raises(AssertionError, match="references"):
        cache.check_integrity([pages, pages])
