"""`keyhole methods` and `keyhole info`: what there is, from the methods themselves."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest

import keyhole
from keyhole.cli import about
from keyhole.policies import available_policies
from keyhole.policies.prefill import available_prefill_policies
from keyhole.reuse import available_reuse_methods
from tests.cli.conftest import Run

ROOT = Path(__file__).parents[2]
METHODS = {
    **available_policies(),
    **available_prefill_policies(),
    **available_reuse_methods(),
}


def test_every_method_has_its_line(run: Run) -> None:
    ran = run("methods")
    assert ran.status == 0
    first = [line.split()[0] for line in ran.out.splitlines() if line and not line.startswith(" ")]
    assert set(METHODS) <= set(first)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_tells_its_cost_its_use_and_its_settings(name: str, run: Run) -> None:
    ran = run("methods", name)
    assert ran.status == 0
    assert "Cost per " in ran.out
    assert "When to use it: " in ran.out
    for field in dataclasses.fields(METHODS[name]):
        assert f"\n  {field.name} (" in ran.out


@pytest.mark.parametrize(
    ("name", "setting"), [("oracle", "token_budget"), ("recent_blocks", "mass")]
)
def test_a_control_is_described_by_name(name: str, setting: str, run: Run) -> None:
    """`--policy oracle` was taken, and `keyhole methods oracle` was an unknown method."""
    ran = run("methods", name)
    assert ran.status == 0
    assert f"\n  {setting} (" in ran.out


def test_json_has_the_same(run: Run) -> None:
    found = json.loads(run("methods", "Tidal-Decode", "--json").out)["methods"]
    assert [(one["name"], one["kind"]) for one in found] == [("tidal_decode", "policy")]
    names = [one["name"] for one in found[0]["settings"]]
    assert names == [field.name for field in dataclasses.fields(METHODS["tidal_decode"])]
    assert len(json.loads(run("methods", "--json").out)["methods"]) == len(METHODS)


def test_an_example_of_settings_can_be_typed(run: Run) -> None:
    ran = run("methods", "delta")
    example = next(line for line in ran.out.splitlines() if line.startswith("Settings, as in"))
    assert example.endswith("--policy delta:token_budget=1024")


def test_info_says_versions_devices_and_folders(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    found = json.loads(run("info", "--json").out)
    assert found["versions"]["keyhole"] == keyhole.__version__
    assert set(found["devices"]) == set(found["kernels"])
    assert found["folders"]["documents"] == "/nowhere/keyhole/documents"
    ran = run("info")
    assert f"keyhole          {keyhole.__version__}" in ran.out


def test_info_lists_every_extra(run: Run) -> None:
    """It left out `bench`, `otel`, `lora`, `quantized`, `gguf`, `vllm` and `ray`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = json.loads(run("info", "--json").out)["extras"]
    assert [*extras] == [name for name in project["optional-dependencies"] if name != "dev"]
    assert extras["plot"] == extras["serve"] == "installed"


def test_info_says_how_to_install_a_missing_extra(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(about._EXTRAS, "otel", "no_such_package.of_some.exporter")
    assert 'otel        pip install "keyhole[otel]"' in run("info").out
