"""Which prefixes are found again, and for whom."""

from __future__ import annotations

import pytest

from keyhole.cache import prefix_cache
from keyhole.cache.pages import PageCache
from keyhole.cache.prefix_cache import PrefixIndex
from tests.cache.test_pages import make_cache

A, B, C = [1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]


@pytest.fixture
def cache() -> PageCache:
    return make_cache()


@pytest.fixture
def index(cache: PageCache) -> PrefixIndex:
    return PrefixIndex(cache)


def pages_of(cache: PageCache, count: int) -> list[int]:
    pages = cache.allocate(count)
    assert pages is not None
    return pages


def test_full_pages_are_found_and_the_rest_is_not(cache: PageCache, index: PrefixIndex) -> None:
    pages = pages_of(cache, 3)
    index.insert([*A, *B, 9, 9], pages, 10)
    assert index.match([*A, *B, *C]) == (pages[:2], True)
    assert index.match([*A, *B[:3]]) == (pages[:1], True)
    assert index.match(A[:3]) == ([], True)
    assert index.match([]) == ([], True)
    assert [cache.references(page) for page in pages] == [4, 3, 1]


def test_the_same_tokens_after_another_past_do_not_match(
    cache: PageCache, index: PrefixIndex
) -> None:
    first, second = pages_of(cache, 2), pages_of(cache, 2)
    index.insert([*A, *C], first, 8)
    index.insert([*B, *C], second, 8)
    assert index.match([*B, *C]) == (second, True)
    assert index.match([*A, *C]) == (first, True)
    assert index.match(C) == ([], True)
    assert index.match([*C, *A]) == ([], True)
    assert index.match([*A, *A]) == (first[:1], True)


def test_large_token_ids_are_not_cut(cache: PageCache, index: PrefixIndex) -> None:
    index.insert([258, 0, 0, 0], pages_of(cache, 1), 4)
    assert index.match([2, 1, 0, 0]) == ([], True)
    assert index.match([2, 0, 0, 0]) == ([], True)


def test_approximate_pages_are_only_for_those_who_ask(cache: PageCache, index: PrefixIndex) -> None:
    pages = pages_of(cache, 3)
    index.insert([*A, *B, *C], pages, 5)
    assert index.match([*A, *B, *C]) == (pages[:1], True)
    assert index.match([*A, *B, *C], approximate=True) == (pages, False)
    assert index.match([*A, 0, 0, 0, 0], approximate=True) == (pages[:1], True)


def test_an_exact_page_takes_the_place_of_an_approximate_one(
    cache: PageCache, index: PrefixIndex
) -> None:
    rough, exact = pages_of(cache, 2), pages_of(cache, 2)
    index.insert([*A, *B], rough, 4)
    index.insert([*A, *B], exact, 8)
    assert index.match([*A, *B]) == ([rough[0], exact[1]], True)
    assert [cache.references(page) for page in rough] == [3, 1]
    assert [cache.references(page) for page in exact] == [1, 3]


def test_an_approximate_page_never_takes_the_place_of_an_exact_one(
    cache: PageCache, index: PrefixIndex
) -> None:
    exact, rough = pages_of(cache, 2), pages_of(cache, 2)
    index.insert([*A, *B], exact, 8)
    index.insert([*A, *B], rough, 0)
    assert index.match([*A, *B]) == (exact, True)
    assert index.match([*A, *B], approximate=True) == (exact, True)
    assert [cache.references(page) for page in rough] == [1, 1]


def test_of_two_approximate_pages_the_first_stays(cache: PageCache, index: PrefixIndex) -> None:
    first, second = pages_of(cache, 1), pages_of(cache, 1)
    index.insert(A, first, 0)
    index.insert(A, second, 3)
    assert index.match(A, approximate=True) == (first, False)
    assert cache.references(second[0]) == 1


def test_the_least_recently_used_goes_first_and_ends_go_before_starts(
    cache: PageCache, index: PrefixIndex
) -> None:
    old, new = pages_of(cache, 2), pages_of(cache, 2)
    index.insert([*A, *B], old, 8)
    index.insert([*C, *B], new, 8)
    cache.release(old + new)
    cache.release(index.match([*A, *B])[0])  # now `new` is the least recently used
    assert index.evict(1) == 1
    assert index.match([*C, *B]) == (new[:1], True)
    cache.release(new[:1])
    assert index.evict(1) == 1
    assert index.match([*A, *B]) == (old[:1], True)


def test_pages_in_use_are_not_evicted(cache: PageCache, index: PrefixIndex) -> None:
    pages = pages_of(cache, 2)
    index.insert([*A, *B], pages, 8)
    assert index.evict(9) == 0
    cache.release(pages[1:])
    assert index.evict(9) == 1
    assert index.match([*A, *B]) == (pages[:1], True)


def test_more_tokens_than_pages_are_known_as_far_as_the_pages_go(
    cache: PageCache, index: PrefixIndex
) -> None:
    """`insert` raised KeyError when the tokens filled more pages than were given."""
    pages = pages_of(cache, 1)
    index.insert([*A, *B], pages, 8)
    assert index.match([*A, *B]) == (pages, True)


def test_a_page_that_depends_on_the_next_is_reused_with_that_of_the_same_sequence(
    cache: PageCache, index: PrefixIndex
) -> None:
    """Pages of the longer text followed a page of the shorter one, whose data differ."""

    def all_but_one(known: int, page_size: int) -> int:
        return max(0, known - page_size)

    short, long = pages_of(cache, 2), pages_of(cache, 3)
    index.insert([*A, *B], short, 8)
    index.insert([*A, *B, *C], long, 12)
    assert index.match([*A, *B, *C]) == ([*short, long[2]], True)
    assert index.match([*A, *B], reusable=all_but_one) == (short[:1], True)
    # The data of the second page would have to come from before C, and come from elsewhere.
    assert index.match([*A, *B, *C], reusable=all_but_one) == (short[:1], True)
    held = {page: cache.references(page) for page in (*short, long[2])}
    assert held == {short[0]: 5, short[1]: 3, long[2]: 3}


def test_clear_gives_everything_back(cache: PageCache, index: PrefixIndex) -> None:
    pages = pages_of(cache, 2)
    index.insert([*A, *B], pages, 4)
    cache.release(pages)
    assert cache.available == 6
    index.clear()
    assert cache.available == 8
    assert index.held() == []
    assert index.match([*A, *B], approximate=True) == ([], True)
    cache.check_integrity([])


def test_policies_whose_pages_are_gone_are_forgotten(
    cache: PageCache, index: PrefixIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may see any number of policies; the one whose page is there keeps it."""
    monkeypatch.setattr(prefix_cache, "_MOST_MAKERS", 3)
    kept = pages_of(cache, 1)
    index.insert(A, kept, 0, by="first")
    for number in range(10):
        pages = pages_of(cache, 1)
        index.insert(B, pages, 0, by=number)
        assert len(index._makers) <= 3
        cache.release(pages)
        index.evict(1)
    assert index.match(A, approximate=True, by="first") == (kept, False)
