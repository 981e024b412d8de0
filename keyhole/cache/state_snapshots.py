"""States of recurrent layers at the ends of cached prefixes.

The keys of a prefix serve every prompt that begins with it, whereas a recurrent state serves only
one that begins with exactly these tokens. States are therefore kept where a prompt is likely to go
on: at its last full page, which its other completions and the next turn of a conversation share,
and where it leaves what is cached, as others will leave it there, too (branch points: Pan et al.,
Marconi, arXiv 2411.19379, section 4.1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from keyhole.cache.prefix_cache import prefix_digests
from keyhole.cache.recurrent_state import RecurrentState


class StateSnapshots:
    """Copies of states by the digest of all tokens before them, the least recently used first."""

    def __init__(self, state: RecurrentState, page_size: int) -> None:
        self._state, self._page_size = state, page_size
        self._free = list(state.snapshot_slots)
        self._places: OrderedDict[bytes, int] = OrderedDict()

    def save(self, tokens: Sequence[int], end: int, group: bytes, slot: int) -> None:
        """Keeps the state after `tokens[:end]`, whole pages, which is in a slot.

        group: as in the prefix cache. The state that was used least recently may be dropped.
        """
        digest = self._digests(tokens, end, group)[-1]
        if digest not in self._places:
            place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
            self._state.copy(slot, place)
            self._places[digest] = place
        self._places.move_to_end(digest)

    def load(self, tokens: Sequence[int], end: int, group: bytes, slot: int) -> None:
        """Copies the state after `tokens[:end]` into a slot; `usable` has returned `end`."""
        digest = self._digests(tokens, end, group)[-1]
        self._state.copy(self._places[digest], slot)
        self._places.move_to_end(digest)

    def usable(
        self, tokens: Sequence[int], cached: int, end: int, group: bytes
    ) -> tuple[int, tuple[int, ...]]:
        """How many of the first `cached` tokens, whole pages, the longest kept state comes after.

        Then where a prompt of `end` tokens stops for its state to be kept: after these pages, and
        after its last page that is full before its last token.
        """
        size, digests = self._page_size, self._digests(tokens, cached, group)
        found = (i for i in range(len(digests), 0, -1) if digests[i - 1] in self._places)
        known = next(found, 0) * size
        ends = sorted({cached, (end - 1) // size * size})
        return known, tuple(place for place in ends if place > known)

    def _digests(self, tokens: Sequence[int], end: int, group: bytes) -> list[bytes]:
        return list(prefix_digests(tokens, self._page_size, group, end))
