"""Takes the tokens of a step from its logits, and ends the sequences that are done."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Tokens
from operator import eq

import torch
from torch import Tensor

from keyhole.engine.sampler import sample, top_logprobs
from keyhole.engine.scheduling.scheduler import Scheduler
from keyhole.engine.scheduling.scheduler_output import SchedulerOutput
from keyhole.engine.sequence import Sequence
from keyhole.errors import NumericalError, RequestError


class Verifier:
    """Samples the next tokens of sequences, several where proposed ones turn out to be right.

    max_length: the most tokens of a sequence.
    """

    def __init__(
        self, eos_token_ids: Collection[int], scheduler: Scheduler, max_length: int
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._scheduler = scheduler
        self._max_length = max_length

    def take(
        self, wanted: Tokens[Sequence], logits: Tensor, plan: SchedulerOutput
    ) -> list[Sequence]:
        """Appends the next tokens to sequences; returns those that got a token or ended.

        wanted: the sequence of each row of logits [R, vocabulary], as `Runner.run` returns them. A
        sequence with proposed tokens takes the token of its next row as long as the token before is
        the proposed one.
        """
        rows: dict[Sequence, int] = {}
        for row, sequence in enumerate(wanted):
            rows.setdefault(sequence, row)
        _keep_logits(rows, logits)
        left = {sequence: row for sequence, row in rows.items() if sequence.is_ready}
        before = {sequence: len(sequence.tokens) for sequence in left}
        while left:
            one_each = len(left) == len(logits)
            self._advance([*left], logits if one_each else logits[[*left.values()]])
            left = {
                sequence: row + 1
                for sequence, row in left.items()
                if _was_right(sequence, before[sequence], plan.drafts.get(sequence, ()))
            }
            for sequence in left:
                sequence.num_computed += 1
            _keep_logits(left, logits)
        for sequence in plan.decodes:
            if sequence in before and sequence.drafts is not None:
                _count(sequence, before[sequence], plan.drafts.get(sequence, ()))
        return [*before]

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence and frees its pages."""
        sequence.detokenizer.finish()
        sequence.finish_reason = "stop" if sequence.detokenizer.stopped else reason
        self._scheduler.finish(sequence, remember=sequence.error is None)

    def _advance(self, ready: list[Sequence], logits: Tensor) -> None:
        """Samples a token for each sequence and ends those that are done."""
        tokens, largest = sample(logits, ready)  # of a broken row any token, which is dropped
        # A masked vocabulary has -inf; of a broken computation the largest is NaN or infinite.
        good = largest.isfinite()
        most = max((s.params.logprobs or 0 for s in ready), default=0)
        wanted = any(s.params.logprobs is not None for s in ready)
        best = [x.tolist() for x in top_logprobs(logits, tokens, most)] if wanted else None
        # Here the host waits for the step.
        found = torch.stack([tokens, good.long()], 1).tolist()
        now = time.perf_counter()
        for i, (sequence, (token, is_good)) in enumerate(zip(ready, found, strict=True)):
            if not is_good:
                place = len(sequence.tokens)
                sequence.error = NumericalError(
                    f"the model computed NaN or infinite logits after {place} tokens; try "
                    "dtype='float32', or check the checkpoint"
                )
                self.finish(sequence, "error")
                continue
            if best is not None and sequence.params.logprobs is not None:
                ids, values = best[0][i], best[1][i]
                shown = [*range(sequence.params.logprobs), -1]
                sequence.logprobs.append({ids[j]: values[j] for j in shown})
            grammar = sequence.grammar
            if token < 0 or (grammar is not None and not grammar.accept(token)):
                sequence.error = RequestError(_nothing_left(sequence))
                self.finish(sequence, "error")
                continue
            sequence.token_times.append(now)
            sequence.tokens.append(token)
            self._end_if_done(sequence, token)

    def _end_if_done(self, sequence: Sequence, token: int) -> None:
        params = sequence.params
        eos = token in self._eos_token_ids and not params.ignore_eos
        if eos or token in params.stop_token_ids:
            self.finish(sequence, "stop")
            return
        sequence.detokenizer.append(token)
        is_complete = sequence.grammar is not None and sequence.grammar.is_complete
        if sequence.detokenizer.stopped or is_complete:
            self.finish(sequence, "stop")
        elif len(sequence.tokens) >= min(sequence.token_limit, self._max_length):
            self.finish(sequence, "length")


def _keep_logits(rows: Mapping[Sequence, int], logits: Tensor) -> None:
    for sequence, row in rows.items():
        if sequence.keeps_logits(sequence.num_computed):
            # A copy: the next step may overwrite the buffer.
            sequence.logits.append(logits[row].to("cpu", torch.float32, copy=True))


def _nothing_left(sequence: Sequence) -> str:
    """Why a sequence has no next token."""
    place = len(sequence.tokens)
    if sequence.grammar is None:
        return f"bad_words and min_tokens leave no token of this model after {place} tokens"
    if not sequence.grammar.allows_any:
        return f"the grammar allows no token of this model after {place} tokens"
    by = "bad_words forbid" if sequence.bad_ids else "the model's scores rule out"
    return f"{by} every token that the grammar allows after {place} tokens"


def _was_right(sequence: Sequence, before: int, draft: Tokens[int]) -> bool:
    """Whether a sequence has not ended, and its newest token is the proposed one.

    before: its tokens before this step. draft: those proposed to follow them.
    """
    made = len(sequence.tokens) - before
    if sequence.is_finished or made > len(draft):
        return False
    return sequence.tokens[-1] == draft[made - 1]


def _count(sequence: Sequence, before: int, draft: Tokens[int]) -> None:
    """Counts a decode step of a sequence for its statistics; arguments as in `_was_right`."""
    made, counters = sequence.tokens[before:], sequence.drafts
    assert counters is not None
    counters.steps += 1
    counters.generated += len(made)
    counters.proposed += len(draft)
    counters.accepted += sum(map(eq, made, draft))
