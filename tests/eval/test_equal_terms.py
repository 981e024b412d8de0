"""Equal terms: every method that can have them has exactly these, and the others are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from keyhole.errors import ConfigError, UnknownNameError
from keyhole.eval import methods
from keyhole.eval.methods import (
    BY_DEFINITION,
    SELECTION_LAYERS,
    UnequalTermsError,
    check_dense,
    default_dense,
    default_window,
    equal_terms,
)
from keyhole.policies import available_policies
from keyhole.policies.base import Policy
from tests.policies.shapes import shape

GEOMETRY = shape(12)
TERMS: dict[str, Any] = {"budget": 256, "dense": (0, 1, 2), "sinks": 16, "window": 64}
#: They evict from all layers at once, or choose by the prompt alone.
UNEQUAL = {"raas": "full_layers", "r_kv": "full_layers", "snapkv": "sink_size"}
NAMES = [name for name in available_policies() if name not in ("full", *UNEQUAL)]


@pytest.mark.parametrize("name", NAMES)
def test_all_methods_have_the_same_dense_layers_sinks_window_and_budget(name: str) -> None:
    made = equal_terms(name, GEOMETRY, **TERMS)
    assert made.dense_layers(GEOMETRY) == (0, 1, 2)
    assert made.outside_budget() == ""
    settings = dataclasses.asdict(made)
    assert settings["token_budget"] == 256
    lacks = BY_DEFINITION.get(name, {})
    if "sink_size" not in lacks:
        assert settings["sink_size"] == 16
    if "window_size" not in lacks:
        assert settings.get("window_size") == 64 or settings["recent_pages"] == 4
    choosing = [settings[setting] for setting in SELECTION_LAYERS if setting in settings]
    assert choosing in ([], [(2,)])


def test_one_dense_layer_is_enough_for_a_method_with_selection_layers() -> None:
    for name in ("delta", "tidal_decode", "omnikv"):
        made = equal_terms(name, GEOMETRY, 256, (0,), 16, 64)
        assert made.dense_layers(GEOMETRY) == (0,)
        with pytest.raises(UnequalTermsError, match=f"{name} selects in a dense layer"):
            equal_terms(name, GEOMETRY, 256, (), 16, 64)


def test_layers_before_the_first_selection_layer_must_be_in_the_dense_set() -> None:
    with pytest.raises(UnequalTermsError, match=r"everything in layers \(0, 1, 2\), not in \(2,\)"):
        equal_terms("delta", GEOMETRY, 256, (2,), 16, 64)
    assert equal_terms("quest", GEOMETRY, 256, (2,), 16, 64).dense_layers(GEOMETRY) == (2,)


@pytest.mark.parametrize("name", UNEQUAL)
def test_a_method_that_cannot_have_the_terms_is_refused(name: str) -> None:
    with pytest.raises(UnequalTermsError, match=f"{name} has no setting {UNEQUAL[name]}"):
        equal_terms(name, GEOMETRY, **TERMS)


def test_other_settings_are_kept_but_none_that_the_terms_say() -> None:
    made = equal_terms("clusterkv", GEOMETRY, **TERMS, settings={"cluster_size": 8})
    assert dataclasses.asdict(made)["cluster_size"] == 8
    with pytest.raises(ConfigError, match="quest:sink_size 4 must be left out"):
        equal_terms("quest", GEOMETRY, **TERMS, settings={"sink_size": 4})
    with pytest.raises(UnknownNameError, match="did you mean 'quest'"):
        equal_terms("qest", GEOMETRY, **TERMS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Theirs(Policy):
    """A policy of another package."""

    name = "theirs"
    token_budget: int = 64
    full_layers: tuple[int, ...] = ()
    sink_size: int = 0
    recent_pages: int = 1
    beside: str = ""

    def dense_layers(self, geometry: Any) -> tuple[int, ...]:
        return self.full_layers

    def outside_budget(self) -> str:
        return self.beside


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoSinks(Policy):
    name = "no_sinks"
    token_budget: int = 64
    full_layers: tuple[int, ...] = ()
    window_size: int = 1


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"theirs": Theirs, "no_sinks": NoSinks}
    monkeypatch.setattr(methods, "available_policies", lambda: known)
    monkeypatch.setattr(methods, "make_policy", lambda name, given: known[name](**given))


def test_a_policy_of_another_package_is_set_up_by_the_names_of_its_settings(theirs: None) -> None:
    made = equal_terms("theirs", GEOMETRY, **TERMS | {"window": 33})
    assert made == Theirs(token_budget=256, full_layers=(0, 1, 2), sink_size=16, recent_pages=3)
    with pytest.raises(UnequalTermsError, match="no_sinks has no setting sink_size"):
        equal_terms("no_sinks", GEOMETRY, **TERMS)


def test_methods_that_read_outside_their_budget_are_refused(theirs: None) -> None:
    with pytest.raises(UnequalTermsError, match="theirs reads outside its budget: all of it"):
        equal_terms("theirs", GEOMETRY, **TERMS, settings={"beside": "all of it"})


def test_defaults() -> None:
    assert default_dense(GEOMETRY) == (0, 1)
    assert default_dense(shape(8, full=(2, 5, 7))) == (2, 5)
    assert [default_window(budget, 16) for budget in (16, 64, 100, 256)] == [16, 16, 16, 64]
    assert check_dense((3, 1, 1), GEOMETRY) == (1, 3)
    for wrong in ((12,), (-1,), ("a",)):
        with pytest.raises(ConfigError, match="full-attention layers, of"):
            check_dense(wrong, GEOMETRY)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="full-attention layers"):
        check_dense((0,), shape(4, full=(1, 3)))
