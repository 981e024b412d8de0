"""`keyhole models`: which families run, and why others do not."""

from __future__ import annotations

import json
import sys

import pytest
from transformers.utils import logging

from keyhole import exactness_gate
from keyhole.cli import main


def test_a_line_for_each_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "gpt2", "bert"]) == 0
    exact, refused, closing = capsys.readouterr().out.splitlines()
    assert exact.split() == ["gpt2", "exact"]
    assert refused.startswith("bert")
    assert "is an encoder" in refused
    assert closing == "1 of 2 families are exact"


def test_an_object_for_each_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "gpt2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["family"], found["exact"], found["reason"]) == ("gpt2", True, None)
    assert 0 <= found["error"] < 1e-4


def test_what_transformers_says_about_a_default_config_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its warnings about token ids beyond the vocabulary stood among the lines of the list."""
    levels = []

    def config(**_: object) -> object:
        levels.append(logging.get_verbosity())
        raise ValueError

    monkeypatch.setitem(exactness_gate.CONFIG_MAPPING._extra_content, "gpt2", config)
    assert main(["models", "gpt2"]) == 0
    assert levels == [logging.ERROR]
    assert logging.get_verbosity() != logging.ERROR


def test_an_unknown_family_is_refused_before_others_are_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A wrong name at the end of a list was found after all others had been measured."""
    assert main(["models", "gpt2", "gtp2"]) == 2
    shown = capsys.readouterr()
    assert "unknown family 'gtp2'; did you mean 'gpt2'?" in shown.err
    assert shown.out == ""


def test_the_first_load_of_a_family_says_so_on_a_terminal(
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    exactness_gate._stored.cache_clear()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for said in (True, False):
        assert main(["generate", "x", "--model", "tiny", "--max-tokens", "1"]) == 0
        assert ("family llama: exact" in capsys.readouterr().err) == said
