"""The loss is the divergence of predictions that its module describes."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch

from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.training.objectives import (
    ATTENTION,
    COLD,
    TILT,
    WARM,
    attention_loss,
    draw_budget,
    selection_loss,
    stretch,
    temperature,
    window,
)
from keyhole.retrieval.training.teacher import Teacher, TeacherTargets
from tests.checkpoints import VOCAB_SIZE, make_config, make_network

LENGTH, START = 90, 70


def targets_of(network: Any, head: RetrievalHead) -> TeacherTargets:
    ids = torch.randint(3, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(1))
    rows = torch.arange(START, LENGTH)
    teacher = Teacher(network, head.config.feature_layers)
    return teacher.targets(ids, rows, logit_steps=1, keep_cache=True)


def plain_weights(head: RetrievalHead, targets: TeacherTargets) -> torch.Tensor:
    """The head's softmax weights [heads, R, n] in float64, row after row."""
    fused = None
    if head.config.uses_features:
        states = head.fuse(targets.hidden)
        fused = torch.cat([torch.zeros_like(states[:1]), states[:-1]])
    query, key = head(targets.token_ids, torch.arange(LENGTH), fused)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1).detach().double()
    query = query.detach().double()
    found = torch.zeros(query.shape[1], LENGTH - START, LENGTH, dtype=torch.float64)
    for row in range(START, LENGTH):
        for h in range(query.shape[1]):
            logits = head.scale * key[: row + 1, h] @ query[row, h]
            found[h, row - START, : row + 1] = logits.softmax(-1)
    return found


def plain_divergence(
    network: Any, head: RetrievalHead, targets: TeacherTargets, budget: int, heat: float
) -> float:
    """Through a mask in transformers' eager attention, and sums over the vocabulary."""
    weights = plain_weights(head, targets)
    groups = network.config.num_key_value_heads
    scores = weights.unflatten(0, (groups, -1)).amax(1).log()
    newest = max(1, min(64, budget // 4))
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1).repeat(groups, 1, 1)
    for g in range(groups):
        for row in range(START, LENGTH):
            own = scores[g, row - START, 4 : row - newest + 1]
            taken = own.sort(descending=True).values[budget - 4 - newest - 1 :][:2]
            gate = torch.sigmoid((own - taken.mean()) / heat)
            mask[g, row, 4 : row - newest + 1] = gate.log().float()
    mask = mask.repeat_interleave(network.config.num_attention_heads // groups, 0)
    with torch.no_grad():
        wanted = network(targets.token_ids[None]).logits[0, START:].double().log_softmax(-1)
        found = network(targets.token_ids[None], attention_mask=mask[None]).logits[0, START:]
    found = found.double().log_softmax(-1)
    total = weight = 0.0
    for row in range(START, LENGTH - 1):
        follows = int(targets.token_ids[row + 1])
        likely = math.exp(wanted[row - START, follows])
        old, new = (tilted(x[row - START].tolist(), follows) for x in (wanted, found))
        total += likely * sum(math.exp(x) * (x - y) for x, y in zip(old, new, strict=True))
        weight += likely
    return total / weight


def tilted(logs: list[float], token: int) -> list[float]:
    """Log probabilities after one token has lost TILT nats."""
    logs = [x - TILT if i == token else x for i, x in enumerate(logs)]
    total = math.log(sum(map(math.exp, logs)))
    return [x - total for x in logs]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["llama", "llama_mqa", "llama_group3"])
@pytest.mark.parametrize("inputs", ["tokens", "tokens+features"])
@pytest.mark.parametrize("heat", [0.5, 0.1])
def test_the_loss_is_that_of_plain_loops(kind: str, inputs: str, heat: float) -> None:
    network = make_network(make_config(kind))
    head = RetrievalHead.random(network, inputs=inputs)
    targets = targets_of(network, head)
    loss, logs = selection_loss(head, network, targets, 20, heat)
    rest = ATTENTION * attention_loss(head, targets)[0].item()
    wanted = plain_divergence(network, head, targets, 20, heat)
    assert wanted > 1e-3
    assert loss.item() - rest == pytest.approx(wanted, rel=1e-3)
    torch.testing.assert_close(logs.double().exp(), plain_weights(head, targets), atol=1e-5, rtol=0)


def test_a_budget_of_everything_leaves_the_attention_alone() -> None:
    network = make_network(make_config("llama"))
    head = RetrievalHead.random(network)
    targets = targets_of(network, head)
    loss, _ = selection_loss(head, network, targets, LENGTH, 0.5)
    rest = ATTENTION * attention_loss(head, targets)[0].item()
    assert loss.item() == pytest.approx(rest, abs=1e-5)


def test_query_tokens_are_a_stretch_that_ends_in_the_second_half() -> None:
    for seed in range(200):
        rows = stretch(Random(seed), 100, 30)
        assert 51 <= rows.stop <= 100
        assert 25 <= len(rows) <= 30
    assert {stretch(Random(seed), 100, 30).stop for seed in range(999)} == set(range(51, 101))


def test_budgets_and_temperatures_lie_where_they_should() -> None:
    budgets = [draw_budget(Random(seed), 1200) for seed in range(500)]
    assert 100 <= min(budgets) < 110
    assert 290 < max(budgets) <= 300
    assert draw_budget(Random(0), 64) == 16
    assert [window(budget) for budget in (16, 128, 1000)] == [4, 32, 64]
    assert temperature(0) == WARM
    assert temperature(0.5) == pytest.approx((WARM * COLD) ** 0.5)
    assert temperature(1) == temperature(1.2) == pytest.approx(COLD)
