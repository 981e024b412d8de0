"""What is known of prompts beyond an engine's own prefix cache, copied into pages in units.

The scheduler asks whether there is something to load and reserves the pages; the units run in the
remaining time of steps (`engine/page_filler.py`), so that other requests do not wait for a disk.
"""

from __future__ import annotations

from collections.abc import Generator

from keyhole.cache.pages import PageCache
from keyhole.engine.documents.filling import PacedUnits
from keyhole.engine.documents.fingerprint import head_fingerprint
from keyhole.engine.prompts.prefix_store import StoredPrefixes
from keyhole.engine.prompts.shared_prompt_cache import SharedPromptCache
from keyhole.engine.sequence import Sequence
from keyhole.retrieval.head import RetrievalHead


class KnownPrompts:
    """Prompts of other engines in memory, and prefixes on disk.

    copies: prompts of engines over the same model; None: of this engine alone. stored: prefixes of
    other processes; None: of none. head: the retrieval head whose keys are copied too.
    """

    def __init__(
        self,
        cache: PageCache,
        copies: SharedPromptCache | None,
        stored: StoredPrefixes | None,
        head: RetrievalHead | None,
    ) -> None:
        self._cache, self._copies, self._stored = cache, copies, stored
        self._head = None if copies is None or head is None else head_fingerprint(head)

    def begin(self, sequence: Sequence) -> PacedUnits[None] | None:
        """The units that load what is known of a prompt after its first `num_computed` tokens.

        None if there is nothing. Nothing is read or copied before the first unit runs.
        """
        if sequence.under.policy.reads_queries or not sequence.is_base:
            return None
        if not (self._has_copy(sequence) or self._has_stored(sequence)):
            return None
        return PacedUnits(self._units(sequence, is_new=sequence.begun is None))

    def save(self, sequence: Sequence, count: int) -> None:
        """Saves what the last `count` computed tokens of a prompt complete."""
        if sequence.context is not None or not (sequence.is_base and sequence.exact):
            return
        if self._stored is not None:
            begin = sequence.num_computed - count
            end = min(sequence.num_computed, sequence.num_prompt)
            self._stored.save(sequence.tokens, sequence.pages, begin, end)
        if self._copies is not None and sequence.is_decoding:
            self._copies.save(sequence.prompt, sequence.pages, self._cache, self._head)

    def flush(self) -> None:
        """Waits until everything saved is on disk."""
        if self._stored is not None:
            self._stored.flush()

    def _has_copy(self, sequence: Sequence) -> bool:
        if self._copies is None or sequence.num_computed:
            return False
        return self._copies.has(sequence.prompt, self._cache, self._head)

    def _has_stored(self, sequence: Sequence) -> bool:
        """The pages of a prefix are written as a whole, so the known tokens must fill theirs."""
        known = sequence.num_computed
        if self._stored is None or not sequence.exact or known % self._cache.page_size:
            return False
        return self._stored.has_more(sequence.tokens[: sequence.num_prompt], known)

    def _units(self, sequence: Sequence, *, is_new: bool) -> Generator[str, None, None]:
        """is_new: it runs for the first time; after a pre-emption its own pages may be known."""
        policy, pages = sequence.under.keeper, sequence.pages

        def known(count: int) -> None:
            sequence.num_computed = sequence.first = count
            if is_new:
                sequence.num_cached = min(count, sequence.num_prompt)

        if self._copies is not None and self._has_copy(sequence):
            yield "copied prompt"
            known(self._copies.load(sequence.prompt, pages, self._cache, policy, self._head))
        if self._stored is not None and self._has_stored(sequence):
            prompt = sequence.tokens[: sequence.num_prompt]
            chunks = self._stored.load(prompt, pages, sequence.num_computed, policy)
            while True:
                yield "stored prefix"
                count = next(chunks, None)
                if count is None:
                    return
                known(count)
