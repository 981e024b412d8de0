"""The engine: schedule, run, sample, count, fill. Token ids in, token ids out."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from dataclasses import replace

from torch import Tensor

from keyhole.cache.page_list import NO_PAGE
from keyhole.cache.pages import PageCache
from keyhole.cache.prefix_cache import PrefixIndex
from keyhole.config import EngineConfig, SamplingParams
from keyhole.engine.allocation import LayerOffloader, allocate
from keyhole.engine.cuda_graph_runner import Recorder, make_recorder
from keyhole.engine.documents.filling import Context, Pace
from keyhole.engine.documents.prefill import DocumentPrefill
from keyhole.engine.head_runner import load_gate, load_head
from keyhole.engine.model_runner import Runner
from keyhole.engine.page_filler import PageFiller
from keyhole.engine.prompts.known_prompts import KnownPrompts
from keyhole.engine.prompts.prefix_store import stored_prefixes
from keyhole.engine.prompts.shared_prompt_cache import SharedPromptCache
from keyhole.engine.request import (
    PolicySpec,
    RequestLimits,
    RequestPolicy,
    adapter_number,
    beside,
    end_ids,
    longest,
    requested,
)
from keyhole.engine.scheduling.fairness import FairLock
from keyhole.engine.scheduling.scheduler import Scheduler
from keyhole.engine.scheduling.scheduler_output import SchedulerOutput
from keyhole.engine.sequence import DraftCounters, Sequence
from keyhole.engine.speculation.draft_runner import DraftRunner, load_draft, make_head_runner
from keyhole.engine.speculation.drafting import Drafting, require_exact
from keyhole.engine.speculation.verifier import Verifier
from keyhole.errors import CapacityError, ConfigError, is_out_of_memory
from keyhole.grammar import Grammars
from keyhole.models import device_map
from keyhole.models.model import Model
from keyhole.models.modules import recurrent_layers
from keyhole.policies.base import Policy
from keyhole.policies.prefill import resolved_prefill_policy
from keyhole.retrieval.gate import SeerGate
from keyhole.retrieval.head import RetrievalHead
from keyhole.tokenization import Detokenizer, word_ids

# Idle policies of requests whose buffers and CUDA graphs are kept.
_MOST_IDLE = 4


class Engine:
    """Serves many sequences over one model, each under the engine's policy or its own.

    cache: shared with other engines; None: a new one, within `config.memory`.
    head, gate: for a policy that needs one; None: the policy's own, or the one next to the weights.
    copies: prompts computed by engines over the same model; this engine adds its own.

    Not thread-safe: callers with several threads hold `lock` during each call.
    """

    def __init__(
        self,
        model: Model,
        policy: Policy,
        config: EngineConfig,
        cache: PageCache | None = None,
        head: RetrievalHead | None = None,
        copies: SharedPromptCache | None = None,
        gate: SeerGate | None = None,
    ) -> None:
        copies = None if model.is_hybrid else copies  # copies lack the recurrent state
        self.lock = FairLock()
        self.model = model
        self.geometry = model.geometry(config.page_size).stored_as(config.kv_dtype)
        self._given, self.policy = policy, requested(policy, policy, self.geometry)
        self._own = RequestPolicy(self.policy, self.policy)
        self.config = config = device_map.settings(model, self.policy, self.geometry, config)
        self.prefill_policy = resolved_prefill_policy(config.prefill_policy, self.geometry)
        # Other engines' prompts are exact, or computed under another policy.
        copies = copies if self.prefill_policy is None else None
        num_draft_tokens = 0 if config.draft is None else config.num_draft_tokens
        self.max_length = longest(model, config)
        self.grammars = Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)
        if copies is not None and config.offload is not None:
            raise ConfigError("copies of prompts cannot be combined with offload=; leave one out")
        draft = load_draft(config.draft_folder, model) if config.drafts_by_model else None
        if draft is not None:
            # Steps of a draft model are launched one by one, and its data stay with this engine.
            config, copies, head = replace(config, graphs=False), None, draft.head
        if self.policy.wants_head and head is None:
            head = load_head(self.policy, model)
        self._gate = load_gate(self.policy, model, self.geometry) if gate is None else gate
        self.recurrent = recurrent_layers.new_state(model.name, model.network, config)
        wanted = config.graphs and self.policy.capturable is True and self.recurrent is None
        recorder = make_recorder(model.device) if wanted else None
        self.offloader: LayerOffloader | None = None
        if cache is None:
            # One more row of buffers, for padding rows of captured steps.
            rows = config.max_batch * (1 + num_draft_tokens) + (recorder is not None)
            cache, self.offloader = allocate(
                model,
                self.geometry,
                self.policy,
                config,
                head,
                num_rows=rows,
                reserved=0 if self.recurrent is None else self.recurrent.nbytes,
                draft=draft,
                gate=self._gate,
            )
        self.cache = cache
        self.prefix = PrefixIndex(self.cache) if config.prefix_cache else None
        stored = stored_prefixes(model, self.cache, config, head, self.prefill_policy)
        self.known_prompts = KnownPrompts(self.cache, copies, stored, head)
        self.pace = Pace()
        self.scheduler = Scheduler(
            self.cache,
            self.prefix,
            config,
            max_length=self.max_length,
            loads=self.known_prompts.begin,
            pace=self.pace,
            recurrent=self.recurrent,
        )
        self._verifier = Verifier(model.eos_token_ids, self.scheduler, self.max_length)
        self.filler = PageFiller(model, self.scheduler, self.pace, self.document_prefill, config)
        self.head_runner = make_head_runner(model, self.cache, head, draft, config)
        self.drafting: Drafting | None = None
        if config.draft is not None:
            require_exact(self.policy, self.geometry, head, config)
            by = self.head_runner if isinstance(self.head_runner, DraftRunner) else None
            self.drafting = Drafting(config, self.scheduler.pages, self.max_length, by)
        self._records = recorder is not None
        self._runner = self._make_runner(self._own, recorder)
        # The engine's own first, then those of requests, in order of last use.
        self._runners = {self._own: self._runner}
        self._document_prefills: dict[RequestPolicy, DocumentPrefill] = {}
        self._group_numbers = itertools.count(1)
        self.max_pages = self.cache.max_pages
        placed = self.cache, self.offloader
        self.limits = RequestLimits(model, self.geometry, config, *placed, self.max_length)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def replayed_steps(self) -> int:
        """The number of decode steps that were replayed as CUDA graphs."""
        return sum(runner.replayed for runner in self._runners.values())

    @property
    def why_not_replayed(self) -> str | None:
        """Why decode steps are not CUDA graphs; None if they are."""
        if not self.config.graphs:
            return "graphs=False"
        if self.config.drafts_by_model or self.policy.capturable is not True:
            by_draft = self.config.drafts_by_model
            return "a draft model proposes tokens" if by_draft else str(self.policy.capturable)
        if self.recurrent is not None:
            return "the model has layers with a recurrent state"
        recorded = self._runner._recorded
        if recorded is None:
            return f"there are no CUDA graphs on a device of kind {self.model.device.type}"
        if self.policy.reads_keys and self.cache.offloaded_layers:
            return "the policy reads keys, and layers are offloaded"
        return recorded.why_not

    def under(self, policy: PolicySpec | None) -> RequestPolicy:
        """The policy of a request, for `add`; None: the engine's own.

        A mapping has those settings of the engine's policy that differ. ConfigError for a policy
        that cannot run over this engine's cache.
        """
        if policy is None:
            return self._own
        made = requested(policy, self._given, self.geometry)
        for known in self._runners:
            if known.policy == made:
                return known
        device_map.settings(self.model, made, self.geometry, self.config)
        if self.drafting is not None:
            head = None if self.head_runner is None else self.head_runner.head
            require_exact(made, self.geometry, head, self.config)
        return beside(
            made,
            self.policy,
            self.geometry,
            has_head=self.head_runner is not None,
            memory=None if self.offloader is None else self.offloader.plan.model,
            group=str(next(self._group_numbers)).encode(),
        )

    def _make_runner(self, under: RequestPolicy, recorder: Recorder | None) -> Runner:
        return Runner(
            self.model,
            self.cache,
            under.policy,
            self.config.max_batch,
            self.head_runner,
            None if self.offloader is None else self.offloader.prefetcher,
            recorder,
            under.keeper,
            self.recurrent,
            num_draft_tokens=self.config.num_draft_tokens if self.drafting else 0,
            prefill=self.prefill_policy,
            gate=self._gate,
        )

    def _enter(self, under: RequestPolicy) -> None:
        """Marks the policy of a request as last used; drops the least recently used idle ones."""
        if under is self._own:
            return
        runner = self._runners.pop(under, None)
        if runner is None:
            records = self._records and under.policy.capturable is True
            recorder = make_recorder(self.model.device) if records else None
            runner = self._make_runner(under, recorder)
        used = {s.under for s in (*self.scheduler.waiting, *self.scheduler.running)}
        idle = [one for one in self._runners if one is not self._own and one not in used]
        for one in idle[: max(0, len(idle) - _MOST_IDLE)]:
            del self._runners[one]
            self._document_prefills.pop(one, None)
        self._runners[under] = runner

    def add(
        self,
        prompt: Tokens[int],
        params: SamplingParams,
        *,
        given: Tokens[int] = (),
        keep_logits: bool = False,
        reuse_approximate: bool = False,
        context: Context | None = None,
        after: Sequence | None = None,
        under: RequestPolicy | None = None,
        caller: str = "",
    ) -> Sequence:
        """Queues a request; raises RequestError or CapacityError if it can never be served.

        given: tokens after the prompt that are decoded under the policy instead of sampled ones.
        keep_logits: keep the logits after the prompt and after each later token, given ones too,
        float32 on the CPU. reuse_approximate: cached pages of a sparse decode may serve as prompt.
        context: the stored documents that the prompt begins with. after: a request with the same
        prompt, whose computation this one waits for and shares. under: the result of `under`; None:
        the engine's policy. caller: identifies who sent the request; the requests of different
        callers take turns.
        """
        under, stored = under or self._own, context is not None
        num_tokens = len(prompt) + len(given)
        params = self.limits.resolve(params, num_tokens, under.policy, stored=stored)
        if context is not None and self.config.drafts_by_model:
            raise ConfigError(
                "draft='eagle3' cannot be used with stored documents; leave one of them out"
            )
        if context is not None:
            self.document_prefill(under)  # refuses a model whose keys cannot be shifted
            context.check(under.policy)
        tokens = [*prompt, *given] if given else prompt
        self.limits.check(tokens, params, under.policy, num_given=len(given), stored=stored)
        assert params.max_tokens is not None
        length = min(num_tokens + params.max_tokens, self.max_length)
        sequence = Sequence(
            array("i", prompt),
            params,
            Detokenizer(self.model.tokenizer, params.stop, skip_special=params.skip_special_tokens),
            given=given,
            keep_logits=keep_logits,
            reuse_approximate=reuse_approximate,
            context=context,
            bad_ids=word_ids(self.model.tokenizer, params.bad_words, self.model.vocab_size),
            end_ids=end_ids(params, self.model),
            after=after,
            under=under,
            grammar=None if params.grammar is None else self.grammars.start(params.grammar),
            caller=caller,
            drafts=None if self.drafting is None else DraftCounters(),
            rope_length=0 if self.model.rope is None else self.model.rope.effective(length),
            adapter=adapter_number(params.adapter, self.model),
        )
        self._enter(under)
        self.scheduler.waiting.enter(sequence)
        return sequence

    def document_prefill(self, under: RequestPolicy) -> DocumentPrefill:
        """Fills stored documents under a policy. ConfigError if keys cannot be shifted."""
        made = self._document_prefills.get(under)
        if made is None:
            shared = (self.config.prefill_chunk, self.pace, self.head_runner, self.prefix)
            made = DocumentPrefill(self.model, self.cache, under.policy, *shared, self.filler.hot)
            if under in self._runners:
                self._document_prefills[under] = made
        return made

    def step(self) -> list[Sequence]:
        """Runs one step; returns the sequences that got a token or finished.

        The rest of the step fills pages of prompts: with what is known of them, or with documents.
        """
        begin = time.perf_counter()
        plan = self._schedule()
        self._prepare(plan)
        if self.drafting is not None:
            self.drafting.propose(plan)
        advanced = self._run(plan)
        self.filler.go_on(plan, time.perf_counter() - begin)
        for sequence in plan.decodes:
            sequence.step_ms.append(1e3 * (time.perf_counter() - begin))
        return advanced + plan.refused

    def _schedule(self) -> SchedulerOutput:
        """The step, with memory for its new pages; if there is none, a step without new memory.

        If nothing can run without, the first request ends with the error.
        """
        plan = self.scheduler.schedule()
        try:
            self.cache.provide()
        except BaseException as error:
            self.scheduler.retract(plan)
            if not isinstance(error, CapacityError):
                raise
            with self.cache.without_growth():
                smaller = self.scheduler.schedule()
            self.cache.provide()  # only counts them
            smaller.refused[:0] = plan.refused
            filled = smaller.filling is not None and smaller.filling.filling is not None
            if not (self.scheduler.running or self.scheduler.lent or filled):
                first = self.scheduler.waiting[0]
                self.scheduler.refuse(first, error)
                smaller.refused.append(first)
                smaller.filling = None
            return smaller
        return plan

    def _prepare(self, plan: SchedulerOutput) -> None:
        """Brings what the step continues from to where the scheduler wants it.

        CapacityError if memory runs out; what was to be admitted then waits again.
        """
        try:
            while plan.copies:
                self.cache.copy(*plan.copies[0])
                self.cache.release(plan.copies.pop(0)[0])
        except BaseException as error:
            self.scheduler.put_back(plan)
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                "copies of cached pages did not fit in memory; lower max_batch or memory="
            ) from error
        for sequence in plan.admitted:
            sequence.begun = sequence.begun or time.perf_counter()
            known, group = sequence.num_computed, sequence.page_group
            if self.scheduler.pages.states is not None and known:
                self.scheduler.pages.states.load(sequence.tokens, known, group, sequence.slot)

    def _run(self, plan: SchedulerOutput) -> list[Sequence]:
        """Runs the model once for each policy in the step."""
        if not plan.runs:
            return []
        if self.offloader is not None and self.offloader.may_become_resident:
            self._make_resident(self.offloader)
        if len(self._runners) == 1:
            return self._run_under(self._runner, plan)
        parts = plan.by_policy().items()
        return [s for under, part in parts for s in self._run_under(self._runners[under], part)]

    def _run_under(self, runner: Runner, plan: SchedulerOutput) -> list[Sequence]:
        """Runs the sequences of one policy: forward pass, sampling, counters, eviction."""
        wanted, logits, reads = self._forward(runner, plan)
        self._share_prompts(plan)
        if any(sequence.is_ready for sequence in wanted):
            reads = reads.to("cpu", non_blocking=True)  # complete when the tokens are
        advanced = self._verifier.take(wanted, logits, plan)
        runner.accept()
        self._count(runner, plan, reads)
        runner.evict()
        for sequence in plan.drafts:
            if not sequence.is_finished:
                self.scheduler.pages.release_rejected(sequence)
                runner.cut(sequence)
                if self.drafting is not None:
                    self.drafting.cut(sequence)
        return advanced

    def _forward(
        self, runner: Runner, plan: SchedulerOutput
    ) -> tuple[list[Sequence], Tensor, Tensor]:
        """Calls `Runner.run`; CapacityError if memory runs out."""
        try:
            return runner.run(plan)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                f"a step of {len(plan.decodes)} decoding sequences and "
                f"{sum(count for _, count in plan.chunks)} prompt tokens did not fit in memory; "
                "lower max_batch, prefill_chunk or memory="
            ) from error

    def _share_prompts(self, plan: SchedulerOutput) -> None:
        """Saves what this step completed of prompts, for later ones that begin in the same way."""
        for sequence, count in plan.chunks:
            self.known_prompts.save(sequence, count)
            if sequence.is_decoding:
                self.scheduler.pages.remember(sequence)
            end, group = sequence.num_computed, sequence.page_group
            states = self.scheduler.pages.states
            if states is not None and sequence.exact and end in sequence.state_ends:
                states.save(sequence.tokens, end, group, sequence.slot)

    def abort(self, sequence: Sequence) -> None:
        """Takes a sequence out before its end and frees its pages."""
        if not sequence.is_finished:
            self._verifier.finish(sequence, "abort")

    def check_integrity(self) -> None:
        """Asserts that every page has one reference for each list that holds it (for tests)."""
        holders = [[p for p in s.pages if p != NO_PAGE] for s in self.scheduler.running]
        holders += [self.scheduler.lent]
        holders += [s.filling.held for s in self.scheduler.waiting if s.filling is not None]
        holders += [[page] for page in (self.prefix.held() if self.prefix else [])]
        self.cache.check_integrity(holders)

    def _make_resident(self, offloader: LayerOffloader) -> None:
        demand = self.scheduler.demand()
        if demand is not None:
            offloader.make_resident(demand, self.prefix, self._renumber)

    def _renumber(self, numbers: Mapping[int, int]) -> None:
        self.scheduler.renumber(numbers)
        for runner in self._runners.values():
            runner.renumber()

    def _count(self, runner: Runner, plan: SchedulerOutput, reads: Tensor) -> None:
        for sequence, row in zip(plan.rows, reads.tolist(), strict=True):
            sequence.counters.add_step(*row)
        if self.offloader is not None:
            for sequence in plan.decodes:
                sequence.offloaded = self.offloader.offloaded
        for sequence, load in zip(plan.decodes, runner.traffic(), strict=False):
            sequence.counters.add_loads(load.hits, load.misses, load.moved_bytes)
