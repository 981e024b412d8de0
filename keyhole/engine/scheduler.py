"""Schedules steps: decoding sequences first, then prompt chunks, then new requests.

The stored documents of a prompt are filled in the remaining time of steps, one prompt at a time,
before it is admitted; later prompts may overtake it meanwhile. When pages run out, the prompt being
filled releases its pages first and waits until a sequence has ended; then nothing overtakes it.

When pages still run out, the youngest running sequence is pre-empted: it releases its pages and
returns to the head of the queue. Later its prompt is computed again and its generated tokens are
replayed one per step under the policy, so that it continues exactly where it was.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from keyhole.cache.page_list import NO_PAGE
from keyhole.cache.pages import PageCache
from keyhole.cache.prefix_cache import PrefixIndex
from keyhole.cache.recurrent_state import RecurrentState, StateSnapshots
from keyhole.config import EngineConfig
from keyhole.engine.allocation import Demand, page_limit
from keyhole.engine.documents.filling import Pace, PacedUnits
from keyhole.engine.fairness import FairQueue
from keyhole.engine.request import RequestPolicy
from keyhole.engine.sequence import Sequence
from keyhole.errors import CapacityError, KeyholeError

_NO_PAGES = np.zeros(0, np.int32)

#: Pages to copy, in this order: from the pages of a first list to those of a second.
PageCopies = list[tuple[list[int], list[int]]]


@dataclass
class SchedulerOutput:
    """One step: sequences that decode one token, and (sequence, tokens) of prompts.

    admitted: sequences that run from this step on. copies: pages to copy before the model runs, in
    this order, from the first list to the second; each has a reference to the first, to be released
    then. filling: the sequence whose pages are filled in the rest of the step, with what is known
    of its prompt or with stored documents. refused: waiting sequences that ended with an error.
    drafts: the tokens proposed to follow the newest token of a decoding sequence, at least one
    each, which the step computes too.
    """

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    copies: PageCopies = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    filling: Sequence | None = None
    refused: list[Sequence] = field(default_factory=list)
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)

    @property
    def rows(self) -> list[Sequence]:
        """The sequence of each decoded token: a decoding sequence, once more per proposed token."""
        if not self.drafts:
            return self.decodes
        return [s for s in self.decodes for _ in range(1 + len(self.drafts.get(s, ())))]

    @property
    def runs(self) -> bool:
        """Whether the model runs in this step."""
        return bool(self.decodes or self.chunks)

    def by_policy(self) -> dict[RequestPolicy, SchedulerOutput]:
        """The step in parts, one for each policy that its sequences run under."""
        parts: dict[RequestPolicy, SchedulerOutput] = defaultdict(SchedulerOutput)
        for sequence in self.decodes:
            part = parts[sequence.under]
            part.decodes.append(sequence)
            if sequence in self.drafts:
                part.drafts[sequence] = self.drafts[sequence]
        for sequence, count in self.chunks:
            parts[sequence.under].chunks.append((sequence, count))
        return parts


class Scheduler:
    """Holds waiting and running sequences and allocates pages, slots and prompt tokens.

    loads: what is to be loaded of a sequence's prompt, when it is admitted; None: nothing.
    states: recurrent states after cached prefixes; None without a recurrent state or prefix cache.
    """

    def __init__(
        self,
        cache: PageCache,
        prefix: PrefixIndex | None,
        config: EngineConfig,
        *,
        max_length: int,
        loads: Callable[[Sequence], PacedUnits[None] | None],
        pace: Pace,
        recurrent: RecurrentState | None = None,
    ) -> None:
        self.waiting = FairQueue(shares_prompts=prefix is not None)
        self.running: list[Sequence] = []
        self._cache = cache
        self._prefix = prefix
        self.states: StateSnapshots | None = None
        if prefix is not None and recurrent is not None:
            self.states = StateSnapshots(recurrent, cache.page_size)
        self._config = config
        self._max_length = max_length
        self._loads = loads
        self._pace = pace
        self.lent: list[int] = []  # pages in which documents are being encoded
        self._slots = list(range(config.max_batch - 1, -1, -1))
        self._most_of_one = max(1, int(config.max_prefill_share * config.prefill_chunk))

    def schedule(self) -> SchedulerOutput:
        """The next step, with pages for all its tokens; an empty plan means nothing to do."""
        plan = SchedulerOutput()
        budget = self._config.prefill_chunk
        for sequence in list(self.running):
            if sequence.slot < 0:  # pre-empted in this loop for an older one
                continue
            if sequence.loading is not None:
                continue
            count = 1 if sequence.is_decoding else self._chunk(sequence, budget)
            if count and self._reserve_or_preempt(sequence, count, plan):
                budget -= self._enter(sequence, count, plan)
        budget = self._let_in(budget, plan)
        self._spend(budget, plan)
        plan.filling = self._filling()
        return plan

    def _spend(self, budget: int, plan: SchedulerOutput) -> None:
        """Lets prompts take more than their share, the shortest first, as long as budget is left.

        Otherwise tokens of the step would go unused.
        """
        if not budget or not plan.chunks:
            return
        left = [s.next_part - count for s, count in plan.chunks]
        for place in sorted(range(len(left)), key=left.__getitem__):
            sequence, count = plan.chunks[place]
            if sequence.context is None and sequence.slot >= 0:
                more = min(budget, left[place])  # admission reserved pages for the whole prompt
                plan.chunks[place] = sequence, count + more
                budget -= more

    def _let_in(self, budget: int, plan: SchedulerOutput) -> int:
        """Lets waiting sequences run, in their order, as long as there is room.

        Returns the prompt tokens that are left of the budget.
        """
        # One slot is reserved for the request being filled.
        while budget and len(self._slots) > self.waiting.is_filling and not plan.preempted:
            sequence = self.waiting.next_to_run()
            if sequence is None:
                break
            copies: PageCopies = []
            try:
                admitted = self._admit(sequence, copies)
            except KeyholeError as error:
                self._discard(copies)
                if sequence.context is None:
                    self._release(sequence)
                    sequence.num_computed = 0
                    if plan.admitted:  # they run first; then the error comes again
                        break
                    raise
                self.refuse(sequence, error)
                plan.refused.append(sequence)
                continue
            if not admitted:
                break
            self.waiting.admit(sequence)
            plan.admitted.append(sequence)
            plan.copies += copies
            if sequence.loading is None:
                count = 1 if sequence.is_decoding else self._chunk(sequence, budget)
                budget -= self._enter(sequence, count, plan)
        return budget

    def refuse(self, sequence: Sequence, error: KeyholeError) -> None:
        """Ends a waiting sequence whose documents cannot be used."""
        self._drop(sequence)
        self.waiting.remove(sequence)
        sequence.error, sequence.finish_reason = error, "error"

    def put_back(self, plan: SchedulerOutput) -> None:
        """Undoes the admissions of a step whose copies cannot all be made."""
        self._discard(plan.copies)
        for sequence in reversed(plan.admitted):
            self._return(sequence)

    def out_of_pages(self, sequence: Sequence) -> None:
        """Releases the pages of a sequence being filled, to wait until others end.

        CapacityError if no others hold pages.
        """
        self._drop(sequence)
        if not (self.running or self.lent):
            raise CapacityError(
                f"documents and question have {sequence.num_prompt} tokens, and what is kept of "
                f"them does not fit into {self._cache.max_pages * self._cache.page_size} tokens of "
                "KV cache; raise memory=, or keep less"
            )
        self.waiting.stalled = sequence

    def demand(self) -> Demand | None:
        """The demand of running sequences; None while a request waits for pages."""
        if self.waiting and self._slots:
            return None
        pages = np.unique(np.concatenate([_NO_PAGES, *(s.pages for s in self.running)]))
        growth = sum(
            max(0, self._most(s, min(s.token_limit, self._max_length)) - len(s.pages))
            for s in self.running
        )
        return Demand(pages[pages != NO_PAGE], growth)

    def reserve_draft(self, sequence: Sequence, count: int) -> int:
        """Pages for `count` tokens after the newest one, without pre-emption; how many fit."""
        first = sequence.num_computed + 1
        if self._reserve(sequence, first + count):
            return count
        return min(count, len(sequence.pages) * self._cache.page_size - first)

    def release_rejected(self, sequence: Sequence) -> None:
        """Releases the pages that hold only proposed tokens that were not accepted."""
        kept = -(-sequence.num_computed // self._cache.page_size)
        self._cache.release(sequence.pages[kept:])
        del sequence.pages[kept:]

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Renumbers pages that were moved (`PageCache.pack`)."""
        for sequence in self.running:  # in place: a new array would mark a re-admitted sequence
            sequence.pages[:] = array("i", (numbers.get(page, page) for page in sequence.pages))

    def finish(self, sequence: Sequence, *, remember: bool = True) -> None:
        """Removes a sequence, waiting or running; its full pages may stay in the prefix cache."""
        if sequence.slot >= 0:
            self.running.remove(sequence)
            if remember:
                self.remember(sequence)
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self._drop(sequence)
            self._release(sequence)  # if an error ended it during admission

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

    def _filling(self) -> Sequence | None:
        """The sequence whose pages are filled now: one that runs, or one with documents.

        Of those with documents the one that began, or the first.
        """
        loading = next((one for one in self.running if one.loading is not None), None)
        if loading is not None:
            return loading
        if self.waiting.stalled is not None:
            if self.running or self.lent:
                return None
            self.waiting.stalled = None  # nothing else holds pages
        return self.waiting.next_to_fill(is_room=bool(self._slots))

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens of a prompt for one step; few of a question over documents while others decode.

        A prompt takes only its share while other prompts are to be computed.
        """
        left = sequence.next_part
        if self._are_others(sequence):
            budget = min(budget, self._most_of_one)
        if sequence.context is None or not any(one.is_decoding for one in self.running):
            return min(budget, left)
        # These tokens share matrix products with the decoding ones, so any number of them will do.
        return min(left, budget, self._pace.tokens)

    def _are_others(self, sequence: Sequence) -> bool:
        """Whether the prompt of another sequence is to be computed, too."""
        if self._slots and any(one is not sequence for one in self.waiting):
            return True
        return any(one is not sequence and not one.is_decoding for one in self.running)

    def _enter(self, sequence: Sequence, count: int, plan: SchedulerOutput) -> int:
        """Adds a sequence to the plan; returns its number of prompt tokens."""
        if sequence.is_decoding:
            plan.decodes.append(sequence)
            return 0
        plan.chunks.append((sequence, count))
        return count

    def _admit(self, sequence: Sequence, copies: PageCopies) -> bool:
        """Admits a waiting sequence: a slot, cached pages, and new ones for its other tokens.

        Adds the pages to be copied for it to `copies`.
        """
        at_once = sequence.under.policy.dense and not sequence.given
        sequence.prefill_end = len(sequence.tokens) if at_once else sequence.num_prompt
        if sequence.filling is None:
            self._reuse(sequence, copies)
        else:
            sequence.take_filled(sequence.filling)
            self._check_room(sequence)
        if not self._reserve_all(sequence, copies):
            self._release(sequence)
            self._discard(copies)
            sequence.num_computed = 0
            if sequence.context is not None and self.running:
                self.waiting.stalled = sequence
            return False
        if sequence.context is None:
            if sequence.begun is None:  # after a pre-emption its own pages may be known
                sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
            sequence.first = sequence.num_computed
            sequence.loading = self._loads(sequence)
        sequence.slot = self._slots.pop()
        sequence.begun = sequence.begun or time.perf_counter()
        self.running.append(sequence)
        return True

    def _reuse(self, sequence: Sequence, copies: PageCopies) -> None:
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
            fresh = self._cache.allocate(1) if self._cache.references(last) > 1 else [last]
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

    def _reserve_all(self, sequence: Sequence, copies: PageCopies) -> bool:
        """Allocates pages for all tokens; copies cached ones if the policy does not share pages."""
        # One spare page per running sequence, so that admission does not cause pre-emption.
        spare = len(self.running)
        # Under a policy that evicts, a replayed sequence never holds all its pages at once.
        most = self._most(sequence, len(sequence.tokens)) * self._cache.page_size
        length = max(sequence.prefill_end, min(len(sequence.tokens), most))
        shares = sequence.under.policy.shares_pages
        if shares or sequence.context is not None or not sequence.pages:
            return self._reserve(sequence, length, spare)
        known, sequence.pages = sequence.pages, array("i")
        if self._reserve(sequence, length, spare):
            copies.append((known.tolist(), sequence.pages[: len(known)].tolist()))
            return True
        # The cached pages themselves may be what is missing: compute them again.
        self._cache.release(known)
        self._discard(copies)
        sequence.num_computed, sequence.repeated, sequence.exact = 0, None, True
        return self._reserve(sequence, length, spare)

    def _discard(self, copies: PageCopies) -> None:
        """Releases what is not to be copied after all."""
        for source, _ in copies:
            self._cache.release(source)
        copies.clear()

    def _reserve_or_preempt(self, sequence: Sequence, count: int, plan: SchedulerOutput) -> bool:
        while not self._reserve(sequence, sequence.num_computed + count):
            begun = self.waiting.begun
            if begun is not None:
                self.out_of_pages(begun)
                continue
            youngest = self.running[-1]
            self._return(youngest)
            plan.preempted.append(youngest)
            if youngest is sequence:
                return False
        return True

    def _return(self, sequence: Sequence) -> None:
        """Returns a running sequence to the head of the queue; its pages are released."""
        self.running.remove(sequence)
        self._leave(sequence)
        sequence.num_computed = sequence.evicted_pages = 0
        self.waiting.appendleft(sequence)

    def _reserve(self, sequence: Sequence, length: int, spare: int = 0) -> bool:
        """Pages for `length` tokens, if `spare` more are left then."""
        need = max(0, -(-length // self._cache.page_size) - len(sequence.pages))
        if not need and not spare:  # most sequences in most steps
            return True
        short = need + spare - self._cache.available
        # Cached prefixes that no request reads are evicted before a layer is offloaded.
        short -= self._forget_known(max(short, need - self._cache.at_hand))
        if short > 0:
            return False
        pages = self._cache.allocate(need)
        assert pages is not None
        sequence.pages.extend(pages)
        return True

    def _forget_known(self, count: int) -> int:
        """Evicts up to `count` pages of cached prefixes that no request uses; returns how many."""
        return 0 if self._prefix is None or count <= 0 else self._prefix.evict(count)

    def _check_room(self, sequence: Sequence) -> None:
        """CapacityError if the kept and the coming tokens can never fit together."""
        length = min(sequence.token_limit, self._max_length)
        size = self._cache.page_size
        pages = self._most(sequence, length) - sequence.pages.count(NO_PAGE)
        if pages > self._cache.max_pages:
            self._release(sequence)
            raise CapacityError(
                f"what is kept of the documents, the question and max_tokens need {pages * size} "
                f"tokens of KV cache, but the limit is {self._cache.max_pages * size}; raise "
                "memory=, lower max_tokens, or keep less"
            )

    def _most(self, sequence: Sequence, length: int) -> int:
        """The most entries of its page list for `length` tokens, with gaps in its prompt."""
        holes = sequence.pages.count(NO_PAGE)
        absent = holes * self._cache.page_size
        lengths = sequence.num_prompt - absent, length - absent
        return holes + page_limit(sequence.under.policy, self._cache.geometry, *lengths)

    def _release(self, sequence: Sequence) -> None:
        self._cache.release(page for page in sequence.pages if page != NO_PAGE)
        sequence.forget_pages()

    def lend(self, pages: Collection[int]) -> None:
        """Registers pages in which a document is encoded; `take_back` frees them."""
        self.lent += pages

    def take_back(self, pages: Collection[int]) -> None:
        """Frees pages of `lent`; requests that wait for pages may use them."""
        gone = set(pages)
        self.lent = [page for page in self.lent if page not in gone]
        self._cache.release(pages)
        self.waiting.stalled = None

    def _drop(self, sequence: Sequence) -> None:
        """Releases the pages that its documents were filled into."""
        if sequence is self.waiting.stalled:
            self.waiting.stalled = None
        if sequence.filling is not None:
            sequence.filling.release()
            sequence.filling = None

    def _leave(self, sequence: Sequence) -> None:
        self.waiting.stalled = None  # pages are free again
        self._release(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1
