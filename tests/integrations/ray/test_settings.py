"""What `serve run` may say, and the one line about what it may not."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray has an environment of its own: make test-ray")

from keyhole import Delta
from keyhole.errors import KeyholeError
from keyhole.integrations.ray import app
from keyhole.integrations.ray.settings import known_settings, read_settings
from keyhole.integrations.ray.start import StartError


def test_texts_and_values_mean_the_same() -> None:
    texts = {
        "policy": "delta:token_budget=256",
        "max_batch": "4",
        "memory": "64MiB",
        "timeout": "2.5",
        "api_key": "secret",
        "num_replicas": "2",
        "num_gpus": "0.5",
        "placement_group_bundles": "[{CPU: 1}, {CPU: 2}]",
    }
    values = texts | {
        "policy": {"name": "delta", "token_budget": 256},
        "max_batch": 4,
        "memory": 64 * 2**20,
        "timeout": 2.5,
        "api_key": ["secret"],
        "num_replicas": 2,
        "num_gpus": 0.5,
        "placement_group_bundles": [{"CPU": 1}, {"CPU": 2}],
    }
    found = read_settings(texts)
    assert found == read_settings(values)
    assert found.policy == Delta(token_budget=256)
    assert found.engine == {"max_batch": 4, "memory": 64 * 2**20}
    assert found.server == {"timeout": 2.5, "api_key": ("secret",)}
    assert found.deployment == {
        "num_replicas": 2,
        "max_ongoing_requests": 8,
        "placement_group_bundles": [{"CPU": 1}, {"CPU": 2}],
        "ray_actor_options": {"num_gpus": 0.5},
    }


def test_auto_scales_by_the_requests_that_a_replica_has() -> None:
    given = {"num_replicas": "auto", "max_replicas": "3", "max_batch": "5"}
    found = read_settings(given | {"autoscaling_config": "{upscale_delay_s: 1}"}).deployment
    assert found["autoscaling_config"] == {
        "max_replicas": 3,
        "target_ongoing_requests": 5,
        "upscale_delay_s": 1,
    }
    assert "num_replicas" not in found


def test_keys_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYHOLE_API_KEYS", "one, two")
    assert read_settings({"api_key": "zero"}).server_config().api_key == ("zero", "one", "two")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"polcy": "delta"}, "unknown setting 'polcy'; did you mean 'policy'?"),
        ({"policy": "detla"}, "unknown policy 'detla'; did you mean 'delta'?"),
        ({"policy": {"name": "delta", "budget": 3}}, "unknown setting of policy delta 'budget'"),
        ({"policy": {"token_budget": 3}}, "must have a name, such as delta"),
        ({"model": "no/where"}, "unknown model 'no/where'"),
        ({"max_batch": "0"}, "max_batch 0 must be at least 1"),
        ({"max_batch": "many"}, "max_batch 'many' must be a whole number"),
        ({"memory": "much"}, "memory 'much' is not a size"),
        ({"timeout": "0"}, "timeout 0.0 must be a number of seconds above 0"),
        ({"documents_limit": "x"}, "documents_limit 'x' is not a size"),
        ({"port": "80"}, "port is a setting of Ray Serve; set it in Serve's http_options"),
        ({"num_replicas": "0"}, "num_replicas 0 must be auto, or a number of at least 1"),
        ({"num_replicas": "some"}, "num_replicas 'some' must be auto"),
        ({"max_replicas": "3"}, "max_replicas needs num_replicas=auto, not 1"),
        ({"num_gpus": "-1"}, "num_gpus '-1' must be a number of at least 0"),
        ({"num_gpus": "[1"}, "num_gpus '[1' must be a value in YAML or JSON"),
        ({"max_ongoing_requests": "0"}, "max_ongoing_requests '0' must be a whole number"),
        ({"ray_actor_options": "gpu"}, "ray_actor_options 'gpu' must be a mapping"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(given: dict[str, Any], says: str) -> None:
    with pytest.raises(StartError) as told:
        app(given)
    assert says in told.value.message
    assert "\n" not in told.value.message
    assert isinstance(told.value, KeyholeError)


def test_every_setting_has_a_help_text() -> None:
    assert all(known_settings().values())
