"""Who runs in the next step: decoding sequences first, then prompt chunks, then new arrivals.

When pages run out, the youngest running sequence gives its pages back and waits at the head of the
queue; later its prompt is computed again and its generated tokens are replayed one per step under
the policy, so that it goes on exactly where it was.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from keyhole.cache.page_list import NO_PAGE
from keyhole.cache.pages import PageCache
from keyhole.cache.prefix_cache import PrefixIndex
from keyhole.config import EngineConfig
from keyhole.engine.memory.eviction import page_limit
from keyhole.engine.request_policy import RequestPolicy
from keyhole.engine.sequence import Sequence
from keyhole.errors import CapacityError, KeyholeError


@dataclass
class SchedulerOutput:
    """One step: sequences that decode one token, and (sequence, tokens) of prompts."""

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    def by_policy(self) -> dict[RequestPolicy, SchedulerOutput]:
        """The step in parts, one for each policy that its sequences run under."""
        parts: dict[RequestPolicy, SchedulerOutput] = defaultdict(SchedulerOutput)
        for sequence in self.decodes:
            parts[sequence.under].decodes.append(sequence)
        for sequence, count in self.chunks:
            parts[sequence.under].chunks.append((sequence, count))
        return parts


@dataclass(frozen=True)
class Demand:
    """What the running sequences hold, and how much more they may ask for until they end.

    pages: the numbers of the pages. growth: how many pages more.
    """

    pages: set[int]
    growth: int


class Scheduler:
    """Holds waiting and running sequences and shares out pages, slots and prompt tokens."""

    def __init__(
        self,
        cache: PageCache,
        prefix: PrefixIndex | None,
        config: EngineConfig,
        *,
        max_length: int,
        prepare: Callable[[Sequence], bool],
        known: Callable[[Sequence], int],
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        #: Documents that are being encoded, whose pages come back.
        self.encoding = 0
        self._cache = cache
        self._prefix = prefix
        self._config = config
        self._max_length = max_length
        self._prepare = prepare
        self._known = known
        self._slots = list(range(config.max_batch - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence at the end of the queue."""
        self.waiting.append(sequence)

    def schedule(self) -> SchedulerOutput:
        """The next step, with pages for all its tokens; an empty plan means nothing to do."""
        plan = SchedulerOutput()
        budget = self._config.prefill_chunk
        for sequence in list(self.running):
            if sequence.slot < 0:  # pre-empted a moment ago for an older one
                continue
            count = 1 if sequence.is_decoding else min(budget, _left(sequence))
            if count and self._reserve_or_preempt(sequence, count, plan):
                budget -= self._enter(sequence, count, plan)
        while budget and self._slots and not plan.preempted:
            first = self._next()
            if first is None:
                break
            sequence = first
            try:
                admitted = self._admit(sequence)
            except KeyholeError as error:
                if sequence.context is None:
                    raise
                # Its documents cannot be used (damaged, too large); the others go on.
                self.waiting.remove(sequence)
                sequence.error, sequence.finish_reason = error, "error"
                continue
            if not admitted:
                break
            self.waiting.remove(sequence)
            count = 1 if sequence.is_decoding else min(budget, _left(sequence))
            budget -= self._enter(sequence, count, plan)
        return plan

    def demand(self) -> Demand | None:
        """What the running sequences need; None while a request waits for pages to be free."""
        if self.waiting and self._slots:
            return None
        pages = {page for s in self.running for page in s.pages if page != NO_PAGE}
        ends = [(s, len(s.prompt) + len(s.given) + s.params.max_tokens) for s in self.running]
        growth = sum(
            max(0, self._most(s, min(end, self._max_length)) - len(s.pages)) for s, end in ends
        )
        return Demand(pages, growth)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Takes the new numbers of pages that moved (`PageCache.pack`)."""
        for sequence in self.running:  # in place: a new list would be a new sequence to others
            sequence.pages[:] = [numbers.get(page, page) for page in sequence.pages]

    def finish(self, sequence: Sequence, *, remember: bool = True) -> None:
        """Takes a sequence out, wherever it is; its full pages may stay known to later prompts."""
        if sequence.slot >= 0:
            self.running.remove(sequence)
            if remember:
                self.remember(sequence)
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self._release(sequence)  # if an error stopped it while it was let in

    def remember(self, sequence: Sequence) -> None:
        """Makes the computed full pages of a sequence known to later prompts."""
        if self._prefix is None or sequence.context is not None:
            return
        exact = 0
        if sequence.exact:
            dense = sequence.under.policy.dense
            exact = sequence.num_computed if dense else len(sequence.prompt)
        computed, pages = sequence.tokens[: sequence.num_computed], sequence.pages
        if NO_PAGE in pages:  # what comes after an evicted page is of no use to others
            pages = pages[: pages.index(NO_PAGE)]
        under = sequence.under
        self._prefix.insert(computed, pages, exact, by=under.policy, group=under.page_group)

    def _next(self) -> Sequence | None:
        """The first waiting sequence, of those whose prompt no other one computes for them."""
        if self._prefix is None:  # nothing to wait for
            return self.waiting[0] if self.waiting else None
        return next((one for one in self.waiting if not one.is_blocked), None)

    def _enter(self, sequence: Sequence, count: int, plan: SchedulerOutput) -> int:
        """Puts a sequence into the plan; returns the prompt tokens that it takes."""
        if sequence.is_decoding:
            plan.decodes.append(sequence)
            return 0
        plan.chunks.append((sequence, count))
        return count

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence a slot, known pages and new ones for all its tokens."""
        at_once = sequence.under.policy.dense and not sequence.given
        sequence.prefill_end = len(sequence.tokens if at_once else sequence.prompt)
        if sequence.context is None:
            self._reuse(sequence)
        elif not self._documents(sequence):
            return False
        else:
            self._check_room(sequence)
        if not self._reserve_all(sequence):
            self._release(sequence)
            sequence.num_computed = 0
            return False
        if sequence.context is None:
            if not sequence.num_computed:
                sequence.num_computed = self._known(sequence)
            cached = min(sequence.num_computed, len(sequence.prompt))
            sequence.num_cached = max(sequence.num_cached, cached)
            sequence.first = sequence.num_computed
        sequence.slot = self._slots.pop()
        self.running.append(sequence)
        return True

    def _reuse(self, sequence: Sequence) -> None:
        """Takes known pages of the prompt; the last token is always computed, for its logits."""
        if self._prefix is None:
            return
        known = sequence.tokens[: sequence.prefill_end]
        policy, size = sequence.under.policy, self._cache.page_size
        pages, sequence.exact = self._prefix.match(
            known,
            approximate=sequence.reuse_approximate,
            by=policy,
            group=sequence.under.page_group,
        )
        computed = policy.reusable(len(pages) * size, size)
        self._cache.release(pages[computed // size :])
        sequence.pages = pages = pages[: computed // size]
        sequence.repeated = None
        if computed == sequence.prefill_end:
            # The last token is written again, into a page that others may hold.
            self._forget_known(1 - self._cache.at_hand)
            page = self._cache.writable(pages[-1])
            if page is None:
                self._cache.release([pages.pop()])
                computed -= size
            else:
                pages[-1] = page
                computed -= 1
                sequence.repeated = computed
        sequence.num_computed = computed

    def _reserve_all(self, sequence: Sequence) -> bool:
        """Pages for all its tokens, known ones copied if the policy wants it."""
        # One page more for each that runs: whoever enters must not push another out at once.
        spare = len(self.running)
        # Under a policy that evicts, what is replayed never has pages all at once.
        most = self._most(sequence, len(sequence.tokens)) * self._cache.page_size
        length = max(sequence.prefill_end, min(len(sequence.tokens), most))
        shares = sequence.under.policy.shares_pages
        if shares or sequence.context is not None or not sequence.pages:
            return self._reserve(sequence, length, spare)
        known, sequence.pages = sequence.pages, []
        there = self._reserve(sequence, length, spare)
        if there:
            self._cache.copy(known, sequence.pages[: len(known)])
        self._cache.release(known)
        if there:
            return True
        # What was known may lie in the very pages that are missing: compute it again there.
        sequence.num_computed, sequence.repeated, sequence.exact = 0, None, True
        return self._reserve(sequence, length, spare)

    def _reserve_or_preempt(self, sequence: Sequence, count: int, plan: SchedulerOutput) -> bool:
        while not self._reserve(sequence, sequence.num_computed + count):
            youngest = self.running.pop()
            self._leave(youngest)
            youngest.num_computed = youngest.evicted_pages = 0
            self.waiting.appendleft(youngest)
            plan.preempted.append(youngest)
            if youngest is sequence:
                return False
        return True

    def _reserve(self, sequence: Sequence, length: int, spare: int = 0) -> bool:
        """Pages for `length` tokens, if `spare` more are left then."""
        need = max(0, -(-length // self._cache.page_size) - len(sequence.pages))
        if not need and not spare:  # most sequences in most steps
            return True
        short = need + spare - self._cache.available
        # What nobody reads is not worth a layer: known prompts go before one moves down for them.
        short -= self._forget_known(max(short, need - self._cache.at_hand))
        if short > 0:
            return False
        pages = self._cache.allocate(need)
        assert pages is not None
        sequence.pages += pages
        return True

    def _forget_known(self, count: int) -> int:
        """Gives up to `count` pages of known prompts back that nobody else uses; how many."""
        return 0 if self._prefix is None or count <= 0 else self._prefix.evict(count)

    def _documents(self, sequence: Sequence) -> bool:
        """Brings a prompt's stored documents into pages; evicts cached prefixes for them."""
        while not self._prepare(sequence):
            if self._prefix is None or not self._prefix.evict(self._cache.capacity):
                if self.running or self.encoding:
                    return False
                raise CapacityError(
                    f"what is kept of {len(sequence.prompt)} tokens of documents and question does "
                    f"not fit into {self._cache.max_pages * self._cache.page_size} tokens of KV "
                    "cache; raise memory=, or keep less"
                )
        return True

    def _check_room(self, sequence: Sequence) -> None:
        """CapacityError if what was kept and what is to come can never be there together."""
        length = min(len(sequence.tokens) + sequence.params.max_tokens, self._max_length)
        size = self._cache.page_size
        pages = self._most(sequence, length) - sequence.pages.count(NO_PAGE)
        if pages > self._cache.max_pages:
            self._release(sequence)
            raise CapacityError(
                f"what is kept of the documents, the question and max_tokens need {pages * size} "
                f"tokens of KV cache, the limit is {self._cache.max_pages * size}; raise memory=, "
                "lower max_tokens or keep less"
            )

    def _most(self, sequence: Sequence, length: int) -> int:
        """The most entries of its list of pages, holes of its prompt included, for `length`."""
        holes = sequence.pages.count(NO_PAGE)
        absent = holes * self._cache.page_size
        lengths = len(sequence.prompt) - absent, length - absent
        return holes + page_limit(sequence.under.policy, self._cache.geometry, *lengths)

    def _release(self, sequence: Sequence) -> None:
        self._cache.release(page for page in sequence.pages if page != NO_PAGE)
        sequence.pages, sequence.kept, sequence.leaving = [], None, []

    def _leave(self, sequence: Sequence) -> None:
        self._release(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1


def _left(sequence: Sequence) -> int:
    return sequence.prefill_end - sequence.num_computed
