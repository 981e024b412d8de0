"""Models with a recurrent state: the state after a rejected token is never gone on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole import LLM, Delta, Full, Policy, Quest
from keyhole.cache.recurrent_state import LayerState, RecurrentState, RecurrentStep
from keyhole.models.loading import load
from keyhole.retrieval.draft import DRAFT_FOLDER
from tests.effort import examples
from tests.engine.speculation.drafts import COUNT, knowing, replaying
from tests.engine.speculation.test_drafting import assert_drafted, assert_same, drafted, served
from tests.models.test_recurrent_layers import KINDS, hybrid, network_of
from tests.policies.models import prompt
from tests.policies.recording import PAGE, make_engine
from tests.retrieval.drafts import make_draft

__all__ = ["hybrid"]

#: Ragged prompts of several chunks beside decoding requests; the last begins after a kept state.
COMING = ((0, prompt(3), 18), (0, prompt(33), 15), (5, prompt(21), 1), (7, prompt(40), 12))
SETTINGS = {"prefill_chunk": 24, "max_batch": 4}


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_tokens_and_logits_are_those_without_a_draft(family: str) -> None:
    network: Any = network_of(family)
    wanted = served(make_engine(network, Full(), **SETTINGS), COMING)
    found = served(knowing(drafted(network, Full(), **SETTINGS), wanted), COMING)
    assert_same(found, wanted)
    assert_drafted(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [Quest(token_budget=4 * PAGE), Delta(token_budget=4 * PAGE)], ids=lambda one: one.name
)
def test_policies_select_for_the_layers_of_attention(hybrid: Any, policy: Policy) -> None:
    wanted = served(make_engine(hybrid, policy, **SETTINGS), COMING)
    found = served(knowing(drafted(hybrid, policy, **SETTINGS), wanted), COMING)
    assert_same(found, wanted)
    assert_drafted(found)


@pytest.mark.slow
def test_a_draft_model_proposes(tmp_path: Path) -> None:
    network = network_of("lfm2")
    network.save_pretrained(tmp_path / "model")
    config = network.config
    make_draft(
        tmp_path,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
        max_position_embeddings=1024,
    ).rename(tmp_path / "model" / DRAFT_FOLDER)
    model = load(tmp_path / "model", "cpu")
    wanted = served(make_engine(model, Full(), **SETTINGS), COMING)
    engine = make_engine(model, Full(), draft="eagle3", num_draft_tokens=COUNT, **SETTINGS)
    replaying(engine, wanted)
    found = served(engine, COMING)
    assert_same(found, wanted)
    assert_drafted(found)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["lfm2", "nemotron_h"])
def test_a_step_that_fails_halfway_advances_no_layer(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    coming = ((0, prompt(9), 14), (0, prompt(20), 12))
    wanted = served(make_engine(network_of(family), Full()), coming)
    engine = knowing(drafted(network_of(family), Full()), wanted)
    last = engine.model.network.get_output_embeddings()
    forward, calls = last.forward, 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise KeyError("interrupted")
        return forward(*args)

    monkeypatch.setattr(last, "forward", failing)
    step = engine.step

    def repeated() -> Any:
        with pytest.raises(KeyError):
            step()
        return step()

    monkeypatch.setattr(engine, "step", repeated)
    found = served(engine, coming)
    assert_same(found, wanted)
    assert_drafted(found)


class Counting:
    """A layer whose state is the number that its tokens spell in base ten."""

    def __call__(self, hidden: torch.Tensor, there: LayerState) -> tuple[torch.Tensor, ...]:
        state = there.get_recurrent_state(0)
        assert state is not None
        assert hidden.shape[1] == 1
        state = there.update_recurrent_state(10 * state + hidden[:, 0], 0)
        return (state[:, None].clone(),)


@given(
    rows=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=5),
    layers=st.integers(1, 3),
)
@examples(50)
def test_each_row_goes_on_from_the_row_before_it(rows: list[tuple[int, int]], layers: int) -> None:
    """rows: of each sequence how many it has, and how many of the proposed tokens were right."""
    counts = [count for count, _ in rows]
    right = [min(count - 1, accepted) for count, accepted in rows]
    slots = list(range(len(rows) + 1))[::-1][: len(rows)]
    example = {("recurrent", 0): torch.zeros(1, 1, dtype=torch.int64)}
    state = RecurrentState([example] * layers, len(rows) + 1)
    for layer in range(layers):
        started = {("recurrent", 0): torch.arange(1, len(rows) + 1)[:, None]}
        state.write(layer, torch.tensor(slots), started)
    decoding = list(zip(slots, counts, strict=True))
    step = RecurrentStep.of(state, decoding, [], torch.device("cpu"))
    digits = torch.arange(sum(counts)) % 10
    wanted, spelt = [], []
    for number, count in enumerate(counts, 1):
        own = [str(number)]
        for digit in digits[sum(counts[: number - 1]) :][:count].tolist():
            own.append(own[-1] + str(digit))
        wanted += own[1:]
        spelt.append(own)
    for layer in range(layers):
        out = step.run(layer, digits[None, :, None], Counting())[0]
        assert out[0, :, 0].tolist() == [int(x) for x in wanted]
    step.commit()
    step.accept(np.asarray(right))
    for layer in range(layers):
        kept = state.read(layer, torch.tensor(slots))["recurrent", 0][:, 0].tolist()
        assert kept == [int(own[1 + n]) for own, n in zip(spelt, right, strict=True)]


def test_a_hybrid_model_takes_a_draft_by_name() -> None:
    llm = LLM(network_of("lfm2"), device="cpu", memory="16MB", draft="ngram")
    assert llm.engine.drafting is not None
