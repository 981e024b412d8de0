"""Lines of questions become means, and a verdict for each reuse method."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from keyhole.eval.paper import verdicts
from keyhole.eval.paper.documents import NO_DOCUMENTS
from keyhole.eval.paper.verdicts import ReuseResult

Line = dict[str, Any]
QUESTIONS = 240


def answer(f1: float, ttft_ms: float = 10.0, **more: Any) -> Line:
    known = {"settings": {"n": 1}, "f1": f1, "exact": float(f1 == 1), "ttft_ms": ttft_ms}
    return known | {"sequence_ratio": 1.0, "recompute_ratio": 0.0} | more


def question(seed: int, results: dict[str, Line], length: int = 1024) -> Line:
    return {
        "task": "multi_document_1",
        "task_settings": {"num_documents": 8},
        "length": length,
        "seed": seed,
        "results": results,
    }


def results(lines: list[Line]) -> dict[str, ReuseResult]:
    names = ("recompute", "reuse", "sam_kv", "epic")
    return {one.name: one for one in verdicts.reuse_results(lines, names)}


def test_every_method_is_compared_with_recomputing_and_no_documents() -> None:
    lines = [
        question(
            seed,
            {
                "recompute": answer(1.0, 90.0),
                "reuse": answer(0.5 if seed % 4 else 1.0, 5.0),
                "sam_kv": answer(1.0, 20.0 + seed, sequence_ratio=seed / QUESTIONS),
                "epic": answer(1.0, 30.0),
                NO_DOCUMENTS: answer(0.25, 1.0),
            },
        )
        for seed in range(QUESTIONS)
    ]
    found = results(lines)
    assert list(found) == ["recompute", "reuse", "sam_kv", "epic", NO_DOCUMENTS]
    assert found["recompute"].judged is None
    assert found[NO_DOCUMENTS].judged is None
    judged = {name: one.judged.verdict for name, one in found.items() if one.judged}
    assert judged == {
        "reuse": verdicts.LOSES,
        "sam_kv": verdicts.USE_IT,
        "epic": verdicts.USE_IT,
    }
    assert found["reuse"].over_plain is None
    assert found["epic"].over_plain is not None
    assert found["epic"].over_plain.points == pytest.approx(0.375)
    shares = [seed / QUESTIONS for seed in range(QUESTIONS)]
    assert found["sam_kv"].sequence_ratio == pytest.approx(statistics.fmean(shares))
    assert found["sam_kv"].ttft_ms == 20 + statistics.median(range(QUESTIONS))
    chosen = verdicts.best_reuse(found.values())
    assert chosen is not None
    assert (chosen.name, chosen.settings) == ("epic", {"n": 1})


def test_a_model_that_answers_without_the_documents_tells_nothing() -> None:
    every = {"recompute": answer(0.6), "epic": answer(0.6), NO_DOCUMENTS: answer(0.58)}
    found = results([question(seed, every) for seed in range(QUESTIONS)])
    judged = found["epic"].judged
    assert judged is not None
    assert judged.verdict == verdicts.CANNOT_TELL
    assert judged.why == "no documents is within 5 points of recomputing everywhere"
    assert verdicts.best_reuse(found.values()) is None


def test_lines_of_one_question_are_joined_and_the_later_result_counts() -> None:
    lines = [
        question(0, {"recompute": answer(1.0), NO_DOCUMENTS: answer(0.0), "epic": answer(0.0)}),
        question(0, {"epic": answer(1.0)}),
        question(0, {"recompute": answer(0.5), NO_DOCUMENTS: answer(0.0)}, length=2048),
    ]
    found = results(lines)
    assert found["epic"].f1 == 1.0
    assert found["epic"].questions == 1
    assert found["recompute"].f1 == 0.75
    assert found["epic"].judged is not None
    assert found["epic"].judged.loss.samples == 1
