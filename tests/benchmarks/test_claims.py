"""The benchmarks behind docs/results/."""

from __future__ import annotations

import pytest

import keyhole
from benchmarks import adaptive_layers, claims
from benchmarks.paper import placements
from benchmarks.results_page.controls import FILES, TASKS
from keyhole.cli import build_parser
from keyhole.models.loading import load
from keyhole.policies import available_policies


@pytest.mark.parametrize("name", claims.PARTS)
def test_every_command_can_be_read(name: str) -> None:
    commands = claims.PARTS[name].commands(FILES[name])
    assert len({tuple(command) for command in commands}) == len(commands)
    for command in commands:
        arguments = build_parser().parse_args(command[1:])
        assert arguments.tasks in TASKS
        assert arguments.output == f"benchmarks/results/{FILES[name]}"


def test_equal_and_tuned_terms_have_three_lengths_and_budgets_and_every_method() -> None:
    for name in ("equal", "tuned"):
        part = claims.PARTS[name]
        asked = dict(zip(part.flags[::2], part.flags[1::2], strict=True))
        assert len(asked["--budgets"].split(",")) == 3
        assert set(asked["--policies"].split(",")) == set(available_policies()) - {"full"}
        assert any(len(lengths) == 3 for lengths in part.places.values())
    assert claims.SAMPLES >= 100


@pytest.mark.slow
def test_a_second_selection_layer_serves_those_behind_it() -> None:
    found = placements.run(load("tiny-hops", "cpu"), "walk2", 384, 1, 8)
    assert set(found["placed"]) == {"shift", "mass", "error"}
    assert set(found["placed"].values()) <= set(claims.SELECTION_LAYERS)
    served = [(1, 2), (1, 3), (4, 5), (4, 6), (4, 7)]
    for name, kept in (("mass", "recall"), ("error", "error")):
        mean = sum(found[kept][chooser][layer] for chooser, layer in served) / len(served)
        # A measurement is stored with four digits, so each term is off by 5e-5 at most.
        assert found["costs"]["4"][name] == pytest.approx(mean, abs=1e-4)
    shifts = found["shift"][2:]
    assert found["placed"]["shift"] == 2 + shifts.index(max(shifts))


@pytest.mark.slow
def test_adaptive_and_full_offloading_give_the_same_tokens() -> None:
    found = adaptive_layers.run(load(keyhole.tiny(), "cpu"), 256, 2, 48, 0.5)
    assert [part["lengths"][0] < part["lengths"][1] for part in found] == [True] * 4
    below = [part["offloaded_layers"] for part in found]
    assert below[0][0] < below[-1][1]
    first = found[0]["moved_bytes"]
    assert first["adaptive"] < first["all below"]
