"""The estimate adds up what the probe has measured."""

from __future__ import annotations

import pytest

from keyhole.eval.paper import suite
from keyhole.eval.paper.suite import Answers, LinearTime, PartEstimate, Speed, probe
from keyhole.eval.tasks import make_task
from keyhole.eval.workload import Request
from keyhole.models.model import Model

SPEED = Speed(
    chunk_tokens=100,
    chunk=LinearTime(base=1.0, slope=0.01),
    batch=4,
    step=LinearTime(base=0.5, slope=0.001),
)


@pytest.mark.parametrize("base", [0.0, 0.3])
@pytest.mark.parametrize("slope", [0.0, 0.002])
def test_a_line_is_found_again(base: float, slope: float) -> None:
    tokens = [0.0, 100.0, 300.0]
    found = LinearTime.through(tokens, [base + slope * n for n in tokens])
    assert (found.base, found.slope) == (pytest.approx(base), pytest.approx(slope))
    assert found.at(1000) == pytest.approx(base + 1000 * slope)


def test_what_gets_faster_by_chance_is_not_taken_to_do_so_for_ever() -> None:
    assert LinearTime.through([0.0, 100.0], [1.0, 0.5]) == LinearTime(base=0.75, slope=0.0)
    assert LinearTime.through([50.0, 50.0], [1.0, 3.0]) == LinearTime(base=2.0, slope=0.0)


def test_a_prompt_is_its_chunks() -> None:
    for chunks in (1, 2, 5):
        seconds = sum(1.0 + 0.01 * 100 * number for number in range(chunks))
        assert SPEED.prefill(100 * chunks) == pytest.approx(seconds)
    assert SPEED.prefill(50) == 0.5


def test_answers_are_written_a_batch_at_a_time() -> None:
    assert SPEED.decode(1000, 20, 4) == pytest.approx(20 * (0.5 + 1.010))
    assert SPEED.decode(1000, 20, 5) == 2 * SPEED.decode(1000, 20, 4)


def test_prompts_that_fit_are_computed_once_and_answers_by_every_policy() -> None:
    request = Request(prompt=[1] * 200, given=[1] * 5, max_tokens=15)
    once, decoded = 8 * SPEED.prefill(200), 3 * SPEED.decode(200, 20, 8)
    answers = Answers(request=request, samples=8, missing=3)
    assert answers.seconds(SPEED, 8 * 200) == pytest.approx(once + decoded)
    assert answers.seconds(SPEED, 0) == pytest.approx(3 * once + decoded)
    assert answers.seconds(SPEED, 4 * 200) == pytest.approx(2 * once + decoded)
    assert Answers(request=request, samples=8, missing=0).seconds(SPEED, 0) == 0


def test_a_question_stores_its_documents_and_is_answered_by_every_method() -> None:
    sample = make_task("multi_document_1").make(1400, 0, lambda text: len(text.split()))
    stored = 8 * SPEED.prefill(sample.prompt_tokens / 8)
    step = SPEED.step.at(sample.prompt_tokens)
    answered = SPEED.prefill(sample.prompt_tokens) + sample.max_new_tokens * step
    found = suite.seconds_of_question(SPEED, sample, 6)
    assert found == pytest.approx(stored + 6 * answered)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (89, "89 s"), (90, "2 min"), (5401, "1.5 h"), (172_800, "2.0 days")],
)
def test_a_duration_has_a_suitable_unit(seconds: float, text: str) -> None:
    assert suite.duration(seconds) == text


def test_the_text_has_the_stored_cells_and_the_time_of_the_rest() -> None:
    parts = [
        PartEstimate(name="tasks", unit="cell", number=1200, stored=200, seconds=7200),
        PartEstimate(name="documents", unit="question", number=1, stored=1, seconds=0),
        PartEstimate(name="nothing", unit="cell", number=0, stored=0, seconds=0),
    ]
    assert suite.estimate_text(parts) == (
        "tasks: 1,200 cells, 200 stored, the rest at most 2.0 h; "
        "documents: 1 question, 1 stored. Altogether at most about 2.0 h."
    )


@pytest.mark.parametrize("length", [1, 40, 300])
def test_a_probe_gives_times_of_any_length(model: Model, length: int) -> None:
    speed = probe(model, length, batch=2)
    assert speed.batch == 2
    assert 0 < speed.prefill(512) < 600
    assert 0 < speed.decode(512, 10, 4) < 600
