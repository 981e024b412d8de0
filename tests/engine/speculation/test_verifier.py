"""Sampled tokens have the distribution that they have without a draft, for a small vocabulary."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from keyhole import SamplingParams
from keyhole.cache.layout import Geometry
from keyhole.cache.pages import PageCache
from keyhole.config import EngineConfig
from keyhole.engine.documents.filling import Pace
from keyhole.engine.scheduling.scheduler import Scheduler
from keyhole.engine.scheduling.scheduler_output import SchedulerOutput
from keyhole.engine.sequence import DraftCounters, Sequence
from keyhole.engine.speculation.verifier import Verifier
from keyhole.tokenization import Detokenizer

VOCAB, DRAWS, PROMPT = 6, 3000, [1, 2]
DRAFT = [4, 1]
#: Of the tokens after the prompt, after the first proposed token and after both.
LOGITS = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.2


def verifier() -> Verifier:
    geometry = Geometry(layers=(), num_query_heads=1, page_size=4, itemsize=4)
    cache = PageCache(geometry, 1, dtype=torch.float32, device=torch.device("cpu"))
    scheduler = Scheduler(
        cache, None, EngineConfig(), max_length=99, loads=lambda _: None, pace=Pace()
    )
    return Verifier((), scheduler, 99)


def drawn(settings: dict[str, Any], logits: Tensor = LOGITS) -> Counter[tuple[int, ...]]:
    """What sequences of many seeds say in one step with the proposed tokens."""
    sequences = []
    for seed in range(DRAWS):
        params = SamplingParams(max_tokens=50, seed=seed, **settings).resolve({})
        sequences.append(
            Sequence(array("i", PROMPT), params, Detokenizer(None), drafts=DraftCounters())
        )
    for sequence in sequences:
        sequence.num_computed = len(PROMPT)
    plan = SchedulerOutput(decodes=sequences, drafts={s: list(DRAFT) for s in sequences})
    rows = 1 + len(DRAFT)
    verifier().take(
        [s for s in sequences for _ in range(rows)], logits.repeat(len(sequences), 1), plan
    )
    for sequence in sequences:  # the newest token alone is not computed
        assert sequence.num_computed == len(sequence.tokens) - 1
    return Counter(tuple(sequence.generated) for sequence in sequences)


def filtered(logits: Tensor, seen: list[int], said: int, settings: dict[str, Any]) -> list[float]:
    """The sampler's distribution, written down once more in plain Python.

    said: how many of the tokens in `seen` were generated.
    """
    scores = logits.tolist()
    made = seen[len(seen) - said :]
    for token in range(VOCAB):
        penalty = settings.get("repetition_penalty", 1.0)
        if token in seen:
            scores[token] *= penalty if scores[token] < 0 else 1 / penalty
        scores[token] -= settings.get("frequency_penalty", 0.0) * made.count(token)
    weights = [math.exp(score / settings["temperature"]) for score in scores]
    order = sorted(range(VOCAB), key=lambda token: -weights[token])
    kept, mass = set(), 0.0
    for rank, token in enumerate(order):
        share = weights[token] / weights[order[0]]
        wanted = rank < (settings.get("top_k") or VOCAB)
        total = sum(weights[t] for t in order[: settings.get("top_k") or VOCAB])
        if wanted and mass < settings.get("top_p", 1.0) and share >= settings.get("min_p", 0.0):
            kept.add(token)
        mass += weights[token] / total if wanted else 0.0
    whole = sum(weights[token] for token in kept)
    return [weights[token] / whole if token in kept else 0.0 for token in range(VOCAB)]


def wanted(settings: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The probability of each outcome of a step: all ways to leave the draft, and the way along."""
    found: dict[tuple[int, ...], float] = {}
    reached = 1.0
    for place in range(3):
        said = DRAFT[:place]
        shares = filtered(LOGITS[place], PROMPT + said, place, settings)
        for token, share in enumerate(shares):
            if place == 2 or token != DRAFT[place]:
                found[(*said, token)] = reached * share
        reached *= shares[DRAFT[place]] if place < 2 else 1.0
    return found


def chi_square(found: Counter[tuple[int, ...]], shares: dict[tuple[int, ...], float]) -> float:
    """Pearson's statistic over its degrees of freedom, in standard deviations from its mean."""
    assert all(shares.get(outcome, 0.0) > 0 for outcome in found), "an outcome that cannot be"
    expected = {outcome: DRAWS * share for outcome, share in shares.items() if share > 0}
    statistic = sum((found[o] - count) ** 2 / count for o, count in expected.items())
    freedom = len(expected) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.1, "repetition_penalty": 1.8, "frequency_penalty": 0.5},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_outcomes_have_the_probabilities_that_they_have_without_a_draft(
    settings: dict[str, Any],
) -> None:
    shares = wanted(settings)
    assert sum(shares.values()) == pytest.approx(1)
    assert chi_square(drawn(settings), shares) < 3


@pytest.mark.slow
def test_the_statistic_notices_another_distribution() -> None:
    """A draft that is accepted by its probability and else replaced by any token of the whole."""
    shares = wanted({"temperature": 1.0})
    found = drawn({"temperature": 1.0}, LOGITS + torch.tensor([0, 0, 0, 0, 0.3, 0]))
    assert chi_square(found, shares) > 5
    changed = drawn({"temperature": 1.0, "top_k": 5})
    assert chi_square(changed, shares) > 5


@pytest.mark.slow
def test_greedy_takes_the_longest_prefix_that_is_the_argmax() -> None:
    logits = torch.full((3, VOCAB), -1.0)
    logits[0, DRAFT[0]] = logits[1, 5] = logits[2, 0] = 1.0
    found = drawn({"temperature": 0.0}, logits)
    assert found == {(DRAFT[0], 5): DRAWS}
