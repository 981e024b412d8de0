"""Sections of docs/results/ on the bundled models themselves: which tasks can tell, which layers.

A task can tell methods apart if full attention and the oracle, which knows the attention, are
right, and the newest tokens and random ones are not. A layer looks something up if answers are
wrong when it alone reads the first and the newest tokens only. The lines are those of `keyhole
eval`: with `--terms equal --controls`, and with a `streaming_llm` per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.results_page.cells import FULL
from benchmarks.results_page.controls import source
from benchmarks.results_page.text import paragraph, percent, written
from keyhole.eval.comparisons import ORACLE, RANDOM, RECENT, wilson
from keyhole.eval.line_file import Line

#: At least this share right with full attention and the oracle, at most that with the controls.
_LEAST, _MOST = 0.9, 0.45
_COLUMNS = (FULL, ORACLE, RECENT, RANDOM)


def tasks_section(lines: Sequence[Line]) -> list[str]:
    """A row per model, task and length that all columns were measured for; empty without one."""
    found: dict[tuple[Any, ...], dict[str, Line]] = {}
    for line in lines:
        place = line["model"], line["task"], line["length"]
        found.setdefault(place, {})[line["control"] or line["policy"]] = line
    whole = {at: row for at, row in found.items() if row.keys() >= set(_COLUMNS)}
    if not whole:
        return []
    line = next(iter(whole.values()))[ORACLE]
    return [
        "## Which tasks can tell",
        paragraph(
            "The budget is an eighth of the length, and the first two layers are dense. A task "
            f"tells how well a method selects if at least {percent(_LEAST)} % are right with full "
            f"attention and with the tokens of the highest attention (oracle), and at most "
            f"{percent(_MOST)} % with the newest tokens and with random ones. "
            f"{line['samples']} samples; in brackets Wilson's 95 % interval."
        ),
        written(
            ["model", "task", "words", "generated", *_COLUMNS, "tells"],
            [_task_row(at, row) for at, row in sorted(whole.items())],
        ),
        source(lines),
    ]


def _tells(row: dict[str, Line]) -> bool:
    """Whether the lines of a task, by what was read, pass all four bars."""
    right = min(row[name]["score"] for name in (FULL, ORACLE))
    chance = max(row[name]["score"] for name in (RECENT, RANDOM))
    return bool(right >= _LEAST and chance <= _MOST)


def _task_row(at: tuple[Any, ...], row: dict[str, Line]) -> list[str]:
    model, task, length = at
    generated = f"{row[FULL]['tokens_generated']:,.0f}"
    shares = [_share(row[name]) for name in _COLUMNS]
    return [
        f"`{model}`",
        f"`{task}`",
        f"{length:,}",
        generated,
        *shares,
        "yes" if _tells(row) else "no",
    ]


def _share(line: Line) -> str:
    right = round(line["score"] * line["samples"])
    low, high = wilson(right, line["samples"])
    return f"{percent(line['score'])} ({percent(low)} to {percent(high)})"


def layers_section(lines: Sequence[Line]) -> list[str]:
    """A row per model and task, a column per layer; empty without lines."""
    found = {
        (line["model"], line["task"], _sparse(line)): line["score"]
        for line in lines
        if line["budget"]
    }
    if not found:
        return []
    width = 1 + max(layer for *_, layer in found)
    rows = []
    for model, task in dict.fromkeys(at[:2] for at in found):
        scores = [found.get((model, task, layer)) for layer in range(width)]
        rows.append([f"`{model}`", f"`{task}`", *map(percent, scores)])
    line = next(line for line in lines if line["budget"])
    return [
        "## Which layers look something up",
        paragraph(
            f"One layer at a time reads {line['budget']} of {line['length']:,} tokens, the first "
            "and the newest ones, and all others read everything. Right answers, %, by the number "
            f"of that layer, of {line['samples']} samples. A layer with few right answers looks "
            "something up that the task needs. `keyhole-hops` began as copies of layers of "
            "`keyhole-tiny`, and single look-ups have stayed in the layers that do them there: so "
            "at equal terms derivations and rings tell how well a method selects for layer 2, and "
            "only `tiny_walk2` how well for later layers. `keyhole-scratch`, `keyhole-scratch-1` "
            "(its second seed) and `scratch-0` (an earlier, shorter run) learned where they look "
            "things up, from random weights."
        ),
        written(["model", "task", *(str(n) for n in range(width))], rows),
        source(lines),
    ]


def _sparse(line: Line) -> int:
    """The layer that does not read everything."""
    dense = set(line["settings"]["full_layers"])
    return next(n for n in range(len(dense) + 1) if n not in dense)
