"""A document's own query, its blocks' scores and its share, each against the formula in loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from keyhole.reuse.block_scores import key_scores, personal_queries, share


def cosine(x: list[float], y: list[float]) -> float:
    dot = sum(a * b for a, b in zip(x, y, strict=True))
    return dot / math.sqrt(sum(a * a for a in x)) / math.sqrt(sum(b * b for b in y))


@pytest.mark.parametrize("number", [2, 3, 5])
def test_a_personal_query_is_the_question_and_what_the_others_look_for(number: int) -> None:
    rng = torch.Generator().manual_seed(number)
    query = torch.randn(4, 8, generator=rng)
    local = torch.randn(number, 4, 8, generator=rng)
    found = personal_queries(query, local)
    q = query.double().flatten().tolist()
    others = local.double().flatten(1).tolist()
    for i in range(number):
        wanted = list(q)
        for j in range(number):
            if j != i:
                weight = abs(cosine(q, others[j])) / (number - 1)
                wanted = [w + weight * x for w, x in zip(wanted, others[j], strict=True)]
        torch.testing.assert_close(found[i].flatten(), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


def test_one_document_means_no_bias() -> None:
    query, local = torch.randn(4, 8), torch.randn(1, 4, 8)
    assert torch.equal(personal_queries(query, local)[0], query)


def test_a_query_that_looks_the_other_way_weighs_as_much() -> None:
    query = torch.tensor([[1.0, 0.0]])
    away = torch.tensor([[[-2.0, 0.0]], [[0.0, 0.0]]])
    # |cos| = 1: the second document's query gets the first's local query whole.
    assert personal_queries(query, away).tolist() == [[[1.0, 0.0]], [[-1.0, 0.0]]]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (3, 1)])
def test_a_score_is_the_sum_over_query_heads(heads: int, kv_heads: int) -> None:
    rng = torch.Generator().manual_seed(heads)
    query = torch.randn(heads, 8, generator=rng)
    keys = torch.randn(7, kv_heads, 8, generator=rng)
    found = key_scores(query[None], [keys])
    for b in range(7):
        wanted = 0.0
        for h in range(heads):
            wanted += float(query[h].double() @ keys[b, h // (heads // kv_heads)].double())
        assert float(found[b]) == pytest.approx(wanted, rel=1e-5, abs=1e-5)


def plain_share(
    query: Tensor, keys: Tensor, alpha: list[float], received: list[float], ends: list[int]
) -> float:
    """Equation 2 for one layer; keys [N, H, D] and query [H, D], as many heads."""
    middle = [b for b in range(len(keys)) if b not in ends]
    anchor = sum(keys[b].double() for b in ends) / len(ends)
    most = min(middle, key=lambda b: alpha[b])
    least = min(middle, key=lambda b: received[b])
    s_anchor, s_max, s_min = (
        float((query.double() * key.double()).sum()) for key in (anchor, keys[most], keys[least])
    )
    return (s_max - s_anchor) / (s_max - s_min) if s_min < s_anchor <= s_max else 0.0


def test_a_share_is_equation_2() -> None:
    shares = []
    for seed in range(60):
        rng = torch.Generator().manual_seed(seed)
        query, keys = torch.randn(2, 4, generator=rng), torch.randn(9, 2, 4, generator=rng)
        alpha, received = torch.rand(9, generator=rng), torch.rand(9, generator=rng)
        ends = torch.zeros(9, dtype=torch.bool)
        ends[[0, 7, 8]] = True
        scores = key_scores(query[None], [keys])
        found = float(share(scores[None], alpha[None], received[None], ends)[0])
        wanted = plain_share(query, keys, alpha.tolist(), received.tolist(), [0, 7, 8])
        assert found == pytest.approx(wanted, abs=1e-5)
        shares.append(found)
    assert 0 in shares
    assert any(0 < found < 1 for found in shares)


ENDS = torch.tensor([True, False, False, False, True])


@pytest.mark.parametrize(
    ("anchor", "highest", "lowest", "wanted"),
    [
        (2.0, 4.0, 0.0, 0.5),
        (1.0, 4.0, 0.0, 0.75),
        (4.0, 4.0, 0.0, 0.0),  # anchor = max: nothing beats it
        (5.0, 4.0, 0.0, 0.0),  # above it
        (0.0, 4.0, 0.0, 0.0),  # anchor = min: outside, as the paper's interval is open there
        (-1.0, 4.0, 0.0, 0.0),  # below
        (3.0, 3.0, 3.0, 0.0),  # all the same
        (2.0, 3.0, 3.0, 0.0),  # max = min
        (2.0, 0.0, 4.0, 0.0),  # the important block scores less than the unimportant one
    ],
)
def test_a_share_at_its_borders(
    anchor: float, highest: float, lowest: float, wanted: float
) -> None:
    scores = torch.tensor([[anchor + 1, highest, 7.0, lowest, anchor - 1]])
    alpha = torch.tensor([[0.0, 0.1, 0.2, 0.3, 0.0]])
    received = torch.tensor([[0.0, 0.3, 0.2, 0.1, 0.0]])
    assert share(scores, alpha, received, ENDS).tolist() == [wanted]


def test_of_equally_important_blocks_the_earlier_counts() -> None:
    scores = torch.tensor([[2.0, 4.0, 100.0, 0.0, 2.0]])
    alpha = torch.tensor([[1.0, 0.5, 0.5, 0.5, 1.0]])
    received = torch.tensor([[1.0, 0.5, 0.5, 0.1, 1.0]])
    assert share(scores, alpha, received, ENDS).tolist() == [0.5]


def test_blocks_without_an_alpha_are_the_least_important() -> None:
    scores = torch.tensor([[2.0, 100.0, 4.0, 0.0, 2.0]])
    alpha = torch.tensor([[1.0, math.inf, 9.0, math.inf, 1.0]])
    received = torch.tensor([[1.0, 0.5, 0.5, 0.1, 1.0]])
    assert share(scores, alpha, received, ENDS).tolist() == [0.5]
    alpha[:] = math.inf
    assert share(scores, alpha, received, ENDS).tolist() == [0.98]  # the first block, then


def test_layers_have_shares_of_their_own() -> None:
    scores = torch.tensor([[2.0, 4.0, 9.0, 0.0, 2.0], [1.0, 4.0, 9.0, 0.0, 1.0]])
    alpha = torch.tensor([[0.0, 0.1, 0.2, 0.3, 0.0]]).repeat(2, 1)
    received = torch.tensor([[0.0, 0.3, 0.2, 0.1, 0.0]]).repeat(2, 1)
    assert share(scores, alpha, received, ENDS).tolist() == [0.5, 0.75]
