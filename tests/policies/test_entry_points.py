"""A policy of another package, found by its entry point, and ones that cannot be loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import keyhole
from keyhole import LLM, ConfigError, UnknownNameError, registry
from keyhole.policies import make_policy
from tests.checkpoints import make_model

Install = Callable[..., None]

CODE = '''
from dataclasses import dataclass

from keyhole import Policy, kernels
from keyhole.config import setting


@dataclass(frozen=True, kw_only=True)
class LastFew(Policy):
    """The newest tokens."""

    name = "last_few"
    few: int = setting(5, "how many")

    def select(self, layer, query, step):
        return kernels.recent_indices(step.lengths, self.few)


class Foreign:
    pass


five = 5
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """install(entry, ...) makes a distribution "elsewhere" with these entry points."""

    def install(*entries: str) -> None:
        site = tmp_path / "site"
        info = site / "elsewhere-1.0.dist-info"
        info.mkdir(parents=True)
        (site / "elsewhere_policies.py").write_text(CODE)
        (site / "elsewhere_raises.py").write_text("raise RuntimeError('not today')")
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(["[keyhole.policies]", *entries]) + "\n")
        monkeypatch.syspath_prepend(site)

    return install


def test_it_is_found_by_its_name_and_runs(install: Install, tmp_path: Path) -> None:
    install("last_few = elsewhere_policies:LastFew")
    assert list(keyhole.available_policies())[-1] == "last_few"
    assert make_policy("last_few", {"few": 3}) == keyhole.available_policies()["last_few"](few=3)
    llm = LLM(make_model("llama", tmp_path), policy="last_few", memory="4MiB")
    result = llm.generate({"prompt_token_ids": list(range(3, 33))})
    assert llm.policy.name == "last_few"
    assert result.stats.attended_fraction is not None
    assert 0 < result.stats.attended_fraction < 0.2


def test_ours_cannot_be_replaced(install: Install) -> None:
    install("delta = elsewhere_policies:LastFew")
    assert keyhole.available_policies()["delta"] is keyhole.Delta


@pytest.mark.parametrize(
    "place",
    [
        "no_such_module:Policy",
        "elsewhere_policies:NoSuchClass",
        "elsewhere_policies:Foreign",
        "elsewhere_policies:five",
        "elsewhere_policies",
        "elsewhere_raises:LastFew",
    ],
)
def test_one_that_cannot_be_loaded_is_named(install: Install, place: str) -> None:
    """An error of its own while it was imported, such as a SyntaxError, was not caught."""
    install(f"broken = {place}")
    with pytest.raises(ConfigError, match=f"'broken'.*{place}"):
        make_policy("broken")
    with pytest.raises(ConfigError, match=f"'broken'.*{place}"):
        keyhole.available_policies()


def test_a_broken_one_does_not_stand_in_the_way_of_others(install: Install) -> None:
    """Every `LLM`, even a dense one, failed when any installed package had a broken entry point."""
    install("broken = no_such_module:Policy")
    assert make_policy(None) == keyhole.Full()
    assert make_policy("quest", {"token_budget": 32}) == keyhole.Quest(token_budget=32)


def test_it_is_named_when_its_name_is_misspelt(install: Install) -> None:
    install("last_few = elsewhere_policies:LastFew")
    with pytest.raises(UnknownNameError, match="did you mean 'last_few'"):
        make_policy("last_fw")
    with pytest.raises(UnknownNameError, match="did you mean 'few'"):
        make_policy("last_few", {"fwe": 3})


def test_packages_are_read_once(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each use of a policy's name read the metadata of every installed package: 10 ms a request."""
    install("last_few = elsewhere_policies:LastFew")
    reads = []
    found = registry.entry_points
    monkeypatch.setattr(registry, "entry_points", lambda **given: reads.append(0) or found(**given))
    for _ in range(3):
        assert make_policy("last_few", {"few": 3}).name == "last_few"
        assert "last_few" in keyhole.available_policies()
    assert len(reads) == 1
