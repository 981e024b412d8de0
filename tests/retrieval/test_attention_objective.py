"""The loss is the KL divergence that its module describes."""

from __future__ import annotations

import math

import pytest
import torch

from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.training.objectives import attention_loss, mass_divergence
from keyhole.retrieval.training.teacher import Teacher, TeacherTargets
from tests.checkpoints import VOCAB_SIZE, make_config, make_network


def targets_of(
    kind: str, layers: tuple[int, ...], rows: list[int]
) -> tuple[RetrievalHead, TeacherTargets]:
    network = make_network(make_config(kind))
    inputs = "tokens+features" if layers else "tokens"
    head = RetrievalHead.random(network, inputs=inputs)
    text = torch.randint(3, VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(1))
    return head, Teacher(network, head.config.feature_layers).targets(text, torch.tensor(rows))


def plain_loss(head: RetrievalHead, targets: TeacherTargets, first: int, last: int) -> float:
    """Loops and Python numbers over the queries and keys that the head gives."""
    ids = targets.token_ids
    fused = None
    if head.config.uses_features:
        states = head.fuse(targets.hidden)
        fused = torch.cat([torch.zeros_like(states[:1]), states[:-1]])
    query, key = head(ids, torch.arange(len(ids)), fused)
    q, k = query.detach().double().tolist(), key.detach().double().tolist()
    heads, kv, groups = len(q[0]), len(k[0]), len(targets.mass)
    total = mass = 0.0
    for number, row in enumerate(targets.rows.tolist()):
        weights = []
        for h in range(heads):
            own = [k[i][h * kv // heads] for i in range(row + 1)]
            logits = [head.scale * sum(map(math.prod, zip(q[row][h], x, strict=True))) for x in own]
            top = max(logits)
            weights.append(
                [math.exp(x - top) / sum(math.exp(y - top) for y in logits) for x in logits]
            )
        for g in range(groups):
            if groups <= heads:
                serving = range(g * heads // groups, (g + 1) * heads // groups)
            else:
                serving = range(g * heads // groups, g * heads // groups + 1)
            rest = [i for i in range(row + 1) if i >= first and i <= row - last]
            wanted = [float(targets.mass[g, number, i]) for i in rest]
            found = [sum(weights[h][i] for h in serving) / len(serving) for i in rest]
            left = sum(wanted)
            for p, w in zip(wanted, found, strict=True):
                total += p * (math.log(p / left) - math.log(w / sum(found)))
            mass += left
    return total / mass


@pytest.mark.parametrize("kind", ["llama", "llama_mqa", "llama_group3", "deepseek_v3"])
@pytest.mark.parametrize("layers", [(), (1, 2, 3)])
def test_the_loss_is_that_of_plain_loops(kind: str, layers: tuple[int, ...]) -> None:
    head, targets = targets_of(kind, layers, [8, 15, 29])
    _, logs = attention_loss(head, targets)
    loss = mass_divergence(logs, targets, first=2, last=5)
    assert loss.item() == pytest.approx(plain_loss(head, targets, 2, 5), rel=1e-5)
    torch.testing.assert_close(logs.exp().sum(-1), torch.ones(logs.shape[:2]))


def test_a_row_with_nothing_outside_of_the_window_teaches_nothing() -> None:
    head, targets = targets_of("llama", (1, 2, 3), [3])
    loss, _ = attention_loss(head, targets)
    loss.backward()
    assert loss.item() == 0
    assert all(not p.grad.any() for p in head.parameters() if p.grad is not None)


def test_a_head_that_agrees_has_no_loss() -> None:
    head, targets = targets_of("llama_mha", (), [10, 20, 29])
    _, logs = attention_loss(head, targets)
    same = TeacherTargets(targets.token_ids, (), targets.rows, logs.exp().detach())
    assert mass_divergence(logs, same, first=1, last=3).item() == pytest.approx(0, abs=1e-5)
