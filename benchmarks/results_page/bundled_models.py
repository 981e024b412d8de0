"""Sections of docs/results/ on the bundled models themselves: which tasks can tell, which layers.

A task can tell methods apart if full attention and the oracle, which knows the attention, are
right, and the newest tokens and random ones are not. A layer looks something up if answers are
wrong when it alone reads the first and the newest tokens only. The lines are those of `keyhole
eval`: with `--terms equal --controls`, with a `streaming_llm` per layer, and with `--suite
attention`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.results_page.tasks import FULL
from benchmarks.results_page.text import paragraph, percent, source, written
from keyhole.eval.comparisons import ORACLE, RANDOM, RECENT, wilson
from keyhole.eval.line_file import Line

#: At least this share right with full attention and the oracle, at most that with the controls.
_LEAST, _MOST = 0.9, 0.45
_COLUMNS = (FULL, ORACLE, RECENT, RANDOM)


def tasks_section(lines: Sequence[Line]) -> list[str]:
    """A row per model, task and length; empty without one.

    All columns were measured for a row, but if full attention alone shows that it cannot tell.
    """
    found: dict[tuple[Any, ...], dict[str, Line]] = {}
    for line in lines:
        place = line["model"], line["task"], line["length"]
        found.setdefault(place, {})[line["control"] or line["policy"]] = line
    whole = {
        at: row
        for at, row in found.items()
        if row.keys() >= set(_COLUMNS) or (FULL in row and row[FULL]["score"] < _LEAST)
    }
    if not whole:
        return []
    line = next(iter(whole.values()))[FULL]
    return [
        "## Which tasks can tell",
        paragraph(
            "The budget is an eighth of the length, and the first two layers are dense. A task "
            f"tells how well a method selects if at least {percent(_LEAST)} % are right with full "
            f"attention and with the tokens of the highest attention (oracle), and at most "
            f"{percent(_MOST)} % with the newest tokens and with random ones. "
            f"{line['samples']} samples; in brackets Wilson's 95 % interval; –: not measured, as "
            "full attention already rules the task out."
        ),
        written(
            ["model", "task", "words", "generated", *_COLUMNS, "tells"],
            [_task_row(at, row) for at, row in sorted(whole.items())],
        ),
        source(lines),
    ]


def _tells(row: dict[str, Line]) -> bool:
    """Whether the lines of a task, by what was read, pass all four bars."""
    if not row.keys() >= set(_COLUMNS):
        return False
    right = min(row[name]["score"] for name in (FULL, ORACLE))
    chance = max(row[name]["score"] for name in (RECENT, RANDOM))
    return bool(right >= _LEAST and chance <= _MOST)


def _task_row(at: tuple[Any, ...], row: dict[str, Line]) -> list[str]:
    model, task, length = at
    generated = f"{row[FULL]['tokens_generated']:,.0f}"
    shares = [_share(row.get(name)) for name in _COLUMNS]
    return [
        f"`{model}`",
        f"`{task}`",
        f"{length:,}",
        generated,
        *shares,
        "yes" if _tells(row) else "no",
    ]


def _share(line: Line | None) -> str:
    if line is None:
        return "–"
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
            "things up, from random weights. These two seeds are the better ones of two runs each: "
            "seed 0 once more, on a GPU, looks everything up in layers 0 to 2, and seed 1 on a CPU "
            "(`scratch-1` above) is right in 75 % of derivations of 4,096 words only."
        ),
        written(["model", "task", *(str(n) for n in range(width))], rows),
        source(lines),
    ]


def _sparse(line: Line) -> int:
    """The layer that does not read everything."""
    dense = set(line["settings"]["full_layers"])
    return next(n for n in range(len(dense) + 1) if n not in dense)


#: Distances between layers, and between steps, of the lists that are compared.
_LAYERS_APART = (1, 2, 3, 7)
_STEPS_LATER = (1, 2, 4, 8, 16, 64)


def far_section(lines: Sequence[Line]) -> list[str]:
    """What layers read far away, and whether lists of pages repeat; empty without lines."""
    lines = [line for line in lines if line["weights"] == "trained" or line == _twin(lines, line)]
    losses = [line for line in lines if line["measured"] == "loss"]
    overlaps = [line for line in lines if line["measured"] == "overlap"]
    if not losses or not overlaps:
        return []
    line = overlaps[0]
    width = len(line["layers"])
    return [
        "## Where layers attend, and how often their lists repeat",
        paragraph(
            f"{line['samples']} derivations of {line['length']:,} words under full attention. "
            f"Share of the attention of each layer on tokens further back than {line['budget']}, "
            "the first one left out, %:"
        ),
        written(
            ["model", *(str(n) for n in range(width))],
            [[_model(line), *map(percent, _far(line))] for line in losses],
        ),
        paragraph(
            f"Share of the {line['budget']} tokens' worth of pages with the largest attention, one "
            "list for all heads, that another layer's list or a later step's has as well, %, means "
            "over layers and texts. *newest*: the share of a list that is among the first and "
            "newest pages; *chance*: what two random lists share. DELTA's paper shows maps of "
            "consecutive layers (figure 1), which it calls highly correlated, and gives no number. "
            "SpeContext's says that over 80 % of the tokens that its head selects are selected "
            "again at the next step (figure 6b); [the head of "
            "`tiny-hops`](speed.md#offloaded-layers-of-keyhole-hops) repeats as many only where "
            "the budget is half of the text. **No list of pages here does**: the words of a "
            "sentence look for different things, so lists are more alike four and eight steps "
            "later."
        ),
        written(
            [
                "model",
                *(f"{n} layer{'s' * (n > 1)} apart" for n in _LAYERS_APART),
                *(f"{n} step{'s' * (n > 1)} later" for n in _STEPS_LATER),
                "newest",
                "chance",
            ],
            [[_model(line), *map(percent, _shared(line["lists"]["pages"]))] for line in overlaps],
        ),
        source(lines),
    ]


def _twin(lines: Sequence[Line], line: Line) -> Line:
    """The first line of random weights that measured the same: all models have one shape."""
    same = (one for one in lines if one["measured"] == line["measured"])
    return next(one for one in same if one["weights"] == line["weights"])


def _model(line: Line) -> str:
    return f"`{line['model']}`" if line["weights"] == "trained" else "random weights"


def _far(line: Line) -> list[float]:
    """Per layer, the attention outside the first and newest tokens: means over texts."""
    texts = zip(*line["losses"]["method"]["mass"], strict=True)
    return [1 - statistics.fmean(of_layer) for of_layer in texts]


def _shared(pages: dict[str, Any]) -> list[float]:
    """The columns of a row of overlaps: means over texts."""

    def mean(name: str, number: int) -> float:
        return statistics.fmean(text[number - 1] for text in pages[name])

    return [
        *(mean("by_distance", number) for number in _LAYERS_APART),
        *(mean("by_steps", number) for number in _STEPS_LATER),
        statistics.fmean(pages["newest"]),
        pages["chance"],
    ]
