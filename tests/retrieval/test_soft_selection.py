"""Gates are what their formula says, and the target under them is transformers' with a mask."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from keyhole.errors import NumericalError
from keyhole.retrieval.training.objectives import chosen, log_gates, soft_selection_logits
from keyhole.retrieval.training.teacher import Teacher, TeacherTargets
from tests.checkpoints import KINDS, VOCAB_SIZE, make_config, make_network

LENGTH, START = 40, 22


def targets_of(network: Any) -> TeacherTargets:
    ids = torch.randint(3, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(1))
    rows = torch.arange(START, LENGTH)
    return Teacher(network, ()).targets(ids, rows, logit_steps=1, keep_cache=True)


def random_scores(groups: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    scores = 3 * torch.randn(groups, LENGTH - START, LENGTH, generator=generator)
    places, rows = torch.arange(LENGTH), torch.arange(START, LENGTH)
    return scores.masked_fill(places > rows[:, None], -1e30).log_softmax(-1)


def plain_gate(scores: list[float], row: int, i: int, budget: int, first: int, last: int) -> float:
    if i > row:
        return 0.0
    if i < first or i > row - last:
        return 1.0
    free = sorted((scores[j] for j in range(first, row - last + 1)), reverse=True)
    taken = budget - first - last
    if len(free) <= taken:
        return 1.0
    edge = (free[taken - 1] + free[taken]) / 2
    return 1 / (1 + math.exp(-(scores[i] - edge) / 0.5))


@pytest.mark.parametrize("budget", [8, 20, 30, 39, 40, 200])
def test_gates_are_those_of_plain_loops(budget: int) -> None:
    scores, rows = random_scores(2), torch.arange(START, LENGTH)
    gates = log_gates(scores, rows, budget, 2, 5, 0.5).exp()
    for group in range(2):
        for number, row in enumerate(rows.tolist()):
            own = scores[group, number].double().tolist()
            wanted = [plain_gate(own, row, i, budget, 2, 5) for i in range(LENGTH)]
            assert gates[group, number].tolist() == pytest.approx(wanted, abs=1e-5)


def test_cold_gates_are_the_choice_itself() -> None:
    scores, rows = random_scores(2), torch.arange(START, LENGTH)
    gates = log_gates(scores, rows, 12, 2, 5, 1e-5).exp()
    indices = chosen(scores, rows, 12, 2, 5).indices.transpose(0, 1).long()
    torch.testing.assert_close(gates, torch.zeros_like(gates).scatter(-1, indices, 1.0))


@pytest.mark.parametrize("kind", ["llama", "llama_mqa", "llama_group3", "qwen3"])
def test_the_target_under_gates_is_eager_attention_with_a_mask(kind: str) -> None:
    network = make_network(make_config(kind))
    targets = targets_of(network)
    logs = log_gates(random_scores(len(targets.mass)), targets.rows, 12, 2, 5, 0.5)
    found = soft_selection_logits(network, targets, logs)
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1).repeat(len(logs), 1, 1)
    mask[:, START:] = logs
    heads = network.config.num_attention_heads // len(logs)
    with torch.no_grad():
        wanted = network(
            targets.token_ids[None], attention_mask=mask.repeat_interleave(heads, 0)[None]
        )
    torch.testing.assert_close(found, wanted.logits[0, START:], atol=1e-3, rtol=1e-3)
    assert network.config._attn_implementation == "eager"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mistral_sliding"])
def test_open_gates_change_nothing_and_others_have_gradients(kind: str) -> None:
    network = make_network(make_config(kind)).requires_grad_(False)
    targets = targets_of(network)
    assert targets.logits is not None
    scores = random_scores(len(targets.mass)).requires_grad_()
    opened = soft_selection_logits(network, targets, log_gates(scores, targets.rows, 60, 2, 5, 0.5))
    torch.testing.assert_close(opened, targets.logits[:, 0], atol=1e-3, rtol=1e-3)
    again = soft_selection_logits(network, targets, log_gates(scores, targets.rows, 12, 2, 5, 0.5))
    assert (again - opened).abs().max() > 0.1
    again.square().sum().backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert scores.grad.abs().sum() > 0


def test_gradients_are_those_of_small_differences() -> None:
    """In float64, through gates, every layer's attention and the keys of rows before."""
    network = make_network(make_config("llama")).double().requires_grad_(False)
    targets = targets_of(network)
    scores = random_scores(len(targets.mass)).double().requires_grad_()
    aim = torch.randn(LENGTH - START, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))

    def value(scores: torch.Tensor) -> torch.Tensor:
        logits = soft_selection_logits(
            network, targets, log_gates(scores, targets.rows, 12, 2, 5, 0.5)
        )
        return (logits.log_softmax(-1) * aim).sum()

    (gradient,) = torch.autograd.grad(value(scores), scores)
    way = torch.zeros_like(scores)
    way[:, :, 2:17] = torch.randn(way[:, :, 2:17].shape, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        slope = (value(scores + 1e-3 * way) - value(scores - 1e-3 * way)) / 2e-3
    assert slope.item() == pytest.approx((gradient * way).sum().item(), rel=2e-2)


def test_a_target_that_gives_nan_is_named() -> None:
    network = make_network(make_config("llama"))
    targets = targets_of(network)
    logs = torch.full((2, LENGTH - START, LENGTH), float("nan"))
    with pytest.raises(
        NumericalError, match="with gates the model computes NaN for a text of 40 tokens"
    ):
        soft_selection_logits(network, targets, logs)
    assert network.config._attn_implementation == "eager"
