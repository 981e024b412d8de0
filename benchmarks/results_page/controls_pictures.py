"""Pictures of methods beside their controls: scores against bytes, and lengths of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.results_page.controls import TERMS
from keyhole.drawing import STYLE, matplotlib, save
from keyhole.eval.line_file import Line
from keyhole.eval.methods import CONTROL
from keyhole.eval.report.cells import cells
from keyhole.eval.report.charts import pareto_chart
from keyhole.eval.report.plot_style import Look, looks

#: The derivations whose lengths are shown: those of the longest texts under this budget.
_TASK, _BUDGET = "tiny_derive", 128


def names(lines: Mapping[str, Sequence[Line]]) -> dict[str, str]:
    """Name -> file, of the pictures that these lines make."""
    found = {name: f"claims-{name}.png" for name in TERMS if lines.get(name)}
    if shown(lines.get("equal", ())):
        found["lengths"] = "answer-lengths.png"
    return found


def write(lines: Mapping[str, Sequence[Line]], folder: Path) -> None:
    """Draws all of them. Needs matplotlib."""
    for name, file in names(lines).items():
        if name == "lengths":
            _lengths(shown(lines["equal"]), folder / file)
        else:
            title = f"Right answers against bytes read per step: {TERMS[name][0].lower()}"
            pareto_chart(cells(lines[name]), folder / file, title=title)


def shown(lines: Sequence[Line]) -> dict[tuple[str, str], np.ndarray]:
    """Tokens of every answer, ascending, by policy and name; those of the longest derivations."""
    asked = [line for line in lines if line["task"] == _TASK and line.get("answer_lengths")]
    longest = max((line["length"] for line in asked), default=0)
    return {
        (line["policy"], str(line.get(CONTROL) or line["method"])): np.sort(
            np.asarray(line["answer_lengths"])
        )
        for line in asked
        if line["length"] == longest and line["budget"] in (_BUDGET, None)
    }


def _lengths(found: Mapping[tuple[str, str], np.ndarray], path: Path) -> None:
    """Steps of a distribution for each method."""
    pyplot = matplotlib()[0]
    style: dict[str, Look] = looks(found)
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for (_, name), lengths in found.items():
            shares = np.arange(1, len(lengths) + 1) / len(lengths)
            axes.step(lengths, shares, where="post", color=style[name].color, label=name)
        axes.set_xlabel("tokens of an answer")
        axes.set_ylabel("share of answers")
        axes.legend(fontsize=7, ncols=2)
        save(figure, path)
        pyplot.close(figure)
