"""Every pair of policy, kind of model, tier and way to a prompt works together, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.reference_pages import combinations_in
from keyhole.policies import available_policies
from tests.combinations import FAMILIES, PAGE_OF_METHODS, WAYS, Cell, Lab, cells, covering, render

PARTS = 8


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def chosen() -> list[Cell]:
    return covering(cells())


@pytest.mark.one_in(8 * PARTS)
@pytest.mark.parametrize("policy", available_policies())
@pytest.mark.parametrize("part", range(PARTS))
def test_what_works_together(lab: Lab, chosen: list[Cell], policy: str, part: int) -> None:
    """Wrong numbers fail; a refusal must be one that the table in the documents gives."""
    page = Path(__file__).parents[1] / PAGE_OF_METHODS
    known = combinations_in(page.read_text())
    mine = [cell for cell in chosen if cell.policy == policy]
    assert len(mine) >= PARTS
    for cell in mine[part::PARTS]:
        refused = lab.outcome(cell)
        if refused is not None:
            assert render({cell: refused}).splitlines()[-1].partition(" ")[2] in known


def test_the_cells_chosen_have_every_pair(chosen: list[Cell]) -> None:
    pairs = {(cell.family, cell.way) for cell in chosen}
    assert pairs == {(family, way) for family in FAMILIES for way in WAYS}
    assert Cell("quest", "MLA") in cells()
