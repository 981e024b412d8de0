"""A line becomes a cell whatever it lacks, and methods get names that tell them apart."""

from __future__ import annotations

import math

import pytest

from keyhole.eval.report.cells import EvalSetting, cells, place_name, places
from tests.eval.eval_lines import full, line


def test_a_cell_has_the_fields_of_its_line() -> None:
    (cell,) = cells([line()])
    assert cell.place == EvalSetting("tiny", "tiny_needle", "prompt", 1024)
    assert (cell.name, cell.budget, cell.label) == ("delta", 128, "delta, 128 tokens")
    assert (cell.score, cell.samples, cell.scores) == (0.75, 4, (1, 0, 1, 1))
    assert cell.depths == (0, 0.5, 0.5, 1)
    assert (cell.tokens_prompt, cell.tokens_generated, cell.read_share) == (1000, 12.5, 0.321)
    assert (cell.bytes_per_step, cell.step_ms, cell.peak_bytes) == (3 * 2**19, 4.56, 7 * 2**30)
    assert cell.recall_per_layer == (1, None, 0.9, 0.43)


def test_wilson_intervals_are_the_solutions_of_their_equation() -> None:
    """The ends p of the interval are where |share - p| is 1.96 standard errors of p."""
    (cell,) = cells([line(scores=[1.0] * 7 + [0.0] * 3)])
    assert cell.interval is not None
    for p in cell.interval:
        # The interval is made with 1.95996...
        assert abs(0.7 - p) == pytest.approx(1.96 * math.sqrt(p * (1 - p) / 10), rel=1e-4)
    assert cell.interval[0] < 0.7 < cell.interval[1]


@pytest.mark.parametrize("scores", [[0.5, 1.0], [], None, [1.0, None], [1.0, math.nan]])
def test_other_scores_have_no_interval(scores: object) -> None:
    assert cells([line(scores=scores)])[0].interval is None


def test_what_is_no_number_is_nothing() -> None:
    (cell,) = cells(
        [line(step_ms=math.nan, read_share=math.inf, peak_bytes="7", bytes_per_step=True)]
    )
    assert cell.step_ms is cell.read_share is cell.peak_bytes is cell.bytes_per_step is None


def test_an_empty_line_is_a_cell() -> None:
    (cell,) = cells([{}])
    assert (cell.policy, cell.budget, cell.score, cell.samples) == ("unnamed", None, None, None)
    assert (cell.place.task, cell.place.length) == ("unnamed", 0)


def test_a_score_is_the_mean_of_scores_where_it_is_missing() -> None:
    assert cells([line(score=None)])[0].score == 0.75


def test_the_last_of_two_measurements_counts() -> None:
    found = cells([line(score=0.1), full(), line(score=0.2)])
    assert [(cell.name, cell.score) for cell in found] == [("delta", 0.2), ("full", 1.0)]


def test_settings_tell_methods_of_one_budget_apart() -> None:
    found = cells(
        [
            line(settings={"token_budget": 128, "delta_layers": [2], "window": 16}),
            line(settings={"token_budget": 128, "delta_layers": [1, 3], "window": 16}),
            line(budget=256, settings={"token_budget": 256, "delta_layers": [2], "window": 32}),
        ]
    )
    assert [cell.name for cell in found] == [
        "delta, delta_layers [2]",
        "delta, delta_layers [1, 3]",
        "delta, delta_layers [2]",
    ]


def test_settings_that_follow_the_budget_tell_nothing_apart() -> None:
    found = cells([line(settings={"window": 16}), line(budget=256, settings={"window": 32})])
    assert [cell.name for cell in found] == ["delta", "delta"]


def test_places_stand_in_the_order_of_tasks_and_lengths() -> None:
    found = cells([line(task="b", length=n) for n in (2048, 512)] + [line(task="a")])
    by_place = places(found)
    names = [place_name(at, by_place) for at in by_place]
    assert names == ["b, 512 tokens", "b, 2,048 tokens", "a, 1,024 tokens"]


def test_a_place_is_named_by_what_differs() -> None:
    by_place = places(cells([line(), line(setup="question", model="other")]))
    assert [place_name(at, by_place) for at in by_place] == [
        "tiny_needle, 1,024 tokens, question dense, tiny",
        "tiny_needle, 1,024 tokens, question sparse, other",
    ]


def test_settings_of_a_task_are_places_of_their_own() -> None:
    asked: list[dict[str, object]] = [{"depth": depth} for depth in (None, 0.0, 0.5)]
    asked.append({"depth": 0.125, "other": None})
    found = cells([line(task_settings=settings) for settings in asked])
    by_place = places(found)
    assert [place_name(at, by_place) for at in by_place] == [
        "tiny_needle, 1,024 tokens",
        "tiny_needle:depth=0, 1,024 tokens",
        "tiny_needle:depth=0.5, 1,024 tokens",
        "tiny_needle:depth=0.125, 1,024 tokens",
    ]
    assert [at.depth for at in by_place] == [None, 0, 0.5, 0.125]
    assert len({at.needles for at in by_place}) == 1


def test_default_settings_of_a_task_are_not_shown() -> None:
    lines = [line(task="tiny_documents_one", task_settings={"num_documents": n}) for n in (3, 5)]
    by_place = places(cells(lines))
    assert [place_name(at, by_place).split(",")[0] for at in by_place] == [
        "tiny_documents_one",
        "tiny_documents_one:num_documents=5",
    ]
    assert len({at.needles for at in by_place}) == 2


def test_forced_texts_are_named_if_they_differ() -> None:
    lines = [
        line(task=task, task_settings={"text": text, "continuation": 128})
        for task, text in (("perplexity", "a"), ("attention_recall", "a"), ("perplexity", "b"))
    ]
    by_place = places(cells(lines))
    assert [place_name(at, by_place).split(",")[0] for at in by_place] == [
        "perplexity:text=a",
        "attention_recall",
        "perplexity:text=b",
    ]
