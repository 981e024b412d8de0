"""Questions over stored documents run under every method, are stored, and do not run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keyhole import LLM, SamplingParams
from keyhole.errors import CapacityError
from keyhole.eval.line_file import LineFile
from keyhole.eval.paper.documents import NO_DOCUMENTS, DocumentEvaluation, DocumentGrid
from keyhole.eval.tasks import make_task
from keyhole.models.loading import load
from keyhole.models.model import Model
from tests.checkpoints import make_model

TASK = make_task("multi_document_1", {"num_documents": 2})
LENGTH = 1280
METHODS = ("recompute", "reuse", "epic")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("reader")
    path = make_model("llama", folder, tokenizer=True, max_position_embeddings=2048)
    return load(path, device="cpu")


def evaluation(model: Model, path: Path, **fields: Any) -> DocumentEvaluation:
    given: dict[str, Any] = {"samples": 2, "methods": METHODS} | fields
    grid = DocumentGrid(places=[(TASK, LENGTH)], **given)
    return DocumentEvaluation(model, grid, LineFile(path), lambda: {"date": "today"})


@pytest.mark.slow
def test_every_question_has_a_line_with_every_method(reader: Model, tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    wanted = evaluation(reader, path)
    assert wanted.missing(TASK, LENGTH) == 2
    asked = wanted.run()
    assert (asked.stored, asked.refused, len(asked.lines)) == (0, [], 2)
    for seed, line in enumerate(asked.lines):
        sample = TASK.make(LENGTH, seed, lambda text: len(reader.tokenizer(text).input_ids))
        assert (line["task"], line["length"], line["seed"]) == (TASK.name, LENGTH, seed)
        assert line["documents"] == 2
        assert set(line["results"]) == {*METHODS, NO_DOCUMENTS}
        found = line["results"]
        assert found["recompute"]["recompute_ratio"] == found["reuse"]["sequence_ratio"] == 1
        assert found["reuse"]["recompute_ratio"] == found[NO_DOCUMENTS]["sequence_ratio"] == 0
        assert found["epic"]["settings"] == {"num_initial": 32, "num_local": 0}
        share = found["epic"]["recompute_ratio"]
        assert share == pytest.approx(64 / sum(map(len, sample.documents)))
        # Bytes are tokens, so the pieces have the tokens of the whole prompt.
        params = SamplingParams(max_tokens=sample.max_new_tokens, temperature=0.0)
        plain = LLM(reader).generate(sample.prompt, params)
        assert found["recompute"]["answer"] == plain.text
        assert found["recompute"]["tokens_prompt"] == sample.prompt_tokens
        assert found["recompute"]["f1"] == TASK.score(sample, plain.text)
    again = evaluation(reader, path)
    assert again.missing(TASK, LENGTH) == 0
    assert again.run().stored == 2
    assert len(LineFile(path).lines) == 2
    # Other questions, and other models, are others.
    assert evaluation(reader, path, first_seed=1).missing(TASK, LENGTH) == 1
    assert evaluation(reader, path, samples=5).missing(TASK, LENGTH) == 3


@pytest.mark.slow
def test_an_interrupted_run_goes_on_and_a_further_method_is_added(
    reader: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ask, done = tmp_path / "eval.jsonl", LLM.ask, []

    def interrupted(self: LLM, *given: Any, **named: Any) -> Any:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(named["reuse"].name)
        return ask(self, *given, **named)

    monkeypatch.setattr(LLM, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluation(reader, path, methods=("recompute", "reuse")).run()
    assert len(LineFile(path).lines) == 1
    monkeypatch.setattr(LLM, "ask", ask)
    assert evaluation(reader, path, methods=("recompute", "reuse")).run().stored == 1
    first, second = LineFile(path).lines
    assert (first["seed"], second["seed"]) == (0, 1)
    wanted = evaluation(reader, path)
    assert wanted.missing(TASK, LENGTH) == 2
    asked = wanted.run()
    assert [list(line["results"]) for line in LineFile(path).lines[2:]] == [["epic"], ["epic"]]
    assert len(asked.lines) == 4


def test_a_failing_method_is_reported_once_and_the_others_continue(
    reader: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, tried = LLM.ask, []

    def failing(self: LLM, *given: Any, **named: Any) -> Any:
        if named["reuse"].name == "reuse":
            tried.append(named["reuse"].name)
            raise CapacityError("memory is out")
        return ask(self, *given, **named)

    monkeypatch.setattr(LLM, "ask", failing)
    asked = evaluation(reader, tmp_path / "eval.jsonl", methods=("recompute", "reuse")).run()
    place = {"task": TASK.name, "length": LENGTH}
    assert asked.refused == [place | {"method": "reuse", "error": "memory is out"}]
    assert len(tried) == 1
    assert [set(line["results"]) for line in asked.lines] == [{"recompute", NO_DOCUMENTS}] * 2
