from random import Random

import pytest
import torch

from keyhole.eval.tiny_language.world import EOS, WORD_IDS
from recipes.tiny_model.curriculum import (
    CURRICULA,
    KINDS,
    MAX_POSITION,
    SINGLE,
    FeedRows,
    stage_at,
    training_batch,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [64, 127, 500, 2048])
def test_rows_fit_and_supervise_something(kind, length):
    rows = [KINDS[kind](Random(seed), length) for seed in range(10)]
    assert all(len(words) == len(marks) <= length for words, marks in rows)
    assert not any(marks[0] for _, marks in rows)
    assert sum(any(marks) for _, marks in rows) > 5  # a short row may have no room to ask


def test_targets_are_the_tokens_after_the_supervised_places():
    batch = training_batch(0, 3, 1, SINGLE[-1])
    assert torch.equal(batch.targets, batch.tokens.flatten()[batch.supervised + 1])
    assert WORD_IDS[EOS] in batch.targets


def test_positions_grow_and_stay_within_the_model():
    for step in range(20):
        positions = training_batch(0, step, 0, SINGLE[-1]).positions
        assert (positions.diff(dim=1) >= 1).all()
        assert positions[:, 0].eq(0).all()
        assert positions.max() < MAX_POSITION


@pytest.mark.parametrize("name", CURRICULA)
def test_the_rows_of_every_stage_have_its_lengths(name):
    for stage in CURRICULA[name]:
        batch = training_batch(0, 0, 0, stage)
        assert batch.tokens.shape[1] in stage.lengths
        assert batch.tokens.numel() >= stage.batch // 2


def test_same_step_same_rows_other_rank_other_rows():
    first, again, other = (training_batch(0, 7, rank, SINGLE[2]) for rank in (0, 0, 1))
    assert torch.equal(first.tokens, again.tokens)
    assert first.tokens.shape == other.tokens.shape
    assert not torch.equal(first.tokens, other.tokens)


def test_the_feed_counts_the_tokens_of_all_ranks():
    rows = FeedRows(seed=0, rank=0, num_ranks=2, batch_scale=1)
    seen = 7_900_000  # the last batches of a stage, and the first of the next
    for (step, tokens), _ in zip(rows._places(0, seen), range(20), strict=False):
        assert tokens == seen
        seen += 2 * rows[step, tokens].tokens.numel()
    assert seen > 8_000_000


def test_stages_follow_each_other():
    assert [stage_at(SINGLE, tokens) for tokens in (0, 1_000_000, 10**9)] == [
        SINGLE[0],
        SINGLE[1],
        SINGLE[-1],
    ]


def test_stretched_stages_last_longer():
    usual, twice = (
        FeedRows(seed=0, rank=0, num_ranks=1, batch_scale=1, stretch=stretch) for stretch in (1, 2)
    )
    for stage in SINGLE[:-1]:
        assert usual._stage(round(stage.until) - 1) == stage == twice._stage(2 * stage.until - 1)
        assert twice._stage(stage.until) == stage != usual._stage(stage.until)
