"""The pages of docs/results/ that compare methods with their controls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results_page import bundled_models, controls_pictures, hops_figures, variations
from benchmarks.results_page import controls as results_controls
from benchmarks.results_page.controls import TERMS

Line = dict[str, Any]
DENSE = [0, 1]


def line(method: str, right: int, budget: int | None = 64, **more: Any) -> Line:
    """A cell of 20 samples, the first `right` of them right."""
    scores = [1.0] * right + [0.0] * (20 - right)
    settings = {"token_budget": budget, "full_layers": DENSE}
    return {
        "model": "tiny",
        "fingerprint": "f",
        "task": "tiny_derive",
        "task_settings": {},
        "length": 512,
        "setup": "prompt",
        "policy": method.split(":")[0],
        "method": method,
        "settings": settings,
        "budget": budget,
        "samples": 20,
        "score": right / 20,
        "scores": scores,
        "answer_lengths": [100 + 5 * n for n in range(20)],
        "read_share": 0.4,
        "bytes_per_step": 4096.0,
        "step_ms": 3.0,
        "machine": {"cpu": "a processor"},
        "versions": {"torch": "2", "transformers": "5"},
        "commit": "abc",
        "date": "2026-11-23T10:00:00",
        "command": "keyhole eval --some",
        **more,
    }


def control(name: str, policy: str, right: int, budget: int = 64) -> Line:
    return line(policy, right, budget, control=name) | {"method": f"{name}, dense 0,1"}


def lines(recent: int, method: int) -> list[Line]:
    """Full attention, three controls, and a method that names them."""
    controls = {
        "recent": control("recent", "streaming_llm", recent),
        "random": control("random", "random", 0),
        "oracle": control("oracle", "oracle", 20),
    }
    named = {
        name: {"policy": one["policy"], "settings": one["settings"]}
        for name, one in controls.items()
    }
    quest = line("quest", method, controls=named, settings={"token_budget": 64, "full_layers": [0]})
    return [line("full", 20, None), *controls.values(), quest]


def rows(parts: Sequence[str], after: str) -> list[list[str]]:
    """The cells of the table that follows a line."""
    table = parts[list(parts).index(after) + 1]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]


def test_every_method_is_shown_with_its_controls() -> None:
    parts = results_controls.sections(TERMS, {"equal": lines(recent=2, method=15)}, {})
    right = rows(parts, "Right answers, %:")
    assert right[0] == ["", "512: 64"]
    assert right[2:] == [
        ["`full`", "100"],
        ["*recent*", "10"],
        ["*random*", "0"],
        ["*oracle*", "100"],
        ["`quest`", "75"],
    ]
    assert rows(parts, "Gain over its own recent control, points:")[2:] == [["`quest`", "**+65**"]]
    assert rows(parts, "Distance to the oracle, points:")[2:] == [["`quest`", "25"]]


def test_a_gain_that_may_be_chance_is_not_bold() -> None:
    parts = results_controls.sections(TERMS, {"equal": lines(recent=2, method=4)}, {})
    assert rows(parts, "Gain over its own recent control, points:")[2:] == [["`quest`", "+10"]]


def test_a_place_where_recency_suffices_has_no_ranking() -> None:
    parts = results_controls.sections(TERMS, {"equal": lines(recent=19, method=20)}, {})
    gains = rows(parts, "Gain over its own recent control, points:")
    assert gains[2:] == [["`quest`", "cannot tell"]]


def test_reads_outside_the_budget_give_no_gain() -> None:
    found = lines(recent=2, method=15)
    found[-1]["outside_budget"] = "the prompt"
    parts = results_controls.sections(TERMS, {"published": found}, {})
    for title in ("Gain over its own recent control, points:", "Distance to the oracle, points:"):
        assert rows(parts, title)[2:] == [["`quest`", "extra"]]
    assert ["`quest`", "75"] in rows(parts, "Right answers, %:")


def test_tables_of_different_terms_are_never_mixed() -> None:
    claims = {"equal": lines(2, 15), "published": lines(2, 9)}
    text = "\n\n".join(results_controls.sections(TERMS, claims, {}))
    equal, published = text.split("## As published")
    assert "## Equal terms" in equal
    assert "| `quest` | 75 |" in equal
    assert "| `quest` | 75 |" not in published
    assert "| `quest` | 45 |" in published


def test_nothing_is_said_without_lines() -> None:
    assert results_controls.sections(TERMS, {}, {}) == []
    assert variations.sections({}, {}) == []


def test_recency_by_budget_and_lists_by_budget() -> None:
    recency = [line("full", 20, None)] + [
        line("delta", right, 64, settings={"token_budget": 64, "recent_pages": pages})
        for pages, right in ((1, 10), (4, 2))
    ]
    lists = [
        line(f"spe_context:per_head={per_head}", right, 64, settings={"per_head": per_head})
        for per_head, right in ((True, 18), (False, 9))
    ]
    text = "\n".join(variations.sections({"recency": recency, "lists": lists}, {}))
    assert "| 1 | 50 (30 to 70) |" in text
    assert "| 4 | 10 (3 to 30) |" in text
    assert "| 64 | 90 (70 to 97) | 45 (26 to 66) | +45.0 (" in text


def test_adaptive_offloading_is_compared_with_offloading_all_layers() -> None:
    part = {
        "lengths": [700, 1000],
        "offloaded_layers": [0, 3],
        "moved_bytes": {"adaptive": 2048.0, "all below": 4096.0},
        "ratio": 0.9,
        "low": 0.8,
        "high": 1.0,
    }
    about = {"texts": 4, "words": 2048, "budget": 256, "share": 0.5, "parts": [part]}
    text = "\n".join(variations.sections({"adaptive": [line("x", 1) | about]}, {}))
    assert "| 700 to 1,000 | 0 to 3 | 2 | 4 | 0.90 (0.80 to 1.00) |" in text


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    claims = {"equal": [one | {"budget": one["budget"] and 128} for one in lines(2, 15)]}
    names = controls_pictures.names(claims)
    assert names == {"equal": "claims-equal.png", "lengths": "answer-lengths.png"}
    controls_pictures.write(claims, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names.values())


def test_a_layer_that_looks_something_up_is_a_column_with_wrong_answers() -> None:
    every = [0, 1, 2]
    sparse = [
        line("streaming_llm", right, settings={"full_layers": [n for n in every if n != layer]})
        for layer, right in enumerate([0, 20, 5])
    ]
    parts = bundled_models.layers_section([line("full", 20, None), *sparse])
    table = [[cell.strip() for cell in row.split("|")[1:-1]] for row in parts[2].splitlines()]
    assert table[0] == ["model", "task", "0", "1", "2"]
    assert table[2] == ["`tiny`", "`tiny_derive`", "0", "100", "25"]
    assert bundled_models.layers_section([line("full", 20, None)]) == []


def test_attention_further_back_and_repeated_lists_are_means_over_texts() -> None:
    def measured(model: str, weights: str, mass: float, step: float) -> list[Line]:
        about = {"model": model, "weights": weights, "layers": [0, 1]}
        losses = {"method": {"mass": [[mass, 0.5], [mass + 0.1, 0.5]]}}
        steps = [[step] * 64, [step + 0.1] * 64]
        lists = {"by_distance": [[0.5] * 7, [0.7] * 7], "by_steps": steps}
        lists |= {"newest": [0.2, 0.4], "chance": 0.25}
        overlap = {"measured": "overlap", "lists": {"pages": lists}}
        return [
            line("streaming_llm", 1) | about | {"measured": "loss", "losses": losses},
            line("overlap", 1) | about | overlap,
        ]

    lines = [
        *measured("one", "trained", 0.6, 0.3),
        *measured("one", "random", 0.2, 0.8),
        *measured("two", "trained", 0.7, 0.1),
        *measured("two", "random", 0.1, 0.9),  # the same twin again
    ]
    text = "\n".join(bundled_models.far_section(lines))
    assert re.findall(r"^\| .* \| [\d.]+ \| 50 \|$", text, re.MULTILINE) == [
        "| `one` | 35 | 50 |",
        "| random weights | 75 | 50 |",
        "| `two` | 25 | 50 |",
    ]
    apart, later = " 60 |" * 4, " {0} |" * 6
    for name, step in (("`one`", 35), ("random weights", 85), ("`two`", 15)):
        assert f"| {name} |{apart}{later.format(step)} 30 | 25 |" in text
    assert text.count("random weights |") == 2
    assert bundled_models.far_section(lines[:1]) == []


@pytest.mark.parametrize(
    ("rights", "verdict"),
    [
        ((18, 18, 9, 9), "yes"),
        ((17, 20, 0, 0), "no"),
        ((20, 17, 0, 0), "no"),
        ((20, 20, 10, 0), "no"),
        ((20, 20, 0, 10), "no"),
    ],
)
def test_a_task_tells_if_all_four_bars_are_passed(rights: tuple[int, ...], verdict: str) -> None:
    full, oracle, recent, random = rights
    found = [
        line("full", full, None, control=None, tokens_generated=1017.0),
        control("oracle", "oracle", oracle),
        control("recent", "streaming_llm", recent),
        control("random", "random", random),
    ]
    parts = bundled_models.tasks_section(found)
    table = [[cell.strip() for cell in row.split("|")[1:-1]] for row in parts[2].splitlines()]
    assert table[2][:4] == ["`tiny`", "`tiny_derive`", "512", "1,017"]
    assert [cell.split()[0] for cell in table[2][4:8]] == [f"{100 * n / 20:.3g}" for n in rights]
    assert table[2][8] == verdict
    without_random = bundled_models.tasks_section(found[:3])
    if full < 18:  # which decides, whatever random tokens would answer
        *_, random_share, verdict_cell = without_random[2].splitlines()[2].split("|")[1:-1]
        assert (random_share.strip(), verdict_cell.strip()) == ("–", "no")
    else:
        assert without_random == []


def test_lengths_of_answers_are_counted_beside_those_of_full_attention() -> None:
    place = {"task": "tiny_derive", "length": 4096}
    full = line("full", 20, None) | place
    longer = [length + (n < 5) - (n > 18) for n, length in enumerate(full["answer_lengths"])]
    delta = line("delta", 15, 512, answer_lengths=longer) | place
    recent = control("recent", "streaming_llm", 0, 512) | place
    other = line("quest", 20, 256, answer_lengths=longer) | place
    parts = hops_figures.sections({"hops-equal": [full, recent, delta, other]}, {}, "hops-")
    text = "\n".join(parts)
    assert "| `delta` | 75 (53 to 89) | 25 (11 to 47) | 5 (1 to 24) | 148 |" in text
    assert "| *recent* | 0 (0 to 16) | 0 (0 to 16) | 0 (0 to 16) | 148 |" in text
    assert "quest" not in text


def test_a_placement_stands_beside_its_controls_and_its_calibration() -> None:
    delta = lines(recent=2, method=15)
    delta[-1] |= {"policy": "delta", "settings": {"delta_layers": [1, 3]}}
    calibration = line("x", 1) | {
        "task": "tiny_walk2",
        "items": 3,
        "token_budget": 128,
        "shift": [0.0, 0.5, 0.1, 0.25, 0.2],
        "recall": [[0.5] * 4 + [0.9]] * 5,
        "error": [[0.1, 0.1, 0.9, 0.1, 0.9]] * 5,
        "costs": {"2": {"mass": 0.5, "error": 0.25}, "3": {"mass": 0.75, "error": 0.5}},
        "placed": {"shift": 3, "mass": 3, "error": 2},
    }
    found = {"hops-placements": delta, "hops-calibration": [calibration]}
    text = "\n".join(hops_figures.sections(found, {}, "hops-"))
    assert "| 3 | 75 (53 to 89) | 10 | 0 | 100 | +65.0 (" in text
    assert "| texts | criterion | 2 | 3 | two layers |" in text
    assert "| `tiny_walk2` | shift (the paper's) | 0.100 | **0.250** | 3, 4 |" in text
    # Two of three layers read everything; the one that is left should keep most, or err least.
    assert "| `tiny_walk2` | attention kept, % | 50 | **75** | 2, 3 |" in text
    assert "| `tiny_walk2` | error, % | **25** | 50 | 2, 4 |" in text


def test_a_list_is_judged_by_what_it_keeps_and_by_what_repeats() -> None:
    """Of 64 tokens 16 + 16 are always read; the window repeats but for one of them."""
    steps = [(0.75 * 64) / 64, *[0.5] * 63]
    losses = {
        who: {"mass": [[1.0, mass], [1.0, mass]]}
        for who, mass in (("method", 0.6), ("recent", 0.4), ("random", 0.1), ("oracle", 0.8))
    }
    about = {"measured": "loss", "weights": "trained", "layers": [0, 1], "dense_layers": [0]}
    settings = {"per_head": True, "sink_size": 16, "window_size": 16}
    loss = line("spe_context", 1, 64, settings=settings) | about
    loss |= {"losses": losses, "repeats": [steps, steps]}
    top = {"by_steps": [steps, steps], "newest": [0.25, 0.25], "chance": 0.125}
    overlap = line("overlap", 1, 64) | about
    overlap |= {"measured": "overlap", "lists": {"head_tokens": top}}
    text = "\n".join(hops_figures.sections({"hops-attention": [loss, overlap]}, {}, "hops-"))
    assert "| 64 | 60.0 ± 0.0 | – | 40.0 ± 0.0 | 10.0 ± 0.0 | 80.0 ± 0.0 |" in text
    # 48 of 64 repeat, 31 of them by themselves, so that of the other 33 17 do.
    assert "| 64 | a list per KV head | 75 | 50 | 50 | 50 | 50 | 51.5 | – |" in text
    assert "| 64 | oracle lists, 25 newest | 75 | 50 | 50 | 50 | – | – | 12.5 |" in text


def test_both_forms_of_lists_are_compared_where_both_were_measured() -> None:
    forms = [
        line("spe_context", right, 64, settings={"per_head": per_head}) | {"length": length}
        for per_head, right, length in ((True, 18, 512), (False, 9, 512), (True, 20, 1024))
    ]
    parts = hops_figures.sections({"hops-lists": [line("full", 20, None), *forms]}, {}, "hops-")
    text = "\n".join(parts)
    assert "| 64 | 90 (70 to 97) | 45 (26 to 66) | +45.0 (" in text
    assert "1,024" not in text
