"""One request: its tokens, pages and counters while it runs, and its result."""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field, replace

from torch import Tensor

from keyhole.cache.packing import Packing
from keyhole.cache.unpaged_keys import UnpagedTokens
from keyhole.config import SamplingParams
from keyhole.engine.documents.filling import Context, Filling, PacedUnits, Reused
from keyhole.engine.read_trace import ReadTrace, TokenReads
from keyhole.engine.request import DENSE, RequestPolicy
from keyhole.errors import KeyholeError
from keyhole.grammar import GrammarState
from keyhole.tokenization import Detokenizer


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The cost of one request. None: does not apply.

    Fractions and bytes are of decode steps only, except for the next one.
    prompt_attended_fraction: under a prefill policy, blocks of keys read for the tokens of the
    prompt / blocks before them, mean over layers with full attention and heads.
    attended_fraction: keys read / keys cached, mean over layers and steps.
    moved_bytes, hit_rate: bytes that offloaded layers loaded, and the share of selected tokens that
    were already in their buffers.
    sequence_ratio, recompute_ratio: of stored documents, tokens kept (mean over layers) and tokens
    computed again / all. held_ratio: tokens of a layer for which pages are held / all.
    store_bytes_read: read from the store. tokens_not_computed: of documents.
    evicted_pages: freed for good by a policy that evicts, before the end.
    kv_bytes_read: keys and values read in all decode steps; other_bytes_read: summaries and scores.
    queue_ms: from its arrival until it was admitted.
    accepted_length: with a draft, tokens generated per decode step, the one of the model included.
    acceptance_rate: proposed tokens that were accepted / all that were checked.
    """

    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    ttft_ms: float | None
    step_ms: float | None
    attended_fraction: float | None
    kv_bytes_read: int
    other_bytes_read: int
    moved_bytes: int | None = None
    hit_rate: float | None = None
    offloaded_layers: int | None = None
    sequence_ratio: float | None = None
    held_ratio: float | None = None
    recompute_ratio: float | None = None
    store_bytes_read: int | None = None
    tokens_not_computed: int | None = None
    evicted_pages: int = 0
    queue_ms: float | None = None
    accepted_length: float | None = None
    acceptance_rate: float | None = None
    prompt_attended_fraction: float | None = None


@dataclass
class DraftCounters:
    """Sums over the decode steps of a sequence under a draft, without replayed ones.

    generated: tokens that these steps brought, of which `accepted` were among the proposed ones.
    """

    steps: int = 0
    generated: int = 0
    proposed: int = 0
    accepted: int = 0


@dataclass
class Counters:
    """Sums over the decode steps of a sequence."""

    attended_fraction: float = 0.0
    kv_bytes: float = 0.0
    other_bytes: float = 0.0
    steps: int = 0
    hits: int = 0
    misses: int = 0
    moved_bytes: int = 0

    def add_step(self, attended_fraction: float, kv_bytes: float, other_bytes: float) -> None:
        """Adds one step in place, as this runs for every sequence in every step."""
        self.attended_fraction += attended_fraction
        self.kv_bytes += kv_bytes
        self.other_bytes += other_bytes
        self.steps += 1

    def add_loads(self, hits: int, misses: int, moved_bytes: int) -> None:
        """Adds what one step found in the device's memory and what it loaded into it."""
        self.hits += hits
        self.misses += misses
        self.moved_bytes += moved_bytes


@dataclass(eq=False)
class Sequence:
    """A prompt and its generated tokens.

    tokens: prompt and generated tokens, int32; made with those of the prompt, in an array of its
    own, as a list of Python's numbers takes ten times as much memory. pages: int32, by position.
    num_prompt: tokens of the prompt. num_computed: how many have keys and values in `pages`.
    prefill_end: tokens up to here are computed exactly, in chunks; those after it one per step
    under the policy, also when they are already known (replay after pre-emption, given tokens).
    offloaded: layers in RAM or on disk at its last step; None if none can go there.
    repeated: the place of a token that is computed again only for its logits.
    first: the first token that is computed for it since it began to run; those before were known.
    state_ends: where its prompt stops for the recurrent state to be kept, whole pages.
    leaving: entries of `pages` that a policy evicted, and a layer's own sliding window still sees.
    evicted_pages: how many are gone; a hole stands in their place.
    exact: whether all that the prompt was computed over is exact (see cache/prefix_cache.py).
    blocks_read, blocks_before: under a prefill policy, blocks of keys read for its prompt, and all
    that a dense prefill would read, summed over layers, blocks of queries and heads.
    context: the stored documents that the prompt is made of; kept: bool [L, end], what each layer
    has of them and of what stands between, by place; None: everything. packing: the positions of
    these places (`cache/packing.py`), if they differ. unpaged: the retrieval head's keys of its
    tokens without a page.
    reused: what they cost. filling: what brings them into pages, from its beginning until the
    sequence runs. loading: what brings known tokens of its prompt into pages before others are
    computed.
    bad_ids: the token ids of `params.bad_words`. end_ids: those that end it, which the first
    `params.min_tokens` are not. after: waits until the prompt of this one is
    computed, which is the same. changes_scores: as its params say.
    under: the policy that it runs under, from its first step to its last.
    rope_length: the length whose RoPE frequencies rotate all its keys, fixed when it arrives; 0:
    those of a short sequence (`keyhole.models.modules.sequence_rope`). adapter: the number of its
    LoRA adapter, 0 for none.
    grammar: what its tokens must follow. caller: whose request it is; the queue serves
    callers in turn, and this is number `turn`.
    trace: what was read for its tokens, if its params ask for that. drafts: None without a draft.
    arrival, begun, token_times: when it arrived, was first admitted, and each token was sampled, in
    seconds of `time.perf_counter`.
    """

    tokens: array[int]
    params: SamplingParams
    detokenizer: Detokenizer
    given: ListOf[int] = ()
    keep_logits: bool = False
    reuse_approximate: bool = False
    context: Context | None = None
    bad_ids: ListOf[ListOf[int]] = ()
    end_ids: ListOf[int] = ()
    after: Sequence | None = None
    under: RequestPolicy = DENSE
    grammar: GrammarState | None = None
    caller: str = ""
    rope_length: int = 0
    adapter: int = 0

    num_prompt: int = field(init=False)
    pages: array[int] = field(default_factory=lambda: array("i"))
    num_computed: int = 0
    prefill_end: int = 0
    state_ends: tuple[int, ...] = ()
    exact: bool = True
    blocks_read: Tensor | int = 0
    blocks_before: int = 0
    kept: Tensor | None = None
    packing: Packing | None = None
    unpaged: UnpagedTokens | None = None
    reused: Reused | None = None
    filling: Filling | None = None
    loading: PacedUnits[None] | None = None
    slot: int = -1
    turn: int = 0
    num_cached: int = 0
    repeated: int | None = None
    first: int = 0
    offloaded: int | None = None
    leaving: list[int] = field(default_factory=list)
    evicted_pages: int = 0
    finish_reason: str | None = None
    error: KeyholeError | None = None
    counters: Counters = field(default_factory=Counters)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    trace: ReadTrace | None = field(init=False)
    drafts: DraftCounters | None = None
    num_settled: int | None = None
    logits: list[Tensor] = field(default_factory=list)
    arrival: float = field(default_factory=time.perf_counter)
    begun: float | None = None
    token_times: array[float] = field(default_factory=lambda: array("d"))
    step_ms: array[float] = field(default_factory=lambda: array("d"))
    random: random.Random = field(init=False)
    changes_scores: bool = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)
        self.tokens.extend(self.given)
        self.random = random.Random(self.params.seed)
        self.changes_scores = self.params.changes_scores
        self.trace = ReadTrace(self.num_prompt) if self.params.trace else None

    def forget_pages(self) -> None:
        """Empties the page list, whose pages were released, and what belongs to it."""
        self.pages, self.kept, self.leaving, self.packing = array("i"), None, [], None
        if self.loading is not None:
            self.loading.close()
            self.loading = None
        if self.unpaged is not None:
            self.unpaged.release()
            self.unpaged = None

    def take_filled(self, filling: Filling) -> None:
        """Takes the pages into which its documents were filled."""
        assert filling.filled is not None, "it is let in when it is filled"
        self.pages, self.filling = array("i", filling.take()), None
        filled = filling.filled
        self.num_computed, self.reused = filled.end, filled.reused
        self.kept, self.packing, self.unpaged = filled.kept, filled.packing, filled.unpaged
        if self.trace is not None:
            self.trace.packing = filled.packing

    @property
    def reads(self) -> list[TokenReads] | None:
        """What was read for its generated tokens; None if not requested."""
        return None if self.trace is None else self.trace.tokens

    @property
    def prompt(self) -> list[int]:
        """A copy of the prompt's tokens."""
        return self.tokens[: self.num_prompt].tolist()

    @property
    def generated(self) -> list[int]:
        """The tokens after the prompt."""
        return self.generated_from(0)

    def generated_from(self, place: int) -> list[int]:
        """The tokens after the prompt, without the first `place` of them."""
        return self.tokens[self.num_prompt + place :].tolist()

    @property
    def num_generated(self) -> int:
        """How many tokens there are after the prompt."""
        return len(self.tokens) - self.num_prompt

    @property
    def max_tokens(self) -> int:
        """At most this many tokens are generated."""
        assert self.params.max_tokens is not None, "the engine resolves it"
        return self.params.max_tokens

    @property
    def page_group(self) -> bytes:
        """The requests with which it shares cached prefixes."""
        rope = f"rope {self.rope_length}".encode() if self.rope_length else b""
        adapter = f"adapter {self.adapter}".encode() if self.adapter else b""
        return self.under.page_group + rope + adapter

    @property
    def is_base(self) -> bool:
        """Whether its keys and values are those of every request with its tokens."""
        return not (self.rope_length or self.adapter)

    @property
    def token_limit(self) -> int:
        """At most this many tokens, prompt included."""
        return self.num_prompt + len(self.given) + self.max_tokens

    @property
    def is_ready(self) -> bool:
        """Whether all known tokens are computed, so that the next one can be sampled."""
        return self.num_computed == len(self.tokens)

    @property
    def next_part(self) -> int:
        """Tokens of its prompt that may be computed in one step: up to where its state is kept."""
        begin = self.num_computed
        return next((end for end in self.state_ends if end > begin), self.prefill_end) - begin

    @property
    def is_blocked(self) -> bool:
        """Whether another sequence is still computing the prompt that both share."""
        first = self.after
        return first is not None and not first.is_finished and not first.is_prompt_computed

    @property
    def wants_documents(self) -> bool:
        """Whether its documents are not completely filled yet."""
        return self.context is not None and (self.filling is None or self.filling.filled is None)

    @property
    def is_prompt_computed(self) -> bool:
        """Whether all tokens of the prompt have keys and values."""
        return self.num_computed >= self.num_prompt

    def wants_logits(self, end: int) -> bool:
        """Whether the logits after the first `end` tokens are needed, to sample or to keep."""
        return end == len(self.tokens) or self.keeps_logits(end)

    def keeps_logits(self, end: int) -> bool:
        """Whether the logits after the first `end` tokens are to be kept and not kept yet."""
        return self.keep_logits and end - self.num_prompt == len(self.logits)

    @property
    def is_decoding(self) -> bool:
        """Whether the next token runs under the policy."""
        return self.num_computed >= self.prefill_end

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, with a result or an error."""
        return self.finish_reason is not None

    def stats(self) -> Stats:
        """The counters so far."""
        steps, loaded = self.counters.steps, self.counters.hits + self.counters.misses
        times = self.token_times
        drafts = self.drafts or DraftCounters()
        return Stats(
            prompt_tokens=self.num_prompt,
            cached_prompt_tokens=self.num_cached,
            generated_tokens=self.num_generated,
            ttft_ms=1e3 * (times[0] - self.arrival) if times else None,
            step_ms=statistics.median(self.step_ms) if self.step_ms else None,
            attended_fraction=self.counters.attended_fraction / steps if steps else None,
            kv_bytes_read=round(self.counters.kv_bytes),
            other_bytes_read=round(self.counters.other_bytes),
            moved_bytes=self.counters.moved_bytes if self.offloaded is not None else None,
            hit_rate=self.counters.hits / loaded if loaded else None,
            offloaded_layers=self.offloaded,
            sequence_ratio=None if self.reused is None else self.reused.sequence_ratio,
            held_ratio=None if self.reused is None else self.reused.held_ratio,
            recompute_ratio=None if self.reused is None else self.reused.recompute_ratio,
            store_bytes_read=None if self.reused is None else self.reused.bytes_read,
            tokens_not_computed=None if self.reused is None else self.reused.tokens_not_computed,
            evicted_pages=self.evicted_pages,
            queue_ms=None if self.begun is None else 1e3 * (self.begun - self.arrival),
            accepted_length=drafts.generated / drafts.steps if drafts.steps else None,
            acceptance_rate=drafts.accepted / drafts.proposed if drafts.proposed else None,
            prompt_attended_fraction=(
                float(self.blocks_read) / self.blocks_before if self.blocks_before else None
            ),
        )


#: The characters of a text that `repr` of a result shows.
_SHOWN = 200


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a request.

    finish_reason: "stop" (end token, stop text or id), "length" or "abort".
    logprobs: per generated token a dict token id -> log-probability, if asked for.
    reads: per generated token the tokens that each layer read, if asked for (`trace`); for very
    long answers only of the first tokens.
    reused: what an answer took from stored documents (`LLM.ask`). others: the other completions of
    the prompt, where `SamplingParams.n` asks for several. arrival: when the request arrived, in
    seconds since 1970, UTC. token_times: when each token was sampled, in seconds after arrival.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    prompt_token_ids: list[int]
    logprobs: list[dict[int, float]] | None = None
    reads: list[TokenReads] | None = None
    reused: Reused | None = None
    others: tuple[Result, ...] = ()
    arrival: float = 0.0
    token_times: list[float] = field(default_factory=list)

    def __repr__(self) -> str:
        more = f", {len(self.others)} others" if self.others else ""
        return (
            f"Result({_shortened(self.text)!r}: {len(self.token_ids)} tokens after "
            f"{len(self.prompt_token_ids)}, {self.finish_reason!r}{more})"
        )

    @property
    def completions(self) -> tuple[Result, ...]:
        """All `n` completions of the prompt, this one first."""
        return self, *self.others

    @classmethod
    def of_all(cls, completions: ListOf[Result]) -> Result:
        """The first of several completions of a prompt, with the others."""
        return replace(completions[0], others=tuple(completions[1:]))


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The output of one step of a stream; the last piece has the whole result.

    logprobs, reads: of these tokens, as in `Result`. prompt_token_ids: with the first reads.
    stats: the counters so far, if reads are requested.
    """

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None = None
    reads: list[TokenReads] | None = None
    prompt_token_ids: list[int] | None = None
    stats: Stats | None = None
    result: Result | None = None


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def piece_of(sequence: Sequence, given: int) -> Piece | None:
    """The piece of a stream after its first `given` tokens; None: nothing new yet.

    Raises the error that ended the request, if one did.
    """
    done, tokens = sequence.is_finished, sequence.generated_from(given)
    if not (done or tokens):
        return None
    wanted = sequence.params.logprobs is not None
    reads = sequence.reads
    return Piece(
        text=sequence.detokenizer.take(final=done),
        token_ids=tokens,
        logprobs=sequence.logprobs[given : given + len(tokens)] if wanted else None,
        reads=None if reads is None else reads[given : given + len(tokens)],
        prompt_token_ids=None if reads is None or given else sequence.prompt,
        stats=None if reads is None else sequence.stats(),
        result=result_of(sequence) if done else None,
    )


def result_of(sequence: Sequence) -> Result:
    """The result of a finished sequence; raises its error if it has one."""
    if sequence.error is not None:
        raise sequence.error
    assert sequence.finish_reason is not None
    return Result(
        text=sequence.detokenizer.text,
        token_ids=sequence.generated,
        finish_reason=sequence.finish_reason,
        stats=sequence.stats(),
        prompt_token_ids=sequence.prompt,
        logprobs=sequence.logprobs if sequence.params.logprobs is not None else None,
        reads=sequence.reads,
        reused=sequence.reused,
        arrival=time.time() - (time.perf_counter() - sequence.arrival),
        token_times=[at - sequence.arrival for at in sequence.token_times],
    )
