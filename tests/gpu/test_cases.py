"""The cases of the tests for a GPU can be built and run a few steps where there is none.

A mistake in a case itself, such as a policy that the model lacks something for, is found here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from keyhole.models.loading import load
from keyhole.models.model import Model
from tests.gpu import test_device, test_graphs
from tests.policies.recording import forced_logits, make_engine


@pytest.fixture(scope="module", params=test_device.KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    return load(test_device.checkpoint(request.param, folder), "cpu", "float32")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", test_device.POLICIES)
def test_every_policy_decodes_with_every_kind_of_model(model: Model, name: str) -> None:
    prompt, given = test_device.TEXTS[1]  # longer than the budget
    logits = forced_logits(model, test_device.small(name), prompt, given[:2])
    assert len(logits) == 3
    assert logits.isfinite().all()


def test_engines_whose_steps_are_recorded_are_built(tmp_path: Path) -> None:
    model = load(test_device.checkpoint("llama", tmp_path), "cpu", "float32")
    policies = [test_graphs.small(name) for name in test_graphs.POLICIES]
    for policy in policies + test_graphs.MORE:
        engine = make_engine(model, policy, max_batch=4, prefill_chunk=256)
        assert engine.policy.capturable is True
    for name in test_graphs.BELOW:
        settings = test_graphs.below(model, name, tmp_path)
        assert make_engine(model, test_graphs.small(name), **settings).offloader is not None
