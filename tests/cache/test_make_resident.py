"""Offloaded layers come back: what they hold, and what is given back on both tiers."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from keyhole.cache import huge_pages
from keyhole.cache import pages as pages_module
from keyhole.cache.pages import PageCache
from keyhole.cache.prefix_cache import PrefixIndex
from keyhole.cache.tiers import FileTier, PinnedTier, Tier
from keyhole.errors import CapacityError
from tests.cache.test_tiers import LATENT, PLAIN, fill, make_cache


@pytest.fixture(params=["file", "pinned"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    return FileTier(tmp_path) if request.param == "file" else PinnedTier()


def filled(pages: int, *, most: int = 1000) -> tuple[PageCache, list[int]]:
    """A cache whose first pages are in use, by number."""
    cache = make_cache(most=most)
    listed = cache.allocate(pages)
    assert listed is not None
    cache.pack()
    listed = list(range(pages))
    fill(cache)
    for number, data in enumerate(cache.data):
        data["low"].copy_(torch.arange(data["low"].numel()).view_as(data["low"]) + number)
    return cache, listed


def rows(cache: PageCache, pages: list[int]) -> list[torch.Tensor]:
    """Everything that these pages hold."""
    return [tensor[pages].clone() for tensor in cache._tensors()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_a_layer_that_comes_up_is_the_same(tier: Tier) -> None:
    cache, pages = filled(70)
    total = cache.resident_bytes
    wanted = rows(cache, pages)
    for layer in (2, 1):
        cache.offload_layer(layer, tier)
    moves = cache.moves
    cache.make_resident(1)
    assert cache.offloaded_layers == (2,)
    assert same(rows(cache, pages), wanted)
    assert cache.values[1].data_ptr() == cache.keys[1].data_ptr()  # shared values are shared again
    cache.make_resident(2)
    assert cache.moves == moves + 2
    assert (cache.resident_bytes, cache.offloaded_bytes) == (total, 0)
    assert same(rows(cache, pages), wanted)
    cache.check_integrity([pages])


def test_what_a_layer_took_on_the_disk_is_free_again(tmp_path: Path) -> None:
    maps, files = Path("/proc/self/maps"), Path("/proc/self/fd")
    if not maps.exists():
        pytest.skip("open mappings and files are listed in /proc, which only Linux has")

    def used() -> int:
        gc.collect()
        return sum(str(tmp_path) in line for line in maps.read_text().splitlines()) + sum(
            str(tmp_path) in os.readlink(file) for file in files.iterdir() if file.is_symlink()
        )

    cache, _ = filled(70)
    cache.offload_layer(0, FileTier(tmp_path))
    assert used() > 0
    cache.make_resident(0)
    assert used() == 0


def test_a_layer_comes_up_with_as_many_pages_as_there_are_now(tier: Tier) -> None:
    cache, pages = filled(200)
    cache.offload_layer(0, tier)
    cache.release(pages[5:])
    wanted = rows(cache, pages[:5])
    cache.cut(8)
    assert len(cache.keys[0]) > 8  # the offloaded layer keeps its places until the layer leaves
    cache.make_resident(0)
    assert [len(keys) for keys in cache.keys] == [8, 8, 8]
    assert cache.resident_bytes == 8 * cache.page_bytes
    assert same(rows(cache, pages[:5]), wanted)


def test_pages_move_to_the_front_and_keep_what_they_hold(tier: Tier) -> None:
    """A page that others share moves once, and all who list it get its new number."""
    cache, pages = filled(200)
    index = PrefixIndex(cache)
    cache.offload_layer(1, tier)
    kept = [pages[i] for i in (150, 3, 199, 80)]
    tokens = list(range(4 * cache.page_size))
    index.insert(tokens, kept, len(tokens))
    cache.release(page for page in pages if page not in kept)
    wanted = rows(cache, kept)
    numbers = cache.pack()
    assert set(numbers) == {150, 199, 80}
    assert set(numbers.values()) == {0, 1, 2}
    moved = [numbers.get(page, page) for page in kept]
    index.renumber(numbers)
    assert index.held() == moved[::-1]  # the start of a text leaves last
    assert same(rows(cache, moved), wanted)
    cache.check_integrity([moved, moved])
    assert cache.pack() == {}
    cache.cut(4)
    assert cache.capacity == cache.in_use == 4
    assert same(rows(cache, moved), wanted)
    again, _ = index.match(tokens)
    assert again == moved
    cache.check_integrity([moved, moved, again])


def test_a_cache_that_was_cut_grows_again(tier: Tier) -> None:
    cache, pages = filled(200)
    cache.offload_layer(2, tier)
    cache.release(pages[3:])
    wanted = rows(cache, pages[:3])
    cache.cut(3)
    more = cache.allocate(400)
    assert more is not None
    assert not set(more) & set(pages[:3])
    assert same(rows(cache, pages[:3]), wanted)
    cache.check_integrity([pages[:3], more])


def test_the_page_set_aside_may_move_too() -> None:
    cache, pages = filled(100)
    aside = cache.set_aside()
    assert aside == 100
    cache.release(pages[2:])
    assert cache.in_use == 3
    assert cache.pack() == {100: 2}
    assert cache.set_aside() == 2
    cache.check_integrity([pages[:2]])


def test_a_page_in_use_is_not_cut_off() -> None:
    cache, pages = filled(100)
    cache.release(pages[:50])
    with pytest.raises(AssertionError, match="page 99 is in use"):
        cache.cut(60)


@pytest.mark.parametrize("fails_at", range(5))
def test_memory_that_is_not_there_for_a_smaller_tensor_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    monkeypatch.setattr(huge_pages, "is_lazy", lambda _: False)
    cache, pages = filled(200)
    cache.release(pages[6:])
    wanted = rows(cache, pages[:6])
    real, calls = huge_pages.new_empty, iter(range(1000))

    def new_empty(like: torch.Tensor, *shape: int, most: int = 0) -> torch.Tensor:
        if next(calls) == fails_at:
            raise MemoryError
        return real(like, *shape, most=most)

    with monkeypatch.context() as patch:
        patch.setattr(huge_pages, "new_empty", new_empty)
        with pytest.raises(CapacityError, match="could not be made smaller"):
            cache.cut(10)
    assert same(rows(cache, pages[:6]), wanted)
    assert cache.capacity == 10
    more = cache.allocate(300)
    assert more is not None
    assert same(rows(cache, pages[:6]), wanted)
    assert {len(tensor) for tensor in cache._tensors()} <= {256, 310, cache.capacity}
    cache.check_integrity([pages[:6], more])


def test_a_layer_stays_offloaded_without_memory(
    monkeypatch: pytest.MonkeyPatch, tier: Tier
) -> None:
    cache, pages = filled(10)
    cache.offload_layer(0, tier)
    wanted = rows(cache, pages)

    def full(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(huge_pages, "new_empty", full)
        with pytest.raises(CapacityError, match="could not be made resident again"):
            cache.make_resident(0)
    assert cache.offloaded_layers == (0,)
    assert same(rows(cache, pages), wanted)
    cache.make_resident(0)
    assert same(rows(cache, pages), wanted)


def test_an_error_of_another_kind_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = filled(10)
    cache.offload_layer(0, PinnedTier())

    def broken(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(huge_pages, "new_empty", broken)
    with pytest.raises(RuntimeError, match="no such kernel"):
        cache.make_resident(0)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "copied"])
def test_resident_memory_is_freed_while_tensors_are_cut(
    monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """What is cut off goes first, and what is copied goes block by block."""
    if not in_place:
        monkeypatch.setattr(huge_pages, "is_lazy", lambda _: False)
    monkeypatch.setattr("keyhole.cache.tiers.BLOCK_BYTES", 1 << 16)
    cache = make_cache(PLAIN, LATENT, most=5000)
    assert cache.allocate(4000) is not None
    cache.pack()
    pages = list(range(4000))
    fill(cache)
    cache.release(pages[300:])
    wanted = rows(cache, pages[:300])
    larger = cache._pages[0]
    cache.cut(400)
    assert same(rows(cache, pages[:300]), wanted)
    if sys.platform == "linux":
        # Except memory pages at both ends and at the cut, which are only partly freed.
        given_back = larger[300:] if in_place else larger
        assert given_back.count_nonzero() <= 3 * 4096 / larger.itemsize


def test_the_host_waits_for_a_gpu_before_it_reads_offloaded_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels write new keys to it without synchronisation."""
    cache, pages = filled(100)
    waited: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(cache, "device", torch.device("cuda"))
    cache.offload_layer(0, PinnedTier())
    cache.release(pages[:90])
    for touches in (cache.pack, lambda: cache.cut(50), lambda: cache.make_resident(0)):
        waited.clear()
        touches()
        assert waited, touches


def test_pages_at_hand_are_those_that_move_no_layer() -> None:
    cache = make_cache(most=100)
    assert cache.at_hand == 100
    cache.room = SimpleNamespace(
        pages=30, allowed=lambda least, wanted: max(least, min(wanted, 30)), make=lambda _: None
    )
    assert cache.at_hand == 30
    assert cache.allocate(10) is not None
    assert (cache.capacity, cache.at_hand, cache.available) == (30, 20, 90)
    assert cache.allocate(50) is not None
    assert (cache.capacity, cache.at_hand) == (60, 0)
    assert pages_module._FIRST_PAGES > 30
