"""Results say who was repeated as CUDA graphs; ours that should have been are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.offload.loading import ForcedText, Loading
from benchmarks.offload.run import together
from benchmarks.paper.page import section
from keyhole.bench import measure, model
from keyhole.bench.measure import NotRecordedError, checked, launches
from keyhole.bench.settings import DecodeSettings
from keyhole.bench.systems import Baseline, BaselineCache, KeyholeSystem, Pages
from keyhole.engine import engine as core
from keyhole.engine.cuda_graph_runner import Work
from keyhole.policies.delta import Delta
from tests.engine.run_again import RunAgain

CONTEXT, STEPS = 64, 12
CUDA = torch.device("cuda")


class Refuses(RunAgain):
    """A GPU on which no graph can be captured."""

    def record(self, work: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture(scope="module")
def weights() -> model.Weights:
    asked = DecodeSettings(
        contexts=(CONTEXT,), shape="smoke", dtype="float32", layers=4, device="cpu"
    )
    return model.make_weights(asked)


@pytest.fixture
def texts(weights: model.Weights) -> list[list[int]]:
    return model.prompts(weights.keyhole, 2, CONTEXT, 3)[0]


def ours(weights: model.Weights, texts: list[list[int]]) -> KeyholeSystem:
    """Of a policy that selects, over a cache that is filled."""
    pages = Pages(weights.keyhole, ["quest"], 2, CONTEXT, STEPS, token_budget=32)
    pages.fill(model.RandomKV(weights.keyhole, 2, CONTEXT))
    pages.know(texts)
    return pages.systems[0]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunAgain]:
    recorder = RunAgain()
    monkeypatch.setattr(core, "make_recorder", lambda _: recorder)
    return recorder


def test_only_steps_that_count_are_reported(
    weights: model.Weights, texts: list[list[int]], recorder: RunAgain
) -> None:
    system = ours(weights, texts)
    recorder.cache = system.engine.cache
    system.logits(texts, [3, 4, 5])
    before = system.engine.replayed_steps
    assert before == 3
    system.start(texts, 4)
    for _ in range(4):
        system.step()
    assert system.cost()["launches"] == launches(3, None)  # the first one ends the prompt
    assert checked("quest", system.engine, before, CUDA) == launches(3, None)


def test_one_that_gave_up_is_refused_on_a_gpu(
    weights: model.Weights, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of steps launched one by one were stored as if they had been repeated."""
    monkeypatch.setattr(core, "make_recorder", lambda _: Refuses())
    system = ours(weights, texts)
    system.start(texts, 4)
    system.step()  # ends the prompt
    with pytest.warns(RuntimeWarning, match="cannot be recorded"):
        system.step()
    assert system.cost()["launches"]["why_not"].startswith("operation not permitted")  # on a CPU
    with pytest.raises(NotRecordedError, match=r"quest: 0 steps .* operation not permitted"):
        checked("quest", system.engine, 0, CUDA)


def test_one_without_a_recorder_is_refused_on_a_gpu(
    weights: model.Weights, texts: list[list[int]]
) -> None:
    system = ours(weights, texts)
    with pytest.raises(NotRecordedError, match="there are no CUDA graphs"):
        checked("quest", system.engine, 0, CUDA)
    assert checked("quest", system.engine, 0, torch.device("cpu"))["replayed_steps"] == 0


def test_one_of_which_no_step_was_repeated_is_refused(
    weights: model.Weights, texts: list[list[int]], recorder: RunAgain
) -> None:
    system = ours(weights, texts)
    recorder.cache = system.engine.cache
    assert system.engine.why_not_replayed is None
    with pytest.raises(NotRecordedError, match="no step was of a kind"):
        checked("quest", system.engine, 0, CUDA)


def test_steps_that_cannot_be_captured_are_reported_and_not_refused(
    weights: model.Weights, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "a test"
    engine = ours(weights, texts).engine
    monkeypatch.setattr(type(engine.policy), "capturable", reason)
    assert checked("quest", engine, 0, CUDA) == launches(0, reason)


def test_an_engine_without_graphs_by_request_is_not_refused(
    weights: model.Weights, texts: list[list[int]]
) -> None:
    policy = Delta(token_budget=32)
    with Loading(None, weights.keyhole, policy, None, "", graphs=False) as system:
        system.start(ForcedText(prompt=texts[0], answer=[1, 2]))
        assert system.launches("resident") == launches(0, "graphs=False")
        assert checked("resident", system.engine, 0, CUDA) == launches(0, "graphs=False")


def test_peers_say_what_they_do(
    weights: model.Weights, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    past = BaselineCache("in_place", weights.keyhole, CONTEXT, STEPS)
    past.fill(model.RandomKV(weights.keyhole, 2, CONTEXT))
    peer = Baseline("torch_flash", weights, past, CONTEXT)
    peer.start(texts, 2)
    peer.step()
    peer.rest()
    assert peer.cost()["launches"] == launches(0, measure.THEIRS)
    captured: Any = peer._same_step
    monkeypatch.setattr(peer, "_captured", captured)
    peer.step()
    assert peer.cost()["launches"] == launches(1, None)


def test_measurements_of_one_system_are_put_together() -> None:
    assert together([launches(3, None), launches(4, None)]) == launches(7, None)
    assert together([launches(3, None), launches(0, "b"), launches(0, "c")]) == launches(3, "b")


def test_the_page_names_who_was_repeated() -> None:
    line = {
        "headline": "delta_figure_4",
        "small": False,
        "machine": {"device": "NVIDIA"},
        "unit": "tokens/s",
        "speeds": {"delta": 2.0, "full": 1.0},
        "results": [
            {"system": "delta", "launches": launches(9, None)},
            {"system": "transformers_sdpa", "launches": launches(0, measure.THEIRS)},
        ],
        "bars": [],
        "versions": {"torch": "2", "transformers": "5"},
        "date": "2026-11-22",
        "commit": "abc",
        "command": "python",
        "note": "",
    }
    assert "Steps as CUDA graphs: `delta`." in section([line])[-1]
