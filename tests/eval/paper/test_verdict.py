"""When a method is to be used, when it is not, and when nobody can tell."""

from __future__ import annotations

import random
import statistics

import pytest

from keyhole.eval.comparisons import wilson
from keyhole.eval.paper import verdicts
from keyhole.eval.paper.verdicts import (
    CANNOT_TELL,
    LOSES,
    NO_BETTER,
    USE_IT,
    Judgement,
    Scores,
    conclude,
    judge,
)


def scores(method: float, reference: float, control: float, samples: int = 400) -> Scores:
    """Answers with these shares right; a lower share is right on a subset of the same items."""
    shares = (method, reference, control)
    made = [[float(n < round(share * samples)) for n in range(samples)] for share in shares]
    return Scores(method=made[0], reference=made[1], control=made[2])


def judged(*places: Scores) -> Judgement:
    return judge(places, "full", "recency")


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (scores(1.0, 1.0, 0.5), USE_IT),
        (scores(0.995, 1.0, 0.5), USE_IT),
        (scores(0.9, 1.0, 0.5), LOSES),
        (scores(0.5, 1.0, 0.5), NO_BETTER),
        (scores(0.48, 1.0, 0.5), NO_BETTER),
        # A loss of 2 points, as measured, may be more.
        (scores(0.98, 1.0, 0.5), CANNOT_TELL),
        (scores(1.0, 1.0, 0.96), CANNOT_TELL),
        (scores(0.0, 0.0, 0.0), CANNOT_TELL),
        (scores(0.5, 0.0, 0.0), CANNOT_TELL),
        # So few samples would all agree by chance.
        (scores(1.0, 1.0, 0.0, samples=8), CANNOT_TELL),
    ],
)
def test_one_place(place: Scores, expected: str) -> None:
    assert judged(place).verdict == expected


def test_a_model_without_right_answers_is_inconclusive_with_the_reason() -> None:
    found = judged(scores(0.0, 0.0, 0.0), scores(0.0, 0.0, 0.0, samples=7))
    assert (found.verdict, found.gain, found.telling, found.places) == (CANNOT_TELL, None, 0, 2)
    assert found.why == "full itself is right in at most 0 % anywhere"
    found = judged(scores(1.0, 1.0, 0.97))
    assert found.why == "recency is within 5 points of full everywhere"


def test_the_gain_counts_the_places_that_can_tell_and_the_loss_counts_all() -> None:
    """A task that recency solves, too, must hide neither a gain nor a loss elsewhere."""
    easy, hard = scores(0.9, 1.0, 1.0, samples=300), scores(1.0, 1.0, 0.0, samples=100)
    found = judged(easy, hard)
    assert (found.places, found.telling) == (2, 1)
    assert found.gain is not None
    assert (found.gain.points, found.gain.samples) == (1.0, 100)
    assert found.loss.points == pytest.approx(0.075)
    assert found.loss.samples == 400
    assert found.verdict == LOSES


@pytest.mark.parametrize("samples", [8, 100, 188, 189, 1000])
def test_samples_that_all_agree_do_not_show_that_others_would(samples: int) -> None:
    """Also for fractional scores: a bootstrap of equal differences has no width."""
    half = [0.5] * samples
    found = verdicts.difference([Scores(method=half, reference=half, control=half)])
    assert found.points == 0
    assert found.high == -found.low == wilson(0, samples)[1]
    assert (found.high <= verdicts.LOSS) == (samples >= 189)


@pytest.mark.slow
def test_intervals_of_parts_hold_the_true_difference() -> None:
    """Of 200 experiments whose true difference is 0.0625 about 190 intervals should hold it."""
    rng, held = random.Random(0), 0
    for _ in range(200):
        first = [rng.choice([0.0, 0.25, 0.5, 1.0]) for _ in range(60)]
        method = [min(1.0, one + rng.choice([0.0, 0.0, 0.25])) for one in first]
        place = Scores(method=method, reference=first, control=first)
        found = verdicts.difference([place])
        held += found.low <= 0.0625 <= found.high
        assert found.points == pytest.approx(statistics.fmean(method) - statistics.fmean(first))
    assert held >= 180


def test_the_smallest_budget_that_will_do_is_recommended() -> None:
    good, bad = judged(scores(1.0, 1.0, 0.5)), judged(scores(0.8, 1.0, 0.5))
    found = conclude([(64, bad), (128, good), (256, good)])
    assert (found.verdict, found.recommended) == (USE_IT, 128)
    assert found.why == good.why


def test_a_pass_at_a_smaller_budget_than_a_failure_counts_as_chance() -> None:
    good, bad = judged(scores(1.0, 1.0, 0.5)), judged(scores(0.8, 1.0, 0.5))
    found = conclude([(64, good), (128, bad), (256, good)])
    assert found.recommended == 256
    found = conclude([(64, good), (128, bad)])
    assert (found.verdict, found.recommended) == (LOSES, None)


def test_a_large_budget_that_recency_solves_too_does_not_hide_a_smaller_one() -> None:
    easy, good = judged(scores(1.0, 1.0, 0.99)), judged(scores(1.0, 1.0, 0.5))
    found = conclude([(64, good), (128, easy)])
    assert (found.verdict, found.recommended) == (USE_IT, 64)


def test_without_a_budget_to_use_the_largest_one_gives_the_verdict() -> None:
    lost, none = judged(scores(0.8, 1.0, 0.5)), judged(scores(0.5, 1.0, 0.5))
    found = conclude([(64, none), (128, lost)])
    assert (found.verdict, found.recommended, found.why) == (LOSES, None, lost.why)


def test_words_name_what_was_compared() -> None:
    every = (USE_IT, NO_BETTER, CANNOT_TELL, LOSES)
    told = [verdicts.words(one, "full attention", "recency") for one in every]
    assert told == [
        "use it",
        "no better than recency",
        "cannot tell",
        "loses to full attention by more than 2 points",
    ]
