"""A settings file stands for a policy or a reuse method wherever one is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import keyhole
from keyhole import LLM, ConfigError, UnknownNameError
from keyhole.cache.layout import Geometry
from keyhole.cli.common.parser import Parser
from keyhole.policies import available_controls, available_policies, make_policy
from keyhole.registry import SettingsFile
from keyhole.reuse import available_reuse_methods, make_reuse
from tests.checkpoints import make_config, make_model, make_network
from tests.policies.shapes import shape

GEOMETRY: Geometry = shape(8)


def written(tmp_path: Path, content: object) -> str:
    path = tmp_path / "settings.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize("name", [*available_policies(), *available_controls()])
def test_every_policy_comes_back_as_it_was_settled(name: str, tmp_path: Path) -> None:
    policy = make_policy(name).resolve(GEOMETRY)
    path = tmp_path / "settings.json"
    SettingsFile(policy=name, settings=dataclasses.asdict(policy), num_layers=8).save(path)
    for given in (path, str(path)):
        again = make_policy(given)
        assert again == policy
        assert again.resolve(GEOMETRY) == policy


@pytest.mark.parametrize("name", list(available_reuse_methods()))
def test_every_reuse_method_comes_back_as_it_was_settled(name: str, tmp_path: Path) -> None:
    method = make_reuse(name).resolve(GEOMETRY)
    path = tmp_path / "settings.json"
    stored = SettingsFile(policy="full", reuse=name, reuse_settings=dataclasses.asdict(method))
    stored.save(path)
    assert make_reuse(path) == method
    assert make_policy(path) == make_policy("full")


def test_separate_settings_override_those_of_the_file(tmp_path: Path) -> None:
    settings = {"token_budget": 64, "full_layers": [0, 1]}
    path = written(tmp_path, {"policy": "quest", "settings": settings})
    assert make_policy(path, {"token_budget": 32}) == keyhole.Quest(
        token_budget=32, full_layers=(0, 1)
    )


def test_llm_and_the_hooks_of_transformers_load_it(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path)
    stored = {"policy": "streaming_llm", "settings": {"token_budget": 8}, "num_layers": 4}
    path = written(tmp_path, stored)
    assert LLM(folder, policy=path, device="cpu").policy == keyhole.StreamingLLM(token_budget=8)
    with keyhole.sparse(make_network(make_config("llama")), Path(path), memory="4MiB") as run:
        assert run.policy.name == "streaming_llm"


def test_a_file_for_another_depth_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, {"policy": "full", "num_layers": 32})
    with pytest.raises(ConfigError, match=r"settings\.json' is for a model of 32 layers, .* has 4"):
        LLM(make_model("llama", tmp_path), policy=path, device="cpu")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("{", "cannot read the settings file"),
        ([], "is not a settings file"),
        ({"settings": {}}, "is not a settings file"),
        ({"policy": 3}, "policy 3 must be a string"),
        ({"policy": "quest", "settings": [1]}, "settings [1] must be an object"),
        ({"policy": "quest", "settings": {"token_budget": 1.5}}, "1.5 must be a whole number"),
        ({"policy": "quest", "settings": {"token_budget": None}}, "None must be a whole number"),
        ({"policy": "quest", "settings": {"full_layers": 0}}, "full_layers 0 must be a list"),
        ({"policy": "quest", "num_layers": "8"}, "num_layers '8' must be a whole number"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_name(
    tmp_path: Path, content: object, error: str
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError) as raised:
        make_policy(path)
    assert error in str(raised.value)
    assert path in str(raised.value)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ({"policy": "qest"}, "did you mean 'quest'?"),
        ({"policy": "quest", "setings": {}}, "did you mean 'settings'?"),
        ({"policy": "quest", "settings": {"token_bugdet": 8}}, "did you mean 'token_budget'?"),
    ],
)
def test_the_nearest_name_is_offered(tmp_path: Path, content: Any, error: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(UnknownNameError) as raised:
        make_policy(path)
    assert error in str(raised.value)
    assert path in str(raised.value)


def test_a_file_that_is_not_there_and_one_without_a_reuse_method(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the settings file 'no\.json'"):
        make_policy("no.json")
    path = written(tmp_path, {"policy": "full"})
    with pytest.raises(ConfigError, match=r"settings\.json' names no reuse method"):
        make_reuse(path)
    with pytest.raises(ConfigError, match="cannot write the settings"):
        SettingsFile(policy="full").save(tmp_path)


def test_the_command_line_takes_a_file_and_flags(tmp_path: Path) -> None:
    from keyhole.cli.common import flags

    parser = Parser()
    flags.add_policy(parser)
    flags.add_reuse(parser)
    settings = {"token_budget": 64, "full_layers": [0, 1]}
    reuse = {"reuse": "epic", "reuse_settings": {"num_local": 3}}
    path = written(tmp_path, {"policy": "quest", "settings": settings} | reuse)
    arguments = parser.parse_args(("--policy", f"{path}:token_budget=128", "--reuse", path))
    policy = make_policy(arguments.policy)
    assert policy == keyhole.Quest(token_budget=128, full_layers=(0, 1))
    assert make_reuse(arguments.reuse) == keyhole.Epic(num_local=3)
