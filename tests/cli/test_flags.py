"""Flags become settings of the right types, and every setting has its flag."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from keyhole import CacheBlend, Delta, Epic, Full, PlainReuse, Quest, SamKV, StreamingLLM
from keyhole.cli import flags
from keyhole.config import EngineConfig, SamplingParams
from keyhole.errors import ConfigError
from keyhole.policy import policies
from keyhole.policy.base import Policy
from keyhole.reuse import reuses
from keyhole.reuse.base import Reuse
from tests.cli.conftest import Run


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


def asked(line: str, *, policy: bool = True) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    if policy:
        flags.add_policy(parser)
    flags.add_reuse(parser)
    return parser.parse_args(line.split())


@pytest.mark.parametrize("policy", [True, False])
@pytest.mark.parametrize(
    ("line", "reuse"),
    [
        ("", SamKV()),
        ("--reuse sam_kv", SamKV()),
        ("--update fusion --block-size 16", SamKV(update="fusion", block_size=16)),
        ("--no-select --no-bias --no-pooled", SamKV(select=False, bias=False, pooled=False)),
        ("--stable-layers 1,2 --outlier-sigmas 2", SamKV(stable_layers=(1, 2), outlier_sigmas=2.0)),
        ("--layers a.json", SamKV(layers="a.json")),
        ("--reuse reuse --no-rotate", PlainReuse(rotate=False)),
        ("--reuse epic --num-initial 3", Epic(num_initial=3)),
        (
            "--reuse cacheblend --recompute-ratio 0.5 --check-layer 2",
            CacheBlend(recompute_ratio=0.5, check_layer=2),
        ),
    ],
)
def test_a_reuse_method_is_made_of_its_flags(line: str, reuse: Reuse, policy: bool) -> None:
    """With a policy's flags beside it, or without."""
    assert flags.reuse_of(asked(line, policy=policy)) == reuse
    if policy:
        assert flags.policy_of(asked(line)) == Full()


def test_a_flag_that_both_have_is_for_both_unless_one_is_named() -> None:
    arguments = asked("--policy delta --layers a.json")
    assert flags.policy_of(arguments) == Delta(layers="a.json")
    assert flags.reuse_of(arguments) == SamKV(layers="a.json")
    arguments = asked("--policy delta --layers a.json --reuse-layers b.json")
    assert flags.policy_of(arguments) == Delta(layers="a.json")
    assert flags.reuse_of(arguments) == SamKV(layers="b.json")
    arguments = asked("--policy delta --reuse epic --layers a.json")
    assert flags.policy_of(arguments) == Delta(layers="a.json")
    assert flags.reuse_of(arguments) == Epic()


def test_a_flag_that_neither_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy quest 'layers'"):
        flags.policy_of(asked("--policy quest --reuse epic --layers a.json"))
    with pytest.raises(ConfigError, match="reuse method epic 'layers'"):
        flags.reuse_of(asked("--reuse epic --reuse-layers a.json"))
    with pytest.raises(ConfigError, match="reuse method epic 'update'"):
        flags.reuse_of(asked("--reuse epic --update fusion"))
    with pytest.raises(ConfigError, match="--reuse-block-size 'x' must be a whole number"):
        flags.reuse_of(_with_block_size("x"))


def _with_block_size(value: str) -> argparse.Namespace:
    arguments = asked("")
    arguments.reuse_block_size = value  # as if a policy had such a setting too
    return arguments


def test_every_setting_of_every_reuse_method_has_a_flag() -> None:
    for policy in (True, False):
        known = vars(asked("", policy=policy))
        for cls in reuses().values():
            assert {field.name for field in dataclasses.fields(cls)} <= set(known)


def test_the_bundled_model_is_known_by_its_name_and_no_other_way(run: Run) -> None:
    """`--model ""`, from an unset variable, ran it; `calibrate tiny` asked for texts of ours."""
    assert "names no model" in run("generate", "x", "--model", "").err
    assert "names no model" in run("calibrate", "").err
    assert "names no model" in run("eval", "").err
    assert flags.is_bundled("tiny")
    assert flags.is_bundled(None)
    assert not flags.is_bundled("nowhere")
