"""`SequencePages`: reserves pages for sequences, shares cached prefixes, and releases pages."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from keyhole.cache.page_list import NO_PAGE
from keyhole.cache.pages import PageCache
from keyhole.cache.prefix_cache import PrefixIndex
from keyhole.cache.recurrent_state import RecurrentState, StateSnapshots
from keyhole.engine.allocation import page_limit
from keyhole.engine.scheduling.scheduler_output import PageCopies
from keyhole.engine.sequence import Sequence
from keyhole.errors import CapacityError


class SequencePages:
    """The pages of sequences, in the cache and its prefixes; it decides nothing about their order.

    Pages that it reserves have numbers; the cache provides their memory before the model runs.

    states: recurrent states after cached prefixes; None without a recurrent state or prefix cache.
    """

    def __init__(
        self,
        cache: PageCache,
        prefix: PrefixIndex | None,
        max_length: int,
        recurrent: RecurrentState | None,
    ) -> None:
        self._cache, self._prefix, self._max_length = cache, prefix, max_length
        self.states: StateSnapshots | None = None
        if prefix is not None and recurrent is not None:
            self.states = StateSnapshots(recurrent, cache.page_size)

    def reuse(self, sequence: Sequence, copies: PageCopies) -> None:
        """Reuses cached pages of the prompt; the last token is always computed, for its logits."""
        if self._prefix is None:
            return
        policy, size = sequence.under.policy, self._cache.page_size
        pages, sequence.exact = self._prefix.match(
            sequence.tokens,
            # A recurrent state cannot be taken back by a token, for the logits of the last one.
            end=sequence.prefill_end - (self.states is not None),
            approximate=sequence.reuse_approximate,
            by=policy,
            group=sequence.page_group,
            reusable=policy.reusable,
        )
        if self.states is not None:
            place = (len(pages) * size, sequence.prefill_end, sequence.page_group)
            known, sequence.state_ends = self.states.usable(sequence.tokens, *place)
            self._cache.release(pages[known // size :])
            del pages[known // size :]
        sequence.pages, computed = array("i", pages), len(pages) * size
        sequence.repeated = None
        if computed == sequence.prefill_end:
            # The last token is written again, into a page that may be shared.
            self._forget_known(1 - self._cache.at_hand)
            last = sequence.pages[-1]
            fresh = self._cache.assign(1) if self._cache.references(last) > 1 else [last]
            if fresh is None:
                self._cache.release([sequence.pages.pop()])
                computed -= size
            else:
                if fresh != [last]:
                    copies.append(([last], fresh))
                    sequence.pages[-1] = fresh[0]
                computed -= 1
                sequence.repeated = computed
        sequence.num_computed = computed

    def reserve_all(self, sequence: Sequence, copies: PageCopies, spare: int) -> bool:
        """Pages for all tokens, if `spare` more are left then.

        Copies cached pages if the policy does not share them.
        """
        # Under a policy that evicts, a replayed sequence never holds all its pages at once.
        most = self.most(sequence, len(sequence.tokens)) * self._cache.page_size
        length = max(sequence.prefill_end, min(len(sequence.tokens), most))
        shares = sequence.under.policy.shares_pages
        if shares or sequence.context is not None or not sequence.pages:
            return self.reserve(sequence, length, spare)
        known, sequence.pages = sequence.pages, array("i")
        if self.reserve(sequence, length, spare):
            copies.append((known.tolist(), sequence.pages[: len(known)].tolist()))
            return True
        # The cached pages themselves may be what is missing: compute them again.
        self._cache.release(known)
        self.discard(copies)
        sequence.num_computed, sequence.repeated, sequence.exact = 0, None, True
        return self.reserve(sequence, length, spare)

    def reserve(self, sequence: Sequence, length: int, spare: int = 0) -> bool:
        """Pages for `length` tokens, if `spare` more are left then."""
        need = max(0, -(-length // self._cache.page_size) - len(sequence.pages))
        if not need and not spare:  # most sequences in most steps
            return True
        short = need + spare - self._cache.available
        # Cached prefixes that no request reads are evicted before a layer is offloaded.
        short -= self._forget_known(max(short, need - self._cache.at_hand))
        if short > 0:
            return False
        pages = self._cache.assign(need)
        assert pages is not None
        sequence.pages.extend(pages)
        return True

    def reserve_draft(self, sequence: Sequence, count: int) -> int:
        """Pages for `count` tokens after the newest one, without pre-emption; how many fit."""
        first = sequence.num_computed + 1
        if self.reserve(sequence, first + count):
            try:
                self._cache.provide()
                return count
            except CapacityError:  # a proposed token is worth no error
                self.retract([sequence])
        return min(count, len(sequence.pages) * self._cache.page_size - first)

    def retract(self, sequences: Iterable[Sequence]) -> None:
        """Takes back pages that got a number and no memory (`PageCache.provide`)."""
        provided = self._cache.provided
        for sequence in sequences:
            pages = sequence.pages
            kept = next((i for i, page in enumerate(pages) if page >= provided), len(pages))
            self._cache.release(pages[kept:])
            del pages[kept:]
        self._cache.retract()

    def release_rejected(self, sequence: Sequence) -> None:
        """Releases the pages that hold only proposed tokens that were not accepted."""
        kept = -(-sequence.num_computed // self._cache.page_size)
        self._cache.release(sequence.pages[kept:])
        del sequence.pages[kept:]

    def remember(self, sequence: Sequence) -> None:
        """Adds the computed full pages of a sequence to the prefix cache."""
        if self._prefix is None or sequence.context is not None:
            return
        count, dense = sequence.num_computed, sequence.under.policy.dense
        exact = (count if dense else sequence.num_prompt) if sequence.exact else 0
        if sequence.num_settled is not None:
            count = min(count, sequence.num_settled)
        pages = sequence.pages
        if NO_PAGE in pages:  # pages after an evicted one cannot be a prefix
            pages = pages[: pages.index(NO_PAGE)]
        self._prefix.insert(
            sequence.tokens,
            pages,
            exact,
            end=count,
            by=sequence.under.policy,
            group=sequence.page_group,
        )

    def check_room(self, sequence: Sequence) -> None:
        """CapacityError if the kept and the coming tokens can never fit together."""
        length = min(sequence.token_limit, self._max_length)
        size = self._cache.page_size
        pages = self.most(sequence, length) - sequence.pages.count(NO_PAGE)
        if pages > self._cache.max_pages:
            self.release(sequence)
            raise CapacityError(
                f"what is kept of the documents, the question and max_tokens need {pages * size} "
                f"tokens of KV cache, but the limit is {self._cache.max_pages * size}; raise "
                "memory=, lower max_tokens, or keep less"
            )

    def most(self, sequence: Sequence, length: int) -> int:
        """The most entries of its page list for `length` tokens, with gaps in its prompt."""
        holes = sequence.pages.count(NO_PAGE)
        absent = holes * self._cache.page_size
        lengths = sequence.num_prompt - absent, length - absent
        return holes + page_limit(sequence.under.policy, self._cache.geometry, *lengths)

    def release(self, sequence: Sequence) -> None:
        """Releases all pages of a sequence."""
        self._cache.release(page for page in sequence.pages if page != NO_PAGE)
        sequence.forget_pages()

    def discard(self, copies: PageCopies) -> None:
        """Releases what is not to be copied after all."""
        for source, _ in copies:
            self._cache.release(source)
        copies.clear()

    def _forget_known(self, count: int) -> int:
        """Evicts up to `count` pages of cached prefixes that no request uses; returns how many."""
        return 0 if self._prefix is None or count <= 0 else self._prefix.evict(count)
