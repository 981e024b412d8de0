"""Means, intervals and verdicts of made-up lines, and how tables show them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks.results_page.text import written
from keyhole.cli.common.terminal import PAGE
from keyhole.eval.attention import pictures, tables

LAYERS = [0, 2, 3]


def loss(error: float, read: float = 64, spread: float = 0.0) -> dict[str, list[list[float]]]:
    """Of four texts; layer 0 is dense."""
    errors = [[0.0, error + spread * (i % 2), error] for i in range(4)]
    return {
        "mass": [[1.0, 1 - error, 1 - error]] * 4,
        "error": errors,
        "read": [[512.0, read, read]] * 4,
    }


def line(method: str, weights: str = "trained", **more: Any) -> dict[str, Any]:
    own = {
        "suite": "attention",
        "measured": "loss",
        "model": "made-up",
        "texts": "numbers",
        "weights": weights,
        "length": 512,
        "budget": 64,
        "terms": "given",
        "samples": 4,
        "layers": LAYERS,
        "policy": method,
        "method": method,
        "dense_layers": [0],
        "losses": {
            "method": loss(0.25, spread=0.02),
            "recent": loss(0.5),
            "random": loss(0.75),
            "oracle": loss(0.125),
        },
        "repeats": [[0.5] + [None] * 63, [0.75] + [None] * 63, *[[None] * 64] * 2],
    }
    return own | more


def overlap(weights: str) -> dict[str, Any]:
    lists = {
        "between_layers": [[1.0, 0.5, 0.25]] * 3,
        "by_distance": [[0.5, 0.25]] * 4,
        "by_steps": [[0.5] * 64] * 4,
        "newest": [0.3] * 4,
        "chance": 0.125,
    }
    kept = {"measured": "overlap", "weights": weights, "lists": {"pages": lists}}
    base = line("overlap", weights)
    for name in ("losses", "repeats", "dense_layers", "terms", "policy"):
        del base[name]
    return base | kept


def test_an_interval_is_over_texts() -> None:
    values = [0.1, 0.4, 0.2, 0.6, 0.3]
    found = tables.estimate(values)
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert (found.mean, found.low, found.high) == pytest.approx(
        (np.mean(values), low, high), rel=1e-12
    )
    alone = tables.estimate([0.5])
    assert (alone.mean, alone.low, alone.high) == (0.5, -math.inf, math.inf)


def test_means_leave_dense_layers_out() -> None:
    row = tables.row(line("quest"))
    assert row.error["recent"].mean == 0.5
    assert row.error["method"].mean == pytest.approx(0.255)
    assert row.mass["oracle"].mean == 0.875
    assert row.read["method"] == 64
    assert row.repeats == 0.625
    assert row.gain is not None
    gains = [0.25 / 0.5, 0.24 / 0.5] * 2
    assert row.gain == pytest.approx(tables.estimate(gains))
    assert row.way is not None
    assert row.way.mean == pytest.approx(0.245 / 0.375)


def test_there_is_no_gain_over_a_control_that_reads_everything() -> None:
    """The share of an error of 0: no table was shown."""
    made = line("quest")
    made["losses"]["recent"] = made["losses"]["method"] = loss(0.0)
    row = tables.row(made)
    assert row.gain is None
    assert tables.verdict(row) in ("-", "reads more")


def test_there_is_no_way_to_an_oracle_that_is_no_better() -> None:
    made = line("quest")
    made["losses"]["oracle"] = loss(0.5)
    assert tables.row(made).way is None


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (loss(0.25), "better"),
        (loss(0.6), "worse"),
        (loss(0.5), "no selection"),
        (loss(0.45, spread=0.11), "undecided"),
        (loss(0.1, read=80), "reads more"),
    ],
)
def test_a_verdict_follows_the_interval(own: dict[str, Any], says: str) -> None:
    made = line("quest")
    made["losses"]["method"] = own
    row = tables.row(made)
    assert tables.verdict(row) == says
    assert (row.gain is None) == (says == "reads more")


def test_a_gain_that_random_weights_show_is_marked() -> None:
    row = tables.row(line("quest"))
    gains, none = tables.row(line("quest", "random")), line("quest", "random")
    none["losses"]["method"] = loss(0.5)
    assert tables.verdict(row, gains) == "better, twin too"
    assert tables.verdict(row, tables.row(none)) == "better"


def test_a_method_without_sparse_layers_has_nothing_to_lose() -> None:
    row = tables.row(line("quest", dense_layers=LAYERS))
    assert (row.error["method"].mean, row.mass["method"].mean) == (0, 1)
    assert tables.verdict(row) == "-"


def test_tables_have_the_random_twin_next_to_the_model() -> None:
    twin = line("quest", "random")
    twin["losses"]["method"] = loss(0.4)
    lines = [line("quest"), twin, overlap("trained"), overlap("random"), line("delta")]
    lines.append(line("quest", terms="equal"))
    given, equal = tables.places(lines)
    assert (given.terms, equal.terms) == ("given", "equal")
    errors, masses, layers, overlaps = tables.tables(given)
    own = ["0", "64", "0.255", "0.500", "0.750", "0.125", "+49.0 ± 1.8 %"]
    assert errors.rows == [
        ["quest", *own, "better, twin too", "65%", "0.400", "0.500", "+20.0 ± 0.0 %"],
        ["delta", *own, "better", "65%", "-", "-", "-"],
    ]
    assert masses.rows[0] == ["quest", "75%", "50%", "25%", "88%", "62%", "60%", "88%"]
    assert layers.heads == ["layer", "quest", "delta"]
    assert layers.rows[0] == ["0", "dense", "dense"]
    assert layers.rows[1] == ["2", "0.26 / 0.50", "0.26 / 0.50"]
    assert overlaps.heads[2:4] == ["layers 1 apart", "layers 2 apart"]
    assert overlaps.rows == [
        ["pages, one list", weights, "50%", "25%", "50%", "50%", "50%", "30%", "12%"]
        for weights in ("trained", "random")
    ]
    assert len(equal.overlaps) == 2
    table = written(masses.heads, masses.rows, masses.left)
    assert table.splitlines()[1] == "|:--|" + "--:|" * 7


@pytest.mark.slow
def test_the_page_shows_tables_and_pictures() -> None:
    lines = [line("quest"), line("quest", "random"), overlap("trained"), overlap("random")]
    text = pictures.render(lines)
    assert text.encode().startswith(PAGE.starts[""])
    assert text.count("<svg") == 2
    assert "made-up" in text
    assert "+49.0" in text
    assert "How to read this page" in text
    assert "None" not in text
