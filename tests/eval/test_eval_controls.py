"""Controls keep exactly the dense layers, sinks and budget of their method: by what layers read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from keyhole.eval.methods import controls_of
from keyhole.eval.policy_trace import Trace, Traced
from keyhole.models.model import Model
from keyhole.policies import available_policies, make_policy
from keyhole.policies.base import Policy
from tests.checkpoints import make_model
from tests.policies.models import VOCAB, prompt, with_head
from tests.policies.recording import PAGE, forced, make_engine, run

BUDGET = 24
#: Settings for small pages, for every policy that has one of that name.
SMALL = {"token_budget": BUDGET, "sink_size": 6}
NAMES = [
    name for name, cls in available_policies().items() if "token_budget" in cls.__dataclass_fields__
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("model")
    fields = {"num_hidden_layers": 8, "vocab_size": VOCAB}
    return with_head(make_model("llama_group3", folder, **fields))


def resolved(name: str, model: Model) -> Policy:
    known = available_policies()[name].__dataclass_fields__
    return make_policy(name, {k: v for k, v in SMALL.items() if k in known}).resolve(
        model.geometry(PAGE)
    )


def traced(model: Model, policy: Policy) -> Trace:
    watching = Traced(policy, Trace())
    engine = make_engine(model, watching)
    forced(engine, prompt(60), prompt(12))
    run(engine)
    return watching.trace


def dense_in(trace: Trace) -> tuple[int, ...]:
    """The layers that read everything in every step."""
    return tuple(
        layer
        for layer in trace.layers
        if all(bool(step.tokens(layer).all()) for step in trace.steps)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_dense_layers_of_a_method_are_those_that_read_everything(name: str, model: Model) -> None:
    """Every control goes by what the method says of itself."""
    policy = resolved(name, model)
    settings = dataclasses.asdict(policy)
    if settings.get("prompt_in_budget") is False:  # what is generated is still within the budget
        policy = dataclasses.replace(policy, token_budget=8)
    assert dense_in(traced(model, policy)) == policy.dense_layers(model.geometry(PAGE))


@pytest.mark.slow
@pytest.mark.parametrize("control", ["recent", "random", "oracle"])
@pytest.mark.parametrize("name", NAMES)
def test_a_control_reads_what_its_method_may(name: str, control: str, model: Model) -> None:
    geometry, policy = model.geometry(PAGE), resolved(name, model)
    sinks = dataclasses.asdict(policy).get("sink_size") or 0
    dense = policy.dense_layers(geometry)
    trace = traced(model, controls_of(policy, geometry)[control])
    assert dense_in(trace) == dense
    sparse = [layer for layer in trace.layers if layer not in dense]
    assert sparse
    for step in trace.steps:
        length = int(step.lengths[0])
        for layer in sparse:
            read = step.tokens(layer)
            assert (read.sum(1) == BUDGET).all()
            assert read[:, -1].all()
            if control != "oracle":
                assert read[:, :sinks].all()
            if control == "recent":
                assert read[:, length - BUDGET + sinks :].all()


@pytest.mark.slow
def test_random_draws_go_by_their_seed(model: Model) -> None:
    geometry, policy = model.geometry(PAGE), resolved("quest", model)
    one, other = (controls_of(policy, geometry, seed)["random"] for seed in (1, 2))
    tokens = [traced(model, each).steps[0].tokens(7).tolist() for each in (one, other, one)]
    assert tokens[0] == tokens[2] != tokens[1]


def test_full_attention_has_no_controls(model: Model) -> None:
    assert controls_of(make_policy("full"), model.geometry(PAGE)) == {}


def test_a_policy_of_others_gets_controls_by_its_settings(model: Model) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(Policy):
        name = "mine"
        token_budget: int = 32

        def dense_layers(self, geometry: Any) -> tuple[int, ...]:
            return (3,)

    found = controls_of(Mine(), model.geometry(PAGE))
    assert {name: dataclasses.asdict(one) for name, one in found.items()} == {
        "recent": {"token_budget": 32, "sink_size": 0, "full_layers": (3,)},
        "random": {"token_budget": 32, "sink_size": 0, "full_layers": (3,), "seed": 0},
        "oracle": {"token_budget": 32, "full_layers": (3,)},
    }
