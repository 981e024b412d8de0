"""Flags become settings of the right types, and every setting has its flag."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from keyhole import Delta, Full, Quest, StreamingLLM
from keyhole.cli import flags
from keyhole.config import EngineConfig, SamplingParams
from keyhole.policy import policies
from keyhole.policy.base import Policy


def parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    flags.add_policy(parser)
    flags.add_settings(parser, SamplingParams, "sampling")
    flags.add_settings(parser, EngineConfig, "engine")
    return parser.parse_args(line.split())


@pytest.mark.parametrize(
    ("line", "policy"),
    [
        ("", Full()),
        ("--policy delta", Delta()),
        (
            "--policy delta --token-budget 256 --full-layers 0,1 --delta-layers 2,",
            Delta(token_budget=256, full_layers=(0, 1), delta_layers=(2,)),
        ),
        ("--policy delta --layers a.json", Delta(layers="a.json")),
        ("--policy quest --full-layers=", Quest(full_layers=())),
        ("--policy streaming_llm --sink-size 8", StreamingLLM(sink_size=8)),
    ],
)
def test_a_policy_is_made_of_its_flags(line: str, policy: Policy) -> None:
    assert flags.policy_of(parse(line)) == policy


def test_sampling_parameters_are_made_of_their_flags() -> None:
    line = "--max-tokens 7 --temperature 0.5 --stop . --stop !! --stop-token-ids 3,4 --ignore-eos"
    assert flags.sampling_of(parse(line)) == SamplingParams(
        max_tokens=7, temperature=0.5, stop=(".", "!!"), stop_token_ids=(3, 4), ignore_eos=True
    )
    assert flags.sampling_of(parse("")) == SamplingParams()


def test_engine_settings_are_made_of_their_flags() -> None:
    given = flags.settings_of(parse("--memory 2MiB --no-prefix-cache --page-size 8"), EngineConfig)
    assert given == {"memory": 2 * 2**20, "prefix_cache": False, "page_size": 8}
    assert flags.settings_of(parse(""), EngineConfig) == {}


def test_every_setting_of_every_policy_has_a_flag() -> None:
    known = vars(parse(""))
    for cls in policies().values():
        assert {field.name for field in dataclasses.fields(cls)} <= set(known)
