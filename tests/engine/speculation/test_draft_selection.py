"""An EAGLE-3 draft is the retrieval head: each token that a step checks reads what it selects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from keyhole import ConfigError, Full, SpeContext
from keyhole.engine.sequence import Sequence
from keyhole.models.model import Model
from tests.engine.speculation.drafts import Replayed, replaying
from tests.engine.speculation.plain_draft import PlainDraft, drafted, model, network_of
from tests.engine.speculation.test_drafting import assert_drafted, assert_same, served
from tests.oracle import Array, Choice, SparseModel, best
from tests.policies.models import prompt
from tests.policies.recording import Recording, make_engine
from tests.policies.test_spe_context import hidden_states

__all__ = ["model"]

BUDGET, SINKS, WINDOW = 24, 2, 5
#: The second one begins within the budget; the last one comes later, over a cached prefix.
COMING = ((0, prompt(70), 18), (0, prompt(18), 14), (5, prompt(70) + prompt(30, 1), 12))


@dataclass(frozen=True, eq=False)
class Rows(Recording):
    """For rows of proposed tokens, too."""

    speculative: ClassVar[bool | str] = True


@dataclass(frozen=True)
class Checked:
    """A sequence in a step: its tokens before, the proposed ones, and the place of its rows."""

    tokens: list[int]
    proposed: list[int]
    step: int
    row: int


def checks_of(replayed: Replayed) -> dict[Sequence, list[Checked]]:
    """Gets every step that the engine will run, by sequence."""
    found: dict[Sequence, list[Checked]] = {}
    propose, steps = replayed.propose, 0

    def noted(decodes: list[Sequence], wanted: Any) -> Any:
        nonlocal steps
        proposed, row = propose(decodes, wanted), 0
        for sequence in decodes:
            own = proposed.get(sequence, [])
            one = Checked(sequence.tokens.tolist(), own, steps, row)
            found.setdefault(sequence, []).append(one)
            row += 1 + len(own)
        steps += 1
        return proposed

    replayed.propose = noted  # type: ignore[method-assign]
    return found


def preferred(weights: torch.Tensor, lists: int) -> list[list[int]]:
    """The best tokens of each list by the largest weight of its heads; weights [heads, N]."""
    largest = weights.view(lists, -1, weights.shape[1]).amax(1)
    return [best(row, BUDGET, first=SINKS, last=WINDOW) for row in largest.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("per_head", "coming"),
    [
        (True, ((0, prompt(40), 9), (0, prompt(18), 5))),
        pytest.param(True, COMING, marks=pytest.mark.slow),
        pytest.param(False, COMING, marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_those_without_speculation_under_the_same_choice_rule(
    model: Model, per_head: bool, coming: Any
) -> None:
    """Each token of a ragged batch reads what the draft's query for it prefers, none else.

    The oracle has the draft and the model in float64. It computes a text token by token: the draft
    runs over the model's hidden states up to the newest token of a step, and over its own outputs
    from there on, and each token reads its preferred ones alone.
    """
    policy = SpeContext(
        token_budget=BUDGET,
        sink_size=SINKS,
        window_size=WINDOW,
        per_head=per_head,
        full_layers=(1,),
    )
    guess = served(drafted(model, policy), coming)  # some texts, so that some tokens are right
    recording = Rows(inner=policy)
    engine = drafted(model, recording, prefill_chunk=24)
    checks = checks_of(replaying(engine, guess, error=0.1))
    found = served(engine, coming)
    assert_drafted(found)
    assert found[-1].num_cached >= 64 or coming is not COMING
    network, layers = network_of(model).double(), model.geometry(4).num_layers
    draft = PlainDraft(model.draft, network)  # type: ignore[arg-type]
    narrow = 0
    for sequence in found:
        chosen: dict[int, list[list[int]] | None] = {}

        def choose(layer: int, query: Array, keys: Array, options: Any, by: Any = chosen) -> Choice:
            read = by[keys.shape[1]]
            return None if read is None or layer in policy.full_layers else (read, read)

        sparse, start = SparseModel(network, choose), len(sequence.prompt)
        for check in checks[sequence]:
            states = hidden_states(sparse, check.tokens[:-1], start)
            draft.propose(check.tokens, check.proposed, [torch.from_numpy(x) for x in states])
            for ahead in range(1 + len(check.proposed)):
                length = len(check.tokens) + ahead
                weights = draft.weights[length - 1]
                wanted = preferred(weights, 2 if per_head else 1) if length > BUDGET else None
                for layer in range(layers):
                    call = recording.calls[check.step * layers + layer]
                    assert (call.layer, call.lengths[check.row + ahead]) == (layer, length)
                    read = call.entries(check.row + ahead)
                    if layer in policy.full_layers:
                        assert read is None
                    elif wanted is None:
                        assert read in (None, [list(range(length))] * (2 if per_head else 1))
                    else:
                        assert read == wanted
                        narrow += ahead
                # Of a rejected token this is overwritten by the next step's.
                chosen[length] = wanted
        logits = sparse.logits(sequence.tokens[:-1], start)[start - 1 :]
        assert logits.argmax(-1).tolist() == sequence.generated
        assert (torch.stack(sequence.logits) - logits).abs().max() <= 1e-4
    assert narrow > (100 if coming is COMING else 20)
    dense = served(make_engine(model, Full()), coming)
    assert dense[0].tokens != found[0].tokens


def test_rows_that_share_a_step_select_differently(model: Model) -> None:
    recording = Rows(inner=SpeContext(token_budget=BUDGET, sink_size=SINKS, window_size=WINDOW))
    served(drafted(model, recording), ((0, prompt(90), 10),))
    firsts = [call for call in recording.calls if call.layer == 0 and len(call.lengths) > 1]
    assert firsts
    for call in firsts:
        older = [
            {token for token in entries[0] if token < call.lengths[0] - WINDOW}
            for entries in map(call.entries, range(len(call.lengths)))
            if entries is not None
        ]
        assert len({frozenset(tokens) for tokens in older}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("budget", [44, 200])
def test_sequences_within_the_budget_are_read_in_full(model: Model, budget: int) -> None:
    """Beside longer ones, too."""
    coming = ((0, prompt(20), 24), (0, prompt(80), 30))
    policy = SpeContext(token_budget=budget, sink_size=SINKS, window_size=WINDOW)
    wanted = served(make_engine(model, Full()), coming)
    engine = drafted(model, policy)
    replaying(engine, wanted)
    found = served(engine, coming)
    within = 1 if budget < 110 else 2
    assert_same(found[:within], wanted[:within])
    assert_drafted(found)
    assert (found[1].stats().attended_fraction < 0.6) == (within == 1)


def test_a_row_reads_no_more_than_the_budget(model: Model) -> None:
    engine = drafted(model, SpeContext(token_budget=24, sink_size=2, window_size=5))
    request = served(engine, ((0, prompt(90), 10),))[0]
    assert request.stats().attended_fraction <= 24 / 91


def test_a_policy_with_another_head_is_refused(model: Model) -> None:
    with pytest.raises(ConfigError, match="the draft model is the retrieval head"):
        drafted(model, SpeContext(head="elsewhere"))


def test_a_choice_that_is_kept_for_steps_is_refused(model: Model) -> None:
    with pytest.raises(ConfigError, match="keeps data of a sequence from step to step"):
        drafted(model, SpeContext(token_budget=64, refresh_every=4))
