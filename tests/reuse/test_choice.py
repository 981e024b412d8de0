"""The blocks that are kept are those that a loop over layers, documents and blocks keeps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keyhole.reuse.block_scores import best, choose, fitting, standardised


def plain_choice(
    scores: list[list[float]], shares: list[float], most: int | None
) -> list[list[bool]]:
    """One layer: scores per document and block."""
    offered = []
    for d, (own, share) in enumerate(zip(scores, shares, strict=True)):
        if not own:
            continue
        mean = sum(own) / len(own)
        spread = math.sqrt(sum((s - mean) ** 2 for s in own) / len(own))
        wanted = math.ceil(share * len(own))
        best = sorted(range(len(own)), key=lambda b: (-own[b], b))[:wanted]
        offered += [(-(own[b] - mean) / (spread or 1), d, b) for b in best]
    room = math.ceil(len(offered) / len(scores)) if most is None else most
    kept = [[False] * len(own) for own in scores]
    for _, d, b in sorted(offered)[:room]:
        kept[d][b] = True
    return kept


def as_lists(chosen: list[Tensor], layer: int) -> list[list[bool]]:
    return [part[layer].tolist() for part in chosen]


@pytest.mark.parametrize("most", [None, 0, 1, 4, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_every_layer_keeps_the_best_of_the_best(seed: int, most: int | None) -> None:
    rng = torch.Generator().manual_seed(seed)
    sizes = [7, 0, 1, 12, 3][: seed % 5 + 1]
    scores = [torch.randn(3, size, generator=rng) for size in sizes]
    shares = torch.rand(len(sizes), generator=rng).tolist()
    shares[0] = [0.0, 1.0][seed % 2] if seed > 3 else shares[0]
    chosen = choose(scores, shares, most)
    for layer in range(3):
        plain = [part[layer].double().tolist() for part in scores]
        assert as_lists(chosen, layer) == plain_choice(plain, shares, most)
    # As many in every layer.
    assert len(set(torch.cat(chosen, 1).sum(1).tolist())) == 1


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([-1.0, 0.0, 0.0, 1.0]), max_size=6),
            st.sampled_from([0.0, 0.25, 0.5, 1.0]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_equal_scores_go_to_the_earlier_document_and_block(
    documents: list[tuple[list[float], float]],
) -> None:
    # Scores whose standard forms are exact: few values, and documents alike.
    own = documents[0][0]
    scores = [torch.tensor([own]) for _ in documents]
    shares = [share for _, share in documents]
    chosen = choose(scores, shares)
    assert as_lists(chosen, 0) == plain_choice([own] * len(documents), shares, None)


def test_one_document_keeps_all_that_it_wants() -> None:
    scores = [torch.tensor([[3.0, 1.0, 2.0, 5.0]])]
    assert choose(scores, [0.5])[0].tolist() == [[True, False, False, True]]
    assert choose(scores, [0.51])[0].tolist() == [[True, False, True, True]]
    assert not choose(scores, [0.0])[0].any()


def test_a_document_with_outliers_wins_over_one_with_large_scores() -> None:
    """Scores are standardised: only the distance from the document's mean counts."""
    flat = torch.tensor([[1000.0, 1001.0, 1002.0, 1003.0]])
    peak = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    chosen = choose([flat, peak], [0.25, 0.25])
    assert [part.tolist() for part in chosen] == [[[False] * 4], [[False, False, False, True]]]


def test_documents_permuted_give_the_result_permuted() -> None:
    rng = torch.Generator().manual_seed(7)
    scores = [torch.randn(4, size, generator=rng) for size in (5, 9, 2)]
    shares = [0.4, 0.7, 0.5]
    chosen = choose(scores, shares)
    order = [2, 0, 1]
    again = choose([scores[i] for i in order], [shares[i] for i in order])
    for i, part in zip(order, again, strict=True):
        assert torch.equal(part, chosen[i])


def test_standard_scores_have_mean_0_and_deviation_1() -> None:
    found = standardised(torch.randn(3, 6))
    torch.testing.assert_close(found.mean(1), torch.zeros(3).double())
    torch.testing.assert_close(found.square().mean(1), torch.ones(3).double())


@pytest.mark.parametrize("scores", [[[2.5]], [[0.1, 0.1, 0.1]], [[]]])
def test_equal_blocks_score_zero(scores: list[list[float]]) -> None:
    assert not standardised(torch.tensor(scores)).any()


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=9),
    st.integers(0, 30),
)
def test_the_best_blocks_are_taken_while_they_fit(blocks: list[tuple[int, int]], room: int) -> None:
    scores = torch.tensor([[float(score) for score, _ in blocks]])
    sizes = torch.tensor([size for _, size in blocks])
    taken, left = set(), room
    for i in sorted(range(len(blocks)), key=lambda i: (-blocks[i][0], i)):
        left -= blocks[i][1]
        if left < 0:
            break
        taken.add(i)
    assert set(fitting(scores, sizes, room)[0].nonzero().flatten().tolist()) == taken


def test_blocks_of_one_size_fit_by_their_number() -> None:
    scores = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fitting(scores, torch.full((7,), 4), 15), best(scores, 3))
