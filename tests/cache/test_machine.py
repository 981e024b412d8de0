"""After any sequence of operations, the page cache and its prefix index agree with a plain model.

The model is a dictionary from a page to its content, and lists of the pages of each holder. Every
page gets its own number, written into all of its keys, values and side data. The number is wrong if
a page was overwritten while another holder needed it, lost in growth, or copied only in part.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from keyhole.cache import pages as pages_module
from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.cache.pages import PageCache
from keyhole.cache.prefix_cache import PrefixIndex
from tests.effort import examples

SIZE = 2
GEOMETRY = Geometry(
    layers=(
        LayerLayout(num_kv_heads=2, key_dim=3, value_dim=4),
        LayerLayout(num_kv_heads=1, key_dim=5, value_dim=3, shared_values=True),
        LayerLayout(num_kv_heads=2, key_dim=3, value_dim=3, window=4),
    ),
    num_query_heads=4,
    page_size=SIZE,
    itemsize=4,
)
DATA = [{"low": (2, 3), "mean": (1,)}, {"low": (1, 5)}, {}]
#: Few different pages, so that starts are often the same; the last page may be a part of one.
TOKENS = st.builds(
    lambda pages, rest: [token for token in pages for _ in range(SIZE)] + rest,
    st.lists(st.integers(0, 1), max_size=3),
    st.lists(st.integers(0, 1), max_size=SIZE),
)


class Machine(RuleBasedStateMachine):
    """Sequences that hold pages; one digit per token represents its past."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(pages_module, "_FIRST_PAGES", 3)
        self.held: dict[int, list[int]] = {}  # sequence -> its pages
        self.content: dict[int, float] = {}  # page in use -> the number that was written into it
        self.known: dict[tuple[int, ...], tuple[int, bool]] = {}  # start -> (page, exact)
        self.next = 1

    @initialize(most=st.sampled_from((1, 4, 8, 16, 32)))
    def start(self, most: int) -> None:
        self.most = most
        self.cache = PageCache(
            GEOMETRY, most, dtype=torch.float32, device=torch.device("cpu"), page_data=DATA
        )
        self.index = PrefixIndex(self.cache)

    def teardown(self) -> None:
        self.patch.undo()

    # What the model says.

    def holders(self) -> Counter[int]:
        held = Counter(page for pages in self.held.values() for page in pages)
        return held + Counter(page for page, _ in self.known.values())

    def number(self) -> int:
        self.next += 1
        return self.next

    def write(self, page: int) -> None:
        """A new number everywhere in a page."""
        number = float(self.number())
        self.content[page] = number
        for keys, values, data in zip(
            self.cache.keys, self.cache.values, self.cache.data, strict=True
        ):
            keys[page] = number
            values[page] = number
            for tensor in data.values():
                tensor[page] = number

    def forget(self) -> None:
        """Drops the content of pages without a holder."""
        held = self.holders()
        self.content = {page: number for page, number in self.content.items() if held[page]}

    # What can happen.

    @rule(target=sequences, count=st.sampled_from((0, 1, 2, 3, 5)))
    def allocate(self, count: int) -> int:
        name = self.number()
        self.held[name] = self.new_pages(count)
        return name

    def new_pages(self, count: int) -> list[int]:
        free = self.most - len(self.content)
        pages = self.cache.allocate(count)
        if count > free:
            assert pages is None
            pages = []
        assert pages is not None
        assert len(set(pages)) == len(pages)
        assert not set(pages) & set(self.content), "a page in use was given away"
        assert all(0 <= page < self.most for page in pages)
        for page in pages:
            self.write(page)
        return pages

    @rule(
        target=sequences,
        tokens=TOKENS,
        approximate=st.booleans(),
        num_exact=st.integers(0, 4 * SIZE),
    )
    def serve(self, tokens: list[int], approximate: bool, num_exact: int) -> int:
        """What an engine does: takes what is known, computes the rest, makes all of it known."""
        name = self.match(tokens, approximate)
        self.held[name] += self.new_pages(-(-len(tokens) // SIZE) - len(self.held[name]))
        self.insert(name, tokens, num_exact)
        return name

    @rule(target=sequences, name=sequences)
    def fork(self, name: int) -> int:
        """Another sequence that shares all pages."""
        self.cache.share(self.held[name])
        copy = self.number()
        self.held[copy] = list(self.held[name])
        return copy

    @rule(name=consumes(sequences))
    def release(self, name: int) -> None:
        self.cache.release(self.held.pop(name))
        self.forget()

    @precondition(lambda self: len(self.known) > 1)
    @rule()
    def finish_all(self) -> None:
        """No sequence is left; only the prefix cache holds pages."""
        for pages in self.held.values():
            self.cache.release(pages)
            pages.clear()
        self.forget()

    @rule(name=sequences, place=st.integers(0, 5))
    def write_one(self, name: int, place: int) -> None:
        """Copy on write: no other holder sees the change, and the writer keeps the contents."""
        pages = self.held[name]
        if not pages:
            return
        # Rather a page that others hold too: only there is something to see.
        held = self.holders()
        shared = [i for i, page in enumerate(pages) if held[page] > 1] or [*range(len(pages))]
        place = shared[place % len(shared)]
        old = pages[place]
        alone = held[old] == 1
        full = len(self.content) == self.most
        page = self.cache.writable(old)
        if alone:
            assert page == old
        elif full:
            assert page is None
            return
        else:
            assert page is not None
            assert page not in self.content
            self.content[page] = self.content[old]
            pages[place] = page
            self.contents()
        self.write(pages[place])

    @rule(name=sequences, tokens=TOKENS, num_exact=st.integers(0, 4 * SIZE))
    def insert(self, name: int, tokens: list[int], num_exact: int) -> None:
        """The first known start stays, but an exact page takes the place of an approximate one."""
        pages = self.held[name]
        self.index.insert(tokens, pages, num_exact)
        for i in range(min(len(tokens) // SIZE, len(pages))):
            start = tuple(tokens[: (i + 1) * SIZE])
            exact = (i + 1) * SIZE <= num_exact
            if start not in self.known or (exact and not self.known[start][1]):
                self.known[start] = pages[i], exact
        self.forget()

    @rule(target=sequences, tokens=TOKENS, approximate=st.booleans())
    def match(self, tokens: list[int], approximate: bool) -> int:
        """The pages of the longest known start, with a reference for the caller."""
        wanted: list[int] = []
        exact = True
        for i in range(len(tokens) // SIZE):
            page, good = self.known.get(tuple(tokens[: (i + 1) * SIZE]), (-1, False))
            if page < 0 or not (good or approximate):
                break
            wanted.append(page)
            exact &= good
        assert self.index.match(tokens, approximate=approximate) == (wanted, exact)
        name = self.number()
        self.held[name] = wanted
        return name

    @precondition(lambda self: self.known)
    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        """Only pages that the index alone holds can go, and only as many as asked for."""
        held = self.holders()
        alone = {page for page, _ in self.known.values() if held[page] == 1}
        before = Counter(page for page, _ in self.known.values())
        freed = self.index.evict(count)
        gone = before - Counter(self.index.held())
        assert freed == sum(gone.values()) == min(count, len(alone))
        assert set(gone) <= alone
        self.known = {s: entry for s, entry in self.known.items() if entry[0] not in gone}
        self.forget()

    @precondition(lambda self: len(self.known) > 3)
    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.known.clear()
        self.forget()

    # What is always true.

    @invariant()
    def pages_are_conserved(self) -> None:
        held = self.holders()
        assert self.cache.available == self.most - len(held)
        assert self.cache.capacity <= self.most
        assert sorted(self.index.held()) == sorted(page for page, _ in self.known.values())
        for page in range(self.cache.capacity):
            assert self.cache.references(page) == held[page]
        self.cache.check_integrity([*self.held.values(), self.index.held()])

    @invariant()
    def contents(self) -> None:
        for page, number in self.content.items():
            for keys, values, data in zip(
                self.cache.keys, self.cache.values, self.cache.data, strict=True
            ):
                for tensor in (keys, values, *data.values()):
                    assert (tensor[page] == number).all(), f"page {page} should hold {number}"


TestMachine = Machine.TestCase
TestMachine.settings = settings(examples(200), stateful_step_count=40, deadline=None)
