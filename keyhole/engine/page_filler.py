"""Fills pages in the remaining time of an engine's steps, so that no other request waits for it.

With what is known of a prompt (`KnownPrompts`) or with stored documents (`DocumentPrefill`).
"""

from __future__ import annotations

from collections.abc import Callable

from keyhole.config import EngineConfig
from keyhole.engine.documents.filling import OutOfPages, Pace
from keyhole.engine.documents.prefill import DocumentPrefill
from keyhole.engine.documents.stored_rows import HostBlocks, HotBlocks
from keyhole.engine.request import RequestPolicy
from keyhole.engine.scheduling.scheduler import Scheduler
from keyhole.engine.scheduling.scheduler_output import SchedulerOutput
from keyhole.engine.sequence import Sequence
from keyhole.errors import CapacityError, ConfigError, KeyholeError, is_out_of_memory
from keyhole.models.model import Model
from keyhole.models.positions import RopeShift


class PageFiller:
    """Runs the units of the sequence that a step names.

    document_prefill: the `DocumentPrefill` of a policy. hot: the blocks of documents that all of
    these share. ConfigError for a memory of blocks beside a model that cannot use documents.
    """

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        pace: Pace,
        document_prefill: Callable[[RequestPolicy], DocumentPrefill],
        config: EngineConfig,
    ) -> None:
        if config.hot_document_bytes is not None:
            try:
                RopeShift.for_documents(model)
            except ConfigError as error:
                given = f"hot_document_bytes={config.hot_document_bytes}"
                raise ConfigError(f"leave out {given}: {error}") from error
        host = HostBlocks(config.host_document_bytes or 0)
        self.hot = HotBlocks(config.hot_document_bytes or 0, host)
        self._scheduler = scheduler
        self._pace, self._chunk = pace, config.prefill_chunk
        self._document_prefill = document_prefill

    def encoding_size(self, left: int) -> int:
        """The tokens of a document to encode at once: few while sequences decode."""
        if any(sequence.is_decoding for sequence in self._scheduler.running):
            return self._pace.part(left, self._chunk)
        return min(left, self._chunk)

    def go_on(self, plan: SchedulerOutput, spent: float) -> None:
        """Runs units of `plan.filling`; spent: seconds of the step so far.

        An error of its documents ends that request alone, and adds it to `plan.refused`.
        """
        self._take_time(plan, spent)
        sequence, pace = plan.filling, self._pace
        if sequence is None:
            return
        if not pace.begin(spent=spent, alone=not plan.runs, only_decodes=not plan.chunks):
            return
        try:
            self._fill(sequence)
        except KeyholeError as error:  # damaged, too large
            if sequence.loading is not None:
                raise
            self._scheduler.refuse(sequence, error)
            plan.refused.append(sequence)

    def _take_time(self, plan: SchedulerOutput, seconds: float) -> None:
        """Reports the duration of a step with decoding sequences to the pace."""
        if not plan.decodes:
            return
        if not plan.chunks:
            self._pace.decoded(seconds)
        elif all(sequence.context is not None for sequence, _ in plan.chunks):
            self._pace.computed(sum(count for _, count in plan.chunks), seconds)

    def _fill(self, sequence: Sequence) -> None:
        if sequence.loading is None and sequence.filling is None:
            sequence.filling = self._document_prefill(sequence.under).begin(sequence)
        work = sequence.loading or sequence.filling
        assert work is not None
        try:
            work.run(self._pace)
        except OutOfPages as error:
            self._scheduler.out_of_pages(sequence, error.__cause__)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                f"what is stored of a prompt of {sequence.num_prompt} tokens did not fit in "
                "memory; lower prefill_chunk or memory="
            ) from error
        if sequence.loading is not None and sequence.loading.is_done:
            sequence.loading = None
