"""Flags become settings of the right types, and every setting has its flag."""

from __future__ import annotations

import argparse
from pathlib import Path

from keyhole.cli.common import flags
from keyhole.config import EngineConfig, SamplingParams
from keyhole.models.locate import TINY_FOLDER
from keyhole.server.settings import ServerConfig
from tests.cli.conftest import Run


def parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    flags.add_policy(parser)
    flags.add_settings(parser, SamplingParams, "sampling")
    flags.add_settings(parser, EngineConfig, "engine")
    return parser.parse_args(line.split())


def test_sampling_parameters_are_made_of_their_flags() -> None:
    line = "--max-tokens 7 --temperature 0.5 --stop . --stop !! --stop-token-ids 3,4 --ignore-eos"
    assert flags.sampling_of(parse(line)) == SamplingParams(
        max_tokens=7, temperature=0.5, stop=(".", "!!"), stop_token_ids=(3, 4), ignore_eos=True
    )
    assert flags.sampling_of(parse("")) == SamplingParams()
    biased = flags.sampling_of(parse("--n 3 --logit-bias 15=-100 --logit-bias 7=1.5"))
    assert biased == SamplingParams(n=3, logit_bias={15: -100.0, 7: 1.5})


def test_engine_settings_are_made_of_their_flags() -> None:
    given = flags.settings_of(parse("--memory 2MiB --no-prefix-cache --page-size 8"), EngineConfig)
    assert given == {"memory": 2 * 2**20, "prefix_cache": False, "page_size": 8}
    assert flags.settings_of(parse(""), EngineConfig) == {}


def test_the_largest_body_of_a_server_is_a_size() -> None:
    """--max-body was in bytes, unlike all other sizes: 20MiB was "not a whole number"."""
    parser = argparse.ArgumentParser()
    flags.add_settings(parser, ServerConfig, "server")
    given = flags.settings_of(parser.parse_args(["--max-body", "20MiB"]), ServerConfig)
    assert given == {"max_body": 20 * 2**20}
    assert "--max-body SIZE" in parser.format_help()
    assert "default: 10.0 MiB" in " ".join(parser.format_help().split())


def test_a_help_text_names_one_default() -> None:
    """--max-tokens had two, "as many as there is room for" and 256; no flag gives None."""
    parser = argparse.ArgumentParser()
    flags.add_settings(parser, SamplingParams, "sampling")
    flags.add_settings(parser, EngineConfig, "engine")
    found = {action.dest: action.help or "" for action in parser._actions}
    assert found["max_tokens"] == "at most this many new tokens; default: 256"
    assert found["seed"] == "the same seed gives the same tokens, in any batch"
    assert [name for name, text in found.items() if text.count("default:") > 1] == []


def test_the_bundled_model_is_known_by_its_name_and_no_other_way(run: Run) -> None:
    """`--model ""`, from an unset variable, ran it; `calibrate tiny` asked for texts of ours."""
    assert "must be a folder, a hub id" in run("generate", "x", "--model", "").err
    assert "must be a folder, a hub id" in run("calibrate", "--model", "").err
    assert "must be a folder, a hub id" in run("eval", "--model", "").err
    assert flags.has_bundled_vocabulary("tiny")
    assert flags.has_bundled_vocabulary(None)
    assert not flags.has_bundled_vocabulary("nowhere")


def test_a_model_with_the_bundled_vocabulary_has_its_tasks(tmp_path: Path) -> None:
    """A model that somebody trains by the recipe."""
    (tmp_path / "tokenizer.json").write_bytes((TINY_FOLDER / "tokenizer.json").read_bytes())
    assert flags.has_bundled_vocabulary(str(tmp_path))
    assert flags.has_bundled_vocabulary(str(TINY_FOLDER.parent / "keyhole-hops"))
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    assert not flags.has_bundled_vocabulary(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("damaged")
    assert not flags.has_bundled_vocabulary(str(tmp_path))
