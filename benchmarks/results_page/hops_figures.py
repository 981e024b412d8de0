"""DELTA's and SpeContext's figures on `tiny-hops` and `keyhole-scratch`, for docs/results/.

DELTA's table 1, its layers and figure 4; SpeContext's figures 5a and 6b. The lines are those of the
parts of `benchmarks.claims`, of `benchmarks.paper.placements`, and of the suite `attention`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.results_page.controls import HOPS, SCRATCH, TASKS
from benchmarks.results_page.tasks import FULL
from benchmarks.results_page.text import image, paragraph, percent, share, source, written
from benchmarks.results_page.variations import (
    by_place,
    lists_table,
    recency_section,
    right_share,
)
from keyhole.eval.attention.suite import LOSS, METHOD, OVERLAP, TRAINED
from keyhole.eval.attention.tables import estimate
from keyhole.eval.comparisons import (
    ORACLE,
    RANDOM,
    RECENT,
    Gain,
    compared,
    gain_text,
    p_text,
)
from keyhole.eval.line_file import Line
from keyhole.eval.methods import CONTROL
from keyhole.eval.report.plot_style import NOTHING
from keyhole.policies.selection_layers import place_by_error, place_by_recall, place_by_shift

_Lines = Mapping[str, Sequence[Line]]
#: Length and budget of the answers whose lengths are counted.
_ANSWERS = ("tiny_derive", 4096, 512)
#: Why DELTA's selection layers have these tasks.
_WHY_PLACED = {
    HOPS: "the other tasks need no look-up behind layer 2.",
    SCRATCH: "the two tasks that can tell methods apart.",
}
#: Steps between two selections that are compared.
_STEPS = (1, 4, 16, 64)


def sections(lines: _Lines, pictures: Mapping[str, str], prefix: str) -> list[str]:
    """The sections of a model that have lines; pictures: by name."""
    parts = []
    if own := lines.get(prefix + "recency"):
        parts += recency_section(own)
    parts += _placements(lines, prefix)
    parts += _answers(lines.get(prefix + "equal", ()), pictures.get(prefix + "lengths"))
    parts += _lists(lines.get(prefix + "lists", ()))
    return parts + _attention(lines.get(prefix + "attention", ()))


def _placements(lines: _Lines, prefix: str) -> list[str]:
    """What DELTA answers with each second selection layer, and what a calibration says of it."""
    own, calibrated = lines.get(prefix + "placements", ()), lines.get(prefix + "calibration", ())
    if not own or not calibrated:
        return []
    tasks = dict.fromkeys(str(line["task"]) for line in own)
    place = own[0]
    return [
        "## DELTA: where its layers select (section 5 of its paper)",
        paragraph(
            "The paper places selection layers by a calibration, where attention shifts most from "
            "one layer to the next. Here layer 0 is dense, layer 1 selects, and one or two layers "
            "more select for those behind them; they read everything, and so they do in the "
            f"controls. {place['length']:,} tokens, a budget of {own[-1]['budget']}, "
            f"{place['samples']} samples; {_WHY_PLACED[prefix]} Gains on the newest and on "
            "random tokens in points, with Newcombe's intervals and McNemar's p."
        ),
        *(
            part
            for task in tasks
            for part in _placed([line for line in own if line["task"] == task])
        ),
        *_calibrations(calibrated),
        source([*own, *calibrated]),
    ]


def _placed(own: Sequence[Line]) -> list[str]:
    """A row per placement in one task."""
    beside = dict(zip(map(id, own), compared(own), strict=True))
    rows = []
    for line in own:
        if line.get(CONTROL) is not None or line["policy"] == FULL:
            continue
        found, second = beside[id(line)], line["settings"]["delta_layers"][1:]
        assert found is not None
        rows.append(
            [
                ", ".join(map(str, second)) or "none",
                right_share(line),
                *(percent(found.controls.get(name)) for name in (RECENT, RANDOM, ORACLE)),
                *(_gain(found.gains.get(name)) for name in (RECENT, RANDOM)),
            ]
        )
    heads = [
        "besides layer 1",
        "right, %",
        "*recent*",
        "*random*",
        "*oracle*",
        "on recent",
        "on random",
    ]
    task = str(own[0]["task"])
    return [f"{TASKS[task].title} (`{task}`):", written(heads, rows)]


def _gain(found: Gain | None) -> str:
    """Points, their interval and p."""
    return NOTHING if found is None else f"{gain_text(found)}, p {p_text(found)}"


def _calibrations(lines: Sequence[Line]) -> list[str]:
    """For each task: shift, kept mass and error by second layer; the choices in bold."""
    by_task = {line["task"]: line for line in lines}
    any_line = lines[-1]
    rows = []
    for task, line in by_task.items():
        values = {
            "shift": {layer: f"{line['shift'][int(layer)]:.3f}" for layer in line["costs"]},
            "mass": {layer: percent(cost["mass"]) for layer, cost in line["costs"].items()},
            "error": {layer: percent(cost["error"]) for layer, cost in line["costs"].items()},
        }
        layers = range(1, len(line["shift"]))
        two = {
            "shift": place_by_shift(line["shift"], layers, 3),
            "mass": place_by_recall(line["recall"], layers, 3),
            "error": place_by_error(line["error"], layers, 3),
        }
        for name, found in values.items():
            chosen = str(line["placed"][name])
            cells = [f"**{text}**" if layer == chosen else text for layer, text in found.items()]
            cells.append(", ".join(map(str, two[name][1:])))
            rows.append([f"`{task}`", _CRITERIA[name], *cells])
    return [
        paragraph(
            "What `keyhole calibrate` measures under full attention, by the second layer: the "
            "total variation between the layer's distribution over pages and that of the layer "
            "before it; attention kept and relative error of the output, means over the layers "
            "that stay sparse. Each criterion's choice is in bold, and the last column has its "
            "choice of two layers. "
            f"{any_line['items']} texts of each task, {any_line['token_budget']} tokens read:"
        ),
        written(["texts", "criterion", *any_line["costs"], "two layers"], rows),
    ]


_CRITERIA = {"shift": "shift (the paper's)", "mass": "attention kept, %", "error": "error, %"}


def _answers(lines: Sequence[Line], picture: str | None) -> list[str]:
    """How many answers are longer and shorter than what was asked for, by method."""
    own = [
        line
        for line in lines
        if (line["task"], line["length"]) == _ANSWERS[:2] and line["budget"] in (_ANSWERS[2], None)
    ]
    full = next((line for line in own if line["policy"] == FULL), None)
    if full is None:
        return []
    answers = [*zip(full["answer_lengths"], full["scores"], strict=True)]
    asked = next(length for length, score in answers if score == 1)
    expected = [length if score == 1 else asked for length, score in answers]
    rows = []
    for line in own:
        pairs = [*zip(line["answer_lengths"], expected, strict=False)]
        counts = [sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)]
        name = line["method"] if line.get(CONTROL) is None else line[CONTROL]
        shown = f"`{name}`" if line.get(CONTROL) is None else f"*{name}*"
        mean = statistics.fmean(a for a, _ in pairs)
        rows.append(
            [shown, right_share(line), *(share(n, len(pairs)) for n in counts), f"{mean:,.0f}"]
        )
    task, length, budget = _ANSWERS
    return [
        "## How long answers get (figure 4 of DELTA's paper, left)",
        paragraph(
            f"Derivations (`{task}`) of {length:,} tokens at equal terms and a budget of "
            f"{budget}, {full['samples']} samples. The right answer has {asked:,} tokens; an "
            "answer is stopped at a quarter more. The paper finds that DELTA's answers are no "
            "longer than those of full attention, and those of other methods are:"
        ),
        written(["", "right, %", "longer, %", "shorter, %", "mean tokens"], rows),
        *image(picture, "Distribution of the lengths of answers"),
        source(own),
    ]


def _lists(lines: Sequence[Line]) -> list[str]:
    """SpeContext's list per KV head against one list, where both were measured."""
    own = [
        line
        for line in lines
        if line.get(CONTROL) is not None or line["policy"] in (FULL, "spe_context")
    ]
    there = {
        (line["task"], line["length"])
        for line in own
        if line["policy"] == "spe_context" and not line["settings"]["per_head"]
    }
    own = [line for line in own if (line["task"], line["length"]) in there]
    if not own:
        return []
    measured = [line for line in own if line["policy"] == "spe_context"]
    return [
        "## SpeContext: a list for each KV head, or one for all (figure 5a of its paper)",
        paragraph(
            "Equal terms, the head that is pruned from the model's draft; only the lists differ. "
            "The paper finds more hits with lists per head."
        ),
        *by_place(own, lists_table),
        source(measured),
    ]


def _attention(lines: Sequence[Line]) -> list[str]:
    """Figure 5a by the attention that is kept, and figure 6b, from teacher-forced derivations."""
    losses = [line for line in lines if line["measured"] == LOSS and line["weights"] == TRAINED]
    tops = {
        line["budget"]: line["lists"]["head_tokens"]
        for line in lines
        if line["measured"] == OVERLAP and line["weights"] == TRAINED
    }
    if not losses:
        return []
    about = losses[0]
    place = f"{about['samples']} derivations of {about['length']:,} tokens"
    return [
        "## SpeContext: what its lists keep, and how often they repeat (figures 5a and 6b)",
        paragraph(
            f"{place}, fed word by word under full attention, equal terms. Share of the attention "
            "of the layers that are not dense on the tokens of each list, %, means over texts "
            "with 95 % intervals (Student's t):"
        ),
        _kept(losses),
        paragraph(
            "Share of a step's list that is in the list so many steps later, %. *always read*: "
            "the share of the list that is first tokens and window, which repeats by itself. "
            "*chosen*: the share of the others that the next step has again. A sentence has four "
            "words, each of which looks for something else, so lists repeat more four steps "
            "later. *oracle lists* are "
            "the tokens of largest true weight in each layer and KV head, with no window; of "
            "these, *newest* are among the first and newest, and *chance* is what two random "
            "lists share. The paper says over 80 % one step later:"
        ),
        _repeats(losses, tops),
        source(losses),
    ]


def _kept(losses: Sequence[Line]) -> str:
    """A row per budget: the two kinds of lists, and the controls."""
    rows = []
    for budget in sorted({line["budget"] for line in losses}):
        forms = {line["settings"]["per_head"]: line for line in losses if line["budget"] == budget}
        cells = [_mass(forms.get(per_head), METHOD) for per_head in (True, False)]
        some = next(iter(forms.values()))
        rows.append(
            [f"{budget:,}", *cells, *(_mass(some, name) for name in (RECENT, RANDOM, ORACLE))]
        )
    return written(["budget", "per head", "one list", "*recent*", "*random*", "*oracle*"], rows)


def _mass(line: Line | None, who: str) -> str:
    """Mean over the sparse layers and texts, with its interval."""
    if line is None:
        return NOTHING
    sparse = [n for n, layer in enumerate(line["layers"]) if layer not in line["dense_layers"]]
    found = estimate(
        [statistics.fmean(text[n] for n in sparse) for text in line["losses"][who]["mass"]]
    )
    return f"{100 * found.mean:.1f}" + ("" if found.half is None else f" ± {100 * found.half:.1f}")


def _repeats(losses: Sequence[Line], tops: Mapping[int, Line]) -> str:
    """A row per budget and kind of list, a column per distance in steps."""
    rows = []
    for line in losses:
        settings, budget = line["settings"], line["budget"]
        always = settings["sink_size"] + settings["window_size"]
        after = [_mean([text[steps - 1] for text in line["repeats"]]) for steps in _STEPS]
        name = "a list per KV head" if settings["per_head"] else "one list"
        # One token leaves the window at each step, and has to be chosen like the others.
        again = (after[0] * budget - always + 1) / (budget - always + 1)
        extra = [percent(always / budget), percent(again), NOTHING]
        rows.append([f"{budget:,}", name, *map(percent, after), *extra])
    for budget, top in tops.items():
        after = [_mean([text[steps - 1] for text in top["by_steps"]]) for steps in _STEPS]
        extra = [NOTHING, NOTHING, percent(top["chance"])]
        newest = f"oracle lists, {percent(_mean(top['newest']))} newest"
        rows.append([f"{budget:,}", newest, *map(percent, after), *extra])
    rows.sort(key=lambda row: int(row[0].replace(",", "")))
    steps = [f"{n} step{'s' if n > 1 else ''}" for n in _STEPS]
    return written(["budget", "lists", *steps, "always read", "chosen", "chance"], rows)


def _mean(values: Sequence[float | None]) -> float:
    return statistics.fmean(value for value in values if value is not None)
