"""Cells of methods and controls: which are measured, once each, and what lines say they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keyhole.config import EngineConfig
from keyhole.errors import ConfigError
from keyhole.eval.comparisons import compared, controls_table
from keyhole.eval.line_file import EvalOutcome, LineFile
from keyhole.eval.methods import FULL, GIVEN, Budget, Equal, Method, Published, Terms, under_budgets
from keyhole.eval.paper.verdicts import policy_verdicts
from keyhole.eval.run import EvalGrid, Evaluation
from keyhole.eval.suite import HELD_OUT, sibling, tune
from keyhole.eval.workload import MakeEngine, Shown, Workload
from keyhole.models.model import Model
from keyhole.policies.base import Policy

EQUAL = Equal(sinks=0, window=16)


class Counted(Workload):
    """Answers correctly depending on the policy's dense layers, and counts its calls."""

    name, has_question = "counted", False

    def __init__(self, first_seed: int = 0) -> None:
        self.settings = {"first_seed": first_seed} if first_seed else {}
        self.asked: list[Policy] = []

    def available(self, length: int, limit: int) -> int:
        return limit

    def measure(
        self, make_engine: MakeEngine, policy: Policy, length: int, setup: str, samples: int
    ) -> dict[str, Any]:
        self.asked.append(policy)
        right = {"full": samples, "oracle": samples, "quest": samples - 1, "random": 0}
        scores = [float(n < right.get(policy.name, 1)) for n in range(samples)]
        read = {"bytes_per_step": 4096.0, "read_share": 0.25}
        return {"score": sum(scores) / samples, "scores": scores, **read}

    def shown(self, length: int, setup: str) -> Shown:
        raise AssertionError("no maps are wanted")


def named(*names: str) -> list[Method]:
    return [Method(label=name, name=name) for name in names]


def run(
    model: Model,
    path: Path,
    work: Workload,
    *names: str,
    terms: Terms = GIVEN,
    controls: bool = True,
    samples: int = 8,
    budgets: str = "64",
) -> EvalOutcome:
    grid = EvalGrid(
        workloads=[work],
        lengths=[256],
        setups=["prompt"],
        methods=under_budgets(named(*names), [Budget.parse(text) for text in budgets.split(",")]),
        samples=samples,
        config=EngineConfig(),
        terms=terms,
        controls=controls,
    )
    return Evaluation(model, grid, LineFile(path), dict).run()


def told(outcome: EvalOutcome) -> list[tuple[Any, ...]]:
    return [(one["policy"], one.get("control"), one.get("terms")) for one in outcome.lines]


def test_controls_that_coincide_are_measured_once(model: Model, tmp_path: Path) -> None:
    work = Counted()
    found = run(model, tmp_path / "a", work, "quest", "delta", "tidal_decode", terms=EQUAL)
    assert told(found) == [
        ("full", None, "equal"),
        ("quest", None, "equal"),
        ("streaming_llm", "recent", None),
        ("random", "random", None),
        ("oracle", "oracle", None),
        ("delta", None, "equal"),
        ("tidal_decode", None, "equal"),
    ]
    assert len(work.asked) == 7
    for line in found.lines:
        if line.get("control") is None and line["policy"] != "full":
            assert line["dense_layers"] == [0, 1]
            assert line["controls"] == found.lines[1]["controls"]
    again = run(model, tmp_path / "a", work, "quest", "delta", "tidal_decode", terms=EQUAL)
    assert (again.stored, len(work.asked), again.lines) == (7, 7, found.lines)


def test_a_stopped_run_goes_on_with_the_controls_it_lacks(model: Model, tmp_path: Path) -> None:
    work, path = Counted(), tmp_path / "a"
    found = run(model, path, work, "quest")
    kept = path.read_text().splitlines(keepends=True)
    path.write_text("".join(kept[:3]))
    again = run(model, path, work, "quest")
    assert (again.stored, len(work.asked)) == (3, 7)
    assert told(again) == told(found)


def test_one_measurement_serves_as_method_and_as_control(model: Model, tmp_path: Path) -> None:
    """A line that was measured for another purpose is written once more, not measured again."""
    work, path = Counted(), tmp_path / "a"
    run(model, path, work, "quest", terms=EQUAL)
    found = run(model, path, work, "streaming_llm", terms=EQUAL)
    assert len(work.asked) == 5
    assert found.stored == len(found.lines) == 5
    method = found.lines[1]
    assert (method["policy"], method["control"], method["terms"]) == (
        "streaming_llm",
        None,
        "equal",
    )
    assert method["controls"]["recent"]["settings"] == method["settings"]
    control = found.lines[2]
    assert (control["control"], control["scores"]) == ("recent", method["scores"])
    (comparison,) = [one for one in compared(found.lines) if one is not None]
    assert comparison.gain is None
    assert comparison.controls == {"random": 0, "oracle": 1}


def test_a_new_file_has_no_cell_from_before(model: Model, tmp_path: Path) -> None:
    """A method that is the control of another one counted as stored before."""
    work = Counted()
    found = run(model, tmp_path / "a", work, "quest", "streaming_llm", terms=EQUAL)
    assert (found.stored, len(work.asked), len(found.lines)) == (0, 5, 6)
    again = run(model, tmp_path / "a", work, "quest", "streaming_llm", terms=EQUAL)
    assert (again.stored, len(work.asked)) == (6, 5)


def test_a_line_of_another_label_is_stored_under_this_one(model: Model, tmp_path: Path) -> None:
    """The suite `paper` looks lines up by label, and dropped the verdict of such a method."""
    work, path = Counted(), tmp_path / "a"
    run(model, path, work, "quest")
    other = '"method": "quest:token_budget=64"'
    path.write_text(path.read_text().replace('"method": "quest"', other))
    found = run(model, path, work, "quest")
    assert (found.stored, len(work.asked)) == (5, 5)
    assert [line["method"] for line in found.lines][:2] == ["full", "quest"]
    methods = under_budgets(named("quest"), [Budget.parse("64")])
    (verdict,) = policy_verdicts(found.lines, (), methods, 16)
    assert verdict.found is not None
    assert run(model, path, work, "quest").lines == found.lines
    assert len(LineFile(path).lines) == 6


def test_terms_are_kept_apart(model: Model, tmp_path: Path) -> None:
    work, path = Counted(), tmp_path / "a"
    first = run(model, path, work, "quest", controls=False)
    second = run(model, path, work, "quest", controls=False, terms=Published())
    assert [one.get("terms") for one in first.lines] == [None] * 2
    assert [one.get("terms") for one in second.lines] == ["published"] * 2
    same = first.lines[1]["settings"] == second.lines[1]["settings"]
    assert len(work.asked) == (2 if same else 3)
    assert run(model, path, work, "quest", controls=False).lines == first.lines


def test_lines_of_before_are_those_of_given_terms(model: Model, tmp_path: Path) -> None:
    """Lines that were stored before there were terms and controls are not measured again."""
    work, path = Counted(), tmp_path / "a"
    run(model, path, work, "quest", controls=False)
    about = ("terms", "control", "dense_layers", "outside_budget", "terms_note", "controls")
    file, old = LineFile(path), tmp_path / "old"
    for line in file.lines:
        LineFile(old).add({name: line[name] for name in line if name not in about})
    found = run(model, old, work, "quest", controls=False)
    assert (found.stored, len(work.asked)) == (2, 2)
    assert len(LineFile(old).lines) == 2
    found = run(model, old, work, "quest")
    assert (found.stored, len(work.asked)) == (2, 5)
    assert found.lines[1]["controls"].keys() == {"recent", "random", "oracle"}


def test_a_method_without_equal_terms_is_reported_with_the_others(
    model: Model, tmp_path: Path
) -> None:
    found = run(model, tmp_path / "a", Counted(), "quest", "raas", terms=EQUAL)
    (one,) = found.refused
    assert (one["policy"], one["unequal"]) == ("raas", True)
    rows = controls_table(found.lines, found.refused).rows
    assert rows[-1][1:4] == ["raas", "64", "not at equal terms"]


def test_an_impossible_control_is_reported(model: Model, tmp_path: Path) -> None:
    """Its budget has no room for the newest token beside the sinks."""
    work = Counted()
    streaming = Method(label="wide", name="streaming_llm", settings={"sink_size": 15})
    grid = EvalGrid(
        workloads=[work],
        lengths=[256],
        setups=["prompt"],
        methods=under_budgets([FULL, streaming], [Budget.parse("16"), Budget.parse("15")]),
        samples=2,
        config=EngineConfig(),
        controls=True,
    )
    found = Evaluation(model, grid, LineFile(tmp_path / "a"), dict).run()
    assert [one["method"] for one in found.refused] == ["wide"]
    assert "at least 16" in found.refused[0]["error"]


def test_a_table_has_gains_and_marks_inconclusive_ones(model: Model, tmp_path: Path) -> None:
    found = run(model, tmp_path / "a", Counted(), "quest", "sliding_window", terms=EQUAL)
    shown = controls_table(found.lines, found.refused)
    rows = {row[1]: dict(zip(shown.heads, row, strict=True)) for row in shown.rows}
    assert list(rows) == ["full", "quest", "sliding_window"]
    quest = rows["quest"]
    assert quest["right, %"] == "87.5 (53 to 98)"
    assert (quest["recent"], quest["random"], quest["oracle"]) == ("12.5", "0.0", "100.0")
    assert quest["gain on recent"].startswith("+75.0 (")
    assert (quest["p"], quest["to oracle"]) == ("0.031", "12.5")
    assert (quest["KiB/step"], quest["note"]) == ("4.0", "")
    assert rows["full"]["gain on recent"] == "-"
    assert rows["sliding_window"]["note"] == "it has no sinks; its window is the whole budget"
    # With one sample the recent control is right as often as full attention.
    found = run(model, tmp_path / "b", Counted(), "quest", terms=EQUAL, samples=1)
    assert controls_table(found.lines, ()).rows[1][-1] == "cannot tell"


def test_as_published_nothing_else_can_be_set(model: Model) -> None:
    geometry = model.geometry(16)
    method = Method(
        label="mine", name="quest", settings={"sink_size": 4}, budget=Budget.parse("64")
    )
    with pytest.raises(
        ConfigError, match="mine: with --terms published, a method takes no settings"
    ):
        Published().policy(method, 256, geometry)


def test_settings_are_tuned_on_other_samples_and_trials_are_kept(
    model: Model, tmp_path: Path
) -> None:
    held_out, path = Counted(HELD_OUT), tmp_path / "trials.jsonl"
    grid = EvalGrid(
        workloads=[held_out],
        lengths=[256],
        setups=["prompt"],
        methods=under_budgets(named("quest", "delta"), [Budget.parse("64")]),
        samples=4,
        config=EngineConfig(),
        controls=True,
    )

    def evaluate(part: EvalGrid) -> EvalOutcome:
        return Evaluation(model, part, LineFile(path), dict).run()

    geometry = model.geometry(16)
    terms = tune(grid, 3, 2, geometry, evaluate)
    assert [policy.name for policy in held_out.asked] == ["quest"] * 3 + ["delta"] * 3
    assert all(len(policy.dense_layers(geometry)) == 2 for policy in held_out.asked)
    assert all(line["task_settings"] == {"first_seed": HELD_OUT} for line in LineFile(path).lines)
    again = tune(grid, 3, 2, geometry, evaluate)
    assert (again, len(held_out.asked)) == (terms, 6)
    found = run(model, tmp_path / "a", Counted(), "quest", "delta", terms=terms)
    quest = found.lines[1]
    assert quest["tuning"] == {"trials": 3, "samples": 4, "score": 0.75, "first_seed": HELD_OUT}
    assert quest["settings"]["full_layers"] == quest["dense_layers"]
    controls = quest["controls"]["recent"]["settings"]
    assert controls["full_layers"] == quest["dense_layers"]
    with pytest.raises(ConfigError, match="omnikv: no trial could be run with budget 64"):
        terms.policy(under_budgets(named("omnikv"), [Budget.parse("64")])[1], 256, geometry)


def test_trials_are_stored_next_to_the_results() -> None:
    assert sibling("folder/eval.jsonl") == Path("folder/eval.trials.jsonl")
