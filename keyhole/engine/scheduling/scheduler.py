"""Schedules steps: decoding sequences first, then prompt chunks, then new requests.

The stored documents of a prompt are filled in the remaining time of steps, one prompt at a time,
before it is admitted; later prompts may overtake it meanwhile. When pages run out, the prompt being
filled releases its pages first and waits until a sequence has ended; then nothing overtakes it.

When pages still run out, the youngest running sequence is pre-empted: it releases its pages and
returns to the head of the queue. Later its prompt is computed again and its generated tokens are
replayed one per step under the policy, so that it continues exactly where it was.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping

import numpy as np

from keyhole.cache.page_list import NO_PAGE
from keyhole.cache.pages import PageCache
from keyhole.cache.prefix_cache import PrefixIndex
from keyhole.cache.recurrent_state import RecurrentState
from keyhole.config import EngineConfig
from keyhole.engine.allocation import Demand
from keyhole.engine.documents.filling import Pace, PacedUnits
from keyhole.engine.scheduling.fairness import FairQueue
from keyhole.engine.scheduling.scheduler_output import PageCopies, SchedulerOutput
from keyhole.engine.scheduling.sequence_pages import SequencePages
from keyhole.engine.sequence import Sequence
from keyhole.errors import CapacityError, KeyholeError

_NO_PAGES = np.zeros(0, np.int32)


class Scheduler:
    """Holds waiting and running sequences; decides who gets slots, pages and prompt tokens.

    loads: what is to be loaded of a sequence's prompt, when it is admitted; None: nothing.
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
        self.pages = SequencePages(cache, prefix, max_length, recurrent)
        self._cache = cache
        self._config = config
        self._max_length = max_length
        self._loads = loads
        self._pace = pace
        self.lent: list[int] = []  # pages in which documents are being encoded
        self._slots = list(range(config.max_batch - 1, -1, -1))
        self._most_of_one = max(1, int(config.max_prefill_share * config.prefill_chunk))

    def schedule(self) -> SchedulerOutput:
        """The next step, with pages for all its tokens; an empty plan means nothing to do.

        It only decides: pages have numbers, and memory once the engine prepares the step.
        """
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
                self.pages.discard(copies)
                if sequence.context is None:
                    self.pages.release(sequence)
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
        self.pages.discard(plan.copies)
        for sequence in reversed(plan.admitted):
            self._return(sequence)

    def retract(self, plan: SchedulerOutput) -> None:
        """Undoes a step whose new pages cannot all have memory."""
        self.put_back(plan)
        self.pages.retract(self.running)
        if self.running:  # documents would be filled for nothing
            stored = (one for one in plan.admitted if one.context is not None)
            self.waiting.stalled = next(stored, None)

    def out_of_pages(self, sequence: Sequence, cause: BaseException | None = None) -> None:
        """Releases the pages of a sequence being filled, to wait until others end.

        CapacityError if no others hold pages. cause: what the system had no memory for; None: the
        cache may not grow further.
        """
        self._drop(sequence)
        if not (self.running or self.lent):
            if cause is not None:
                raise cause
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
            max(0, self.pages.most(s, min(s.token_limit, self._max_length)) - len(s.pages))
            for s in self.running
        )
        return Demand(pages[pages != NO_PAGE], growth)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Renumbers pages that were moved (`PageCache.pack`)."""
        for sequence in self.running:  # in place: a new array would mark a re-admitted sequence
            sequence.pages[:] = array("i", (numbers.get(page, page) for page in sequence.pages))

    def finish(self, sequence: Sequence, *, remember: bool = True) -> None:
        """Removes a sequence, waiting or running; its full pages may stay in the prefix cache."""
        if sequence.slot >= 0:
            self.running.remove(sequence)
            if remember:
                self.pages.remember(sequence)
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self._drop(sequence)
            self.pages.release(sequence)  # if an error ended it during admission

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
        # Generated tokens are no prompt, which a prefill policy may approximate.
        is_exact = sequence.under.policy.dense and self._config.prefill_policy is None
        at_once = is_exact and not sequence.given
        sequence.prefill_end = len(sequence.tokens) if at_once else sequence.num_prompt
        if sequence.filling is None:
            self.pages.reuse(sequence, copies)
        else:
            sequence.take_filled(sequence.filling)
            self.pages.check_room(sequence)
        # One spare page per running sequence, so that admission does not cause pre-emption.
        if not self.pages.reserve_all(sequence, copies, spare=len(self.running)):
            self.pages.release(sequence)
            self.pages.discard(copies)
            sequence.num_computed = 0
            if self.running and (sequence.context is not None or not self._cache.may_grow):
                self.waiting.stalled = sequence
            if sequence.context is None and self._take_from_later(sequence):
                return self._admit(sequence, copies)
            return False
        if sequence.context is None:
            if sequence.begun is None:  # after a pre-emption its own pages may be known
                sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
            sequence.first = sequence.num_computed
            sequence.loading = self._loads(sequence)
        sequence.slot = self._slots.pop()
        self.running.append(sequence)
        return True

    def _take_from_later(self, sequence: Sequence) -> bool:
        """Releases the pages of documents filled for a later sequence; False if it has none.

        Not while others hold pages, which become free without that.
        """
        begun = self.waiting.begun
        if self.running or self.lent or begun is None:
            return False
        if self.waiting.index(begun) < self.waiting.index(sequence):
            return False  # it runs first
        self._drop(begun)
        return True

    def _reserve_or_preempt(self, sequence: Sequence, count: int, plan: SchedulerOutput) -> bool:
        while not self.pages.reserve(sequence, sequence.num_computed + count):
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
        self.pages.release(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1
