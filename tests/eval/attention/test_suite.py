"""The cells of the suite: what their lines say, what is not measured twice, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import keyhole
from keyhole.config import EngineConfig
from keyhole.engine.prompts.shared_prompt_cache import SharedPromptCache
from keyhole.errors import ConfigError
from keyhole.eval.attention.suite import METHOD, AttentionGrid, AttentionSuite
from keyhole.eval.line_file import EvalOutcome, LineFile
from keyhole.eval.methods import Budget, Method
from keyhole.eval.methods import under_budgets as budgeted
from keyhole.models.model import Model
from tests.checkpoints import make_model
from tests.policies.models import VOCAB, prompt, with_head

PAGE, LENGTH, TEXTS = 4, 64, 3


class Numbers:
    """Texts of random tokens."""

    path, digest = "numbers", "numbers"

    def windows(self, length: int) -> int:
        if length > 400:
            raise ConfigError("there are no texts of so many tokens")
        return 5

    def window(self, length: int, number: int) -> list[int]:
        return prompt(length, number)


def suite(
    model: Model, path: Path, names: list[str], budgets: str = "16", **more: Any
) -> EvalOutcome:
    parsed = [Budget.parse(text) for text in budgets.split(",")]
    given = [Method(label=name, name=name) for name in names]
    grid = AttentionGrid(
        windows=Numbers(),
        lengths=more.get("lengths", (LENGTH,)),
        methods=[one for one in budgeted(given, parsed) if one.name != "full"],
        budgets=parsed,
        texts=more.get("texts", TEXTS),
        config=EngineConfig(max_batch=2, page_size=PAGE, prefill_chunk=64, prefix_cache=False),
    )
    header = more.get("header", lambda: {"date": "today"})
    return AttentionSuite(model, grid, LineFile(path), header, SharedPromptCache(2**24)).run()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    return with_head(make_model("llama_mha", folder, vocab_size=VOCAB))


METHODS = [name for name, cls in keyhole.available_policies().items() if not cls.dense]
#: With dense layers, with blocks, by the prompt's last queries.
SOME = ["delta", "infllm", "snapkv"]


@pytest.fixture(
    scope="module",
    params=[SOME, pytest.param(METHODS, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def methods(request: pytest.FixtureRequest) -> list[str]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def found(
    model: Model, methods: list[str], tmp_path_factory: pytest.TempPathFactory
) -> EvalOutcome:
    # Half of the text: every method has room for its sinks, its window and a choice.
    path = tmp_path_factory.mktemp("lines") / "lines"
    return suite(model, path, methods, budgets="1/2", texts=1)


@pytest.mark.slow
def test_every_method_has_a_line_on_both_kinds_of_weights(
    found: EvalOutcome, methods: list[str]
) -> None:
    assert not found.refused
    assert [(line["weights"], line["method"]) for line in found.lines] == [
        (weights, name) for weights in ("trained", "random") for name in ("overlap", *methods)
    ]


@pytest.mark.slow
def test_no_selection_keeps_more_than_the_oracle(found: EvalOutcome, methods: list[str]) -> None:
    """With a key per query head: of all selections of this size, it keeps the most."""
    compared = 0
    for line in found.lines:
        if line["measured"] != "loss":
            continue
        losses = line["losses"]
        sparse = [i for i, layer in enumerate(line["layers"]) if layer not in line["dense_layers"]]
        for who in losses:
            read = [row[i] for row in losses[who]["read"] for i in sparse]
            if who == "oracle" or max(read, default=0) > line["budget"]:
                continue
            for own, best in zip(losses[who]["mass"], losses["oracle"]["mass"], strict=True):
                for layer in sparse:
                    assert own[layer] <= best[layer] + 1e-5, (line["method"], who)
                    compared += 1
    assert compared > 2 * len(methods)


def test_dense_layers_lose_nothing(found: EvalOutcome) -> None:
    for line in found.lines:
        if line["measured"] == "loss":
            dense = [i for i, layer in enumerate(line["layers"]) if layer in line["dense_layers"]]
            for loss in line["losses"].values():
                assert all(row[i] == 1 for row in loss["mass"] for i in dense)
                assert all(row[i] == 0 for row in loss["error"] for i in dense)


@pytest.mark.slow
def test_a_control_is_what_it_is_alone(model: Model, found: EvalOutcome, tmp_path: Path) -> None:
    """Controls that another method had already are copied from its line, and are the same."""
    alone = suite(model, tmp_path / "alone", ["infllm"], budgets="1/2", texts=1)
    line = next(one for one in found.lines if one["method"] == "infllm")
    again = next(one for one in alone.lines if one["method"] == "infllm")
    assert again["controls"] == line["controls"]
    for who in ("recent", "random", "oracle", METHOD):
        for what in ("mass", "error", "read"):
            for own, other in zip(
                line["losses"][who][what], again["losses"][who][what], strict=True
            ):
                assert own == pytest.approx(other, abs=1e-5)


@pytest.mark.slow
def test_what_is_stored_is_not_measured_again(model: Model, tmp_path: Path) -> None:
    path, names = tmp_path / "lines", ["streaming_llm", "quest"]
    first = suite(model, path, names[:1])
    assert (len(first.lines), first.stored) == (4, 0)
    again = suite(model, path, names, header=lambda: {"date": "tomorrow"})
    assert (len(again.lines), again.stored) == (6, 4)
    dates = [(line["method"], line["date"]) for line in again.lines]
    assert dates == [
        (name, day)
        for _ in range(2)
        for name, day in (("overlap", "today"), ("streaming_llm", "today"), ("quest", "tomorrow"))
    ]
    more = suite(model, path, names[:1], texts=TEXTS + 2)
    assert more.stored == 0
    assert [line["samples"] for line in more.lines] == [5, 5, 4, 4]


def test_what_a_model_cannot_have_is_refused_by_name(model: Model, tmp_path: Path) -> None:
    found = suite(model, tmp_path / "lines", ["quest", "streaming_llm"], budgets="2")
    assert not found.lines
    assert {line["method"] for line in found.refused} == {"overlap", "quest", "streaming_llm"}
    assert "2 must be at least one page of 4 tokens" in found.refused[0]["error"]
    with pytest.raises(ConfigError, match="no texts of so many"):
        suite(model, tmp_path / "lines", ["quest"], lengths=(LENGTH, 450))
    with pytest.raises(ConfigError, match="length 4096 is more than"):
        suite(model, tmp_path / "lines", ["quest"], lengths=(4096,))
