"""The control that selects by chance."""

from __future__ import annotations

from collections import Counter

import torch

from keyhole.policies.controls import RandomTokens, hashed
from tests.policies.models import twins
from tests.policies.recording import Recording, forced, make_engine, run

PROMPT, GIVEN = list(range(3, 43)), [5] * 24


def drawn(policy: RandomTokens) -> dict[tuple[int, int], list[list[int]]]:
    """Per layer and length the tokens of each KV head."""
    model, _ = twins("llama_group3", num_hidden_layers=4)
    recording = Recording(inner=policy)
    engine = make_engine(model, recording)
    forced(engine, PROMPT, GIVEN)
    run(engine)
    return {
        (call.layer, call.lengths[0]): entries
        for call in recording.calls
        if (entries := call.entries(0)) is not None
    }


def test_sinks_the_newest_token_and_others_within_the_budget() -> None:
    found = drawn(RandomTokens(token_budget=9, sink_size=2, full_layers=(1,)))
    assert {layer for layer, _ in found} == {0, 2, 3}
    for (_, length), heads in found.items():
        for tokens in heads:
            assert len(set(tokens)) == len(tokens) == 9
            assert tokens[:2] == [0, 1]
            assert tokens[-1] == length - 1
            assert max(tokens) < length


def test_every_token_has_the_same_chance() -> None:
    """Of 40 tokens that are always there, each is drawn about as often as it should be."""
    counts: Counter[int] = Counter()
    expected = 0.0
    for seed in range(5):
        for (_, length), heads in drawn(RandomTokens(token_budget=9, seed=seed)).items():
            for tokens in heads:
                counts.update(token for token in tokens if token < len(PROMPT))
                expected += 8 / (length - 1)  # the newest has a place of its own
    # A token is drawn expected times on average; five standard deviations of a Poisson number.
    spread = 5 * expected**0.5
    assert len(counts) == len(PROMPT)
    assert all(abs(count - expected) <= spread for count in counts.values())


def test_numbers_are_spread_evenly() -> None:
    """Tenths of the numbers of all heads and tokens, within five standard deviations."""
    numbers = hashed(3, 2, torch.tensor([700, 701]), 8, 700).flatten()
    tenths = (numbers * 10).int().bincount(minlength=11)
    assert tenths[10] == 0
    share = len(numbers) / 10
    assert ((tenths[:10] - share).abs() < 5 * (0.9 * share) ** 0.5).all()


def test_draws_differ_between_layers_heads_steps_and_seeds() -> None:
    found = drawn(RandomTokens(token_budget=9))
    lists = [tuple(tokens) for heads in found.values() for tokens in heads]
    assert len(set(lists)) == len(lists)
    again = drawn(RandomTokens(token_budget=9))
    assert again == found
    assert drawn(RandomTokens(token_budget=9, seed=1)) != found
