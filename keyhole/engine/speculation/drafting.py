"""Proposes tokens for the decoding sequences of a step, and counts which of them were right.

The step computes a sequence's newest token and its K proposed ones as 1 + K rows, each of which
reads what it would read in a step of its own. Then a token is sampled from each row in turn, as in
any step, as long as the token sampled before is the proposed one. Tokens, log-probabilities and the
random numbers that are used are therefore those without a draft. For a draft without probabilities
this is speculative sampling (Leviathan et al., ICML 2023, arXiv 2211.17192, section 2.3): a
proposed token of probability p is accepted with probability p, and otherwise replaced by another
token, in proportion to the others' probabilities.
"""

from __future__ import annotations

from collections.abc import Callable

from keyhole.cache.layout import Geometry
from keyhole.config import EngineConfig
from keyhole.engine.scheduling.scheduler_output import SchedulerOutput
from keyhole.engine.scheduling.sequence_pages import SequencePages
from keyhole.engine.sequence import Sequence
from keyhole.engine.speculation import prompt_lookup
from keyhole.engine.speculation.draft_runner import DraftRunner
from keyhole.errors import ConfigError
from keyhole.policies.base import Policy
from keyhole.retrieval.head import RetrievalHead

#: Up to that many (at least 1) next tokens of a sequence; none if there is nothing to propose.
Proposer = Callable[[Sequence, int], list[int]]


class Drafting:
    """Fills in `SchedulerOutput.drafts`.

    model: a draft model that proposes; None: prompt look-up.
    """

    def __init__(
        self,
        config: EngineConfig,
        pages: SequencePages,
        max_length: int,
        model: DraftRunner | None = None,
    ) -> None:
        self._proposer: Proposer = prompt_lookup.propose
        self._model = model
        self._most = config.num_draft_tokens
        self._max_length = max_length
        self._pages = pages

    def propose(self, plan: SchedulerOutput) -> None:
        """Adds to a step proposed tokens for its decoding sequences, and allocates their pages."""
        if self._model is not None:
            if plan.decodes:
                self._propose_by(self._model, plan)
            return
        for sequence in plan.decodes:
            most = self._wanted(sequence)
            tokens = self._proposer(sequence, most) if most > 0 else []
            count = self._pages.reserve_draft(sequence, len(tokens)) if tokens else 0
            if count:
                plan.drafts[sequence] = tokens[:count]

    def cut(self, sequence: Sequence) -> None:
        """Adapts to the removal of the last pages of a sequence; called between steps."""
        if self._model is not None:
            self._model.cut(sequence)

    def _propose_by(self, model: DraftRunner, plan: SchedulerOutput) -> None:
        """The same by a draft model, which stores what it computes in the pages."""
        wanted = {}
        for sequence in plan.decodes:
            most = self._wanted(sequence)
            count = self._pages.reserve_draft(sequence, most) if most > 0 else 0
            if count > 0:
                wanted[sequence] = count
        plan.drafts |= model.propose(plan.decodes, wanted)

    def _wanted(self, sequence: Sequence) -> int:
        """The most tokens to propose: with the model's own, as many as the sequence may still get.

        None for a sequence whose next tokens are known (replayed or given), which are computed one
        per step, and for one whose reads are traced, as a trace has one entry per token.
        """
        if sequence.num_computed + 1 < len(sequence.tokens) or sequence.trace is not None:
            return 0
        end = min(sequence.token_limit, self._max_length)
        return min(self._most, end - len(sequence.tokens) - 1)


def require_exact(
    policy: Policy, geometry: Geometry, head: RetrievalHead | None, config: EngineConfig
) -> None:
    """ConfigError for a resolved policy under which proposed tokens cannot be checked exactly.

    head: the retrieval head; a draft model's computes a query for each token that it proposes.
    """
    by_model = config.drafts_by_model
    why = _why_not(policy, geometry, None if by_model else head)
    if why is None and by_model and getattr(policy, "head", None) is not None:
        why = "the draft model is the retrieval head, but the policy names another with head="
    if why is not None:
        raise ConfigError(
            f"draft= cannot be used with policy {policy.name!r}: {why}; leave draft out, or use a "
            "policy such as full, delta or quest"
        )


def _why_not(policy: Policy, geometry: Geometry, head: RetrievalHead | None) -> str | None:
    if policy.speculative is not True:
        return str(policy.speculative)
    if policy.sequence_state(geometry):
        return "with these settings it keeps data of a sequence from step to step"
    if policy.wants_head and head is not None and head.config.uses_features:
        return (
            "its retrieval head reads the model's hidden states of the token before, which a "
            "proposed token does not have yet"
        )
    return None
