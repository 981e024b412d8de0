"""What the suite measures follows from the model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from keyhole.config import EngineConfig
from keyhole.errors import ConfigError
from keyhole.eval.methods import FULL
from keyhole.eval.paper import suite
from keyhole.eval.suite import make_workloads
from keyhole.eval.tasks import make_task
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.policies import available_policies
from tests.checkpoints import make_model


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model with a tokenizer of one token per byte."""
    folder = tmp_path_factory.mktemp("reader")
    path = make_model("llama", folder, tokenizer=True, max_position_embeddings=4096)
    return load(path, device="cpu")


@pytest.mark.parametrize(
    ("most", "lengths"),
    [
        (512, (512,)),
        (4096, (4096,)),
        (10_000, (4096, 8192)),
        (131_072, (4096, 8192, 16_384, 32_768, 65_536, 131_072)),
    ],
)
def test_lengths_double_from_4k_to_what_the_model_takes(
    model: Model, most: int, lengths: tuple[int, ...]
) -> None:
    assert suite.default_lengths(dataclasses.replace(model, max_length=most)) == lengths


def test_every_method_is_asked_but_recency_and_what_the_model_cannot_have(model: Model) -> None:
    without = {"full", "sliding_window", "streaming_llm", "spe_context", "seer_attention_r"}
    assert set(suite.default_policies(model).split(",")) == set(available_policies()) - without
    with_head = dataclasses.replace(model, head=Path("somewhere"))
    assert "spe_context" in suite.default_policies(with_head).split(",")


def test_a_task_is_asked_at_the_lengths_that_it_fills(reader: Model) -> None:
    """A text that cannot grow would be the same sample at every further length."""
    asked = make_workloads([make_task("walk"), make_task("passkey")], None, reader)
    found = suite.fitting_lengths(asked, (64, 700, 4000), "prompt")
    assert found == {asked[0]: (4000,), asked[1]: (700, 4000)}
    small = dataclasses.replace(make_task("walk"), words_at_most=51)  # type: ignore[call-arg]
    (limited,) = make_workloads([small], None, reader)
    used = len(limited.shown(4000, "prompt").request.prompt)
    assert used < 2000
    with pytest.raises(ConfigError, match="no task has texts of 64, 4000 tokens"):
        suite.fitting_lengths([limited], (64, 4000), "prompt")


def test_the_grid_has_the_groups_that_can_be_filled(reader: Model) -> None:
    asked = make_workloads([make_task("walk"), make_task("passkey")], None, reader)
    grid = suite.PaperGrid(
        workloads=asked,
        lengths=(64, 700, 4000),
        lengths_of=suite.fitting_lengths(asked, (64, 700, 4000), "prompt"),
        setups=("prompt", "question"),
        methods=[FULL],
        samples=1,
        config=EngineConfig(),
    )
    found = [(one.workload.name, one.length, one.setup) for one in grid.groups()]
    places = [("walk", 4000), ("passkey", 700), ("passkey", 4000)]
    assert found == [(*place, setup) for place in places for setup in ("prompt", "question")]


def test_documents_are_asked_where_they_fit(reader: Model) -> None:
    task = make_task("multi_document_1", {"num_documents": 2})
    assert suite.document_places([task], (256, 2048), reader)[0] == [(task, 2048)]
