"""What users may ask the plugin for."""

from __future__ import annotations

from typing import Any

import pytest

from keyhole.errors import ConfigError, UnknownNameError
from keyhole.integrations.vllm.settings import read_settings
from keyhole.policies.delta import Delta
from keyhole.policies.quest import Quest

DELTA = {"policy": "delta", "token_budget": 512, "full_layers": [0, 1]}


def test_without_a_policy_nothing_is_asked_for() -> None:
    assert read_settings({}, {}) is None
    assert read_settings({"other": 1}, {"KEYHOLE_VLLM": ""}) is None


def test_a_policy_with_settings() -> None:
    asked = read_settings({"keyhole": DELTA}, {})
    assert asked is not None
    assert asked.make_policy() == Delta(token_budget=512, full_layers=(0, 1))


def test_settings_may_stand_behind_the_name() -> None:
    asked = read_settings({"keyhole": {"policy": "quest:token_budget=64"}}, {})
    assert asked is not None
    assert asked.make_policy() == Quest(token_budget=64)


def test_the_environment_serves_where_the_configuration_is_silent() -> None:
    environment = {"KEYHOLE_VLLM": '{"policy": "quest", "token_budget": 64}'}
    asked = read_settings({}, environment)
    assert asked is not None
    assert asked.policy == "quest"
    asked = read_settings({"keyhole": DELTA}, environment)
    assert asked is not None
    assert asked.policy == "delta"


@pytest.mark.parametrize(
    ("config", "environment", "said"),
    [
        ({"keyhole": "delta"}, {}, r"additional_config\['keyhole'\] 'delta' must be an object"),
        ({"keyhole": {"token_budget": 9}}, {}, "must be an object that names a policy"),
        ({}, {"KEYHOLE_VLLM": "delta"}, "KEYHOLE_VLLM must be a JSON object"),
        ({"keyhole": {**DELTA, "tensor_parallel_scores": "no"}}, {}, "'no' must be one of"),
    ],
)
def test_bad_settings_are_named(config: Any, environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_settings(config, environment)


@pytest.mark.parametrize("given", [{"policy": "dleta"}, {"policy": "delta", "token_budgt": 1}])
def test_unknown_names_are_refused_with_the_nearest(given: dict[str, Any]) -> None:
    asked = read_settings({"keyhole": given}, {})
    assert asked is not None
    with pytest.raises(UnknownNameError, match="did you mean"):
        asked.make_policy()
