"""The manifest for KubeRay says what Serve and Keyhole take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("ray", reason="Ray has an environment of its own: make test-ray")

from ray.serve.schema import ServeDeploySchema

from keyhole import Delta
from keyhole.integrations.ray import app
from keyhole.integrations.ray.settings import read_settings

MANIFEST = Path(__file__).parents[3] / "deploy" / "rayservice.yaml"


@pytest.fixture(scope="module")
def service() -> Any:
    found, _ = yaml.safe_load_all(MANIFEST.read_text())
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayService")
    return found["spec"]


def test_serve_takes_its_config_and_keyhole_its_settings(service: Any) -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["serveConfigV2"]))
    (application,) = config.applications
    assert application.import_path == f"{app.__module__.rpartition('.')[0]}:app"
    found = read_settings(application.args)
    assert found.policy == Delta(token_budget=1024)
    assert found.deployment["autoscaling_config"]["max_replicas"] == 4


def test_a_worker_has_resources_for_a_replica(service: Any) -> None:
    given = yaml.safe_load(service["serveConfigV2"])["applications"][0]["args"]
    cluster = service["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert int(container["resources"]["requests"]["cpu"]) >= given["num_cpus"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) >= given["num_gpus"]
    assert group["maxReplicas"] >= given["max_replicas"]
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert any(port["containerPort"] == 8000 for port in head["ports"])
