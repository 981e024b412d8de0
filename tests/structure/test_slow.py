"""What `make test` leaves out, and `make test-all` runs."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import changed
from tests.conftest import pytest_collection_modifyitems as choose

ROOT = Path(__file__).parents[2]


@dataclass
class Item:
    """As much of a test with parameters as the choice looks at."""

    ids: tuple[str, ...]
    n: int | None
    originalname: str = "test"
    path: Path = ROOT
    slow: list[str] = field(default_factory=list)

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(_idlist=list(self.ids))

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        given = {"one_in": self.n, "slow": True if self.slow else None}[name]
        return None if given is None else SimpleNamespace(args=(given,))

    def add_marker(self, name: str) -> None:
        self.slow.append(name)


@pytest.mark.parametrize(("sizes", "n"), [((5, 14), 3), ((4, 4, 2), 4), ((3, 3), 2), ((7,), 3)])
def test_one_in_n_cases_stay_with_every_value_of_each_list(sizes: tuple[int, ...], n: int) -> None:
    lists = ([f"{axis}{i:02}" for i in range(size)] for axis, size in enumerate(sizes))
    items = [Item(ids, n) for ids in itertools.product(*lists)]
    choose(items[::-1])
    kept = [item for item in items if not item.slow]
    assert {tuple(item.slow) for item in items} == {(), ("slow",)}
    assert len(kept) == pytest.approx(len(items) / n, abs=2)
    if len(sizes) > 1:
        everywhere, here = (
            [set(ids) for ids in zip(*(item.ids for item in some), strict=True)]
            for some in (items, kept)
        )
        assert here == everywhere


def kept(*sizes: int, n: int, name: str = "test", slow: int | None = None) -> list[tuple[str, ...]]:
    """What stays of a cross of lists of these lengths, of which one case may be slow anyway."""
    lists = ([f"{axis}{i:02}" for i in range(size)] for axis, size in enumerate(sizes))
    items = [Item(ids, n, name) for ids in itertools.product(*lists)]
    if slow is not None:
        items[slow].add_marker("slow")
    choose(items)
    return [item.ids for item in items if not item.slow]


@pytest.mark.parametrize(("sizes", "n"), [((2, 3), 6), ((3, 3), 9), ((7, 13), 21), ((3,), 5)])
def test_n_may_be_above_the_length_of_every_list(sizes: tuple[int, ...], n: int) -> None:
    assert 1 <= len(kept(*sizes, n=n)) <= 1 + math.prod(sizes) / n


def test_other_tests_keep_other_cases() -> None:
    names = [f"test_{i}" for i in range(40)]
    assert {case for name in names for case in kept(5, 4, n=4, name=name)} == set(kept(5, 4, n=1))
    assert kept(5, 4, n=4, name="test_1") == kept(5, 4, n=4, name="test_1")


def test_a_case_that_is_slow_anyway_is_none_that_stays() -> None:
    for name in ("test_1", "test_2", "test_3"):
        assert len(kept(2, n=2, name=name, slow=1)) == 1


def test_tests_without_the_mark_stay() -> None:
    items = [Item((str(i),), None) for i in range(5)]
    choose(items)
    assert not any(item.slow for item in items)


def test_two_targets_have_all_tests_between_them() -> None:
    lines = (ROOT / "Makefile").read_text()
    assert re.findall(r"PYTEST\) -m (.*)", lines) == ['"not slow"', '"slow or hypothesis"']
    script = (ROOT / ".ci" / "run").read_text()
    assert "for target in test test-all; do" in script


def test_a_change_has_the_tests_that_import_it_or_mirror_its_path() -> None:
    importers = {"keyhole.planner": {"tests/cli/test_plan.py", "tests/checkpoints.py"}}
    assert changed.tests_of("keyhole/planner.py", importers) == {
        "tests/cli/test_plan.py",
        "tests/test_planner.py",
    }
    quest = changed.tests_of("keyhole/policies/quest.py", {})
    assert {"tests/policies/test_quest.py", "tests/policies/test_conformance.py"} <= quest
    assert changed.tests_of("tests/engine/conftest.py", {}) == {"tests/engine"}
    assert changed.tests_of("keyhole/kernels/csrc/attend.cpp", {}) == {"tests/kernels"}
    assert changed.tests_of("keyhole/eval/nothing_like_it.py", {}) == {"tests/eval"}
    assert changed.tests_of("LICENSE", {}) == set()


def test_public_names_lead_to_their_modules(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("from keyhole import Quest\nimport keyhole.planner\n")
    assert {"keyhole.policies.quest", "keyhole.planner"} <= set(changed.imported(file))
