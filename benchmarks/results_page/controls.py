"""Methods and their controls in docs/results/, a page per model: separate tables per terms.

The lines are those of `keyhole eval --controls`, in one file per part; `python -m
benchmarks.claims` measures them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.results_page.tasks import ASKED, FULL, PageTask
from benchmarks.results_page.text import folded, image, paragraph, percent, source, written
from keyhole.eval import comparisons
from keyhole.eval.comparisons import ORACLE, RANDOM, RECENT, Comparison, compared
from keyhole.eval.line_file import Line
from keyhole.eval.methods import CONTROL
from keyhole.eval.report.plot_style import NOTHING

#: Before the name of a part that is measured on `tiny-hops`.
HOPS = "hops-"
#: The same for `keyhole-scratch`, which is not in the wheel.
SCRATCH = "scratch-"
#: The file of each part, in the folder of the results.
FILES = (
    {name: f"claims-{name}.jsonl" for name in ("equal", "tuned", "published", "recency", "lists")}
    | {
        "adaptive": "adaptive-layers.jsonl",
        "layers": "one-sparse-layer.jsonl",
        "far": "far-hops.jsonl",
        "tell": "can-tell.jsonl",
    }
    | {
        prefix + name: f"{prefix}{name}.jsonl"
        for prefix in (HOPS, SCRATCH)
        for name in (
            *("equal", "tuned", "published", "recency"),
            *("placements", "calibration", "attention"),
        )
    }
    # Its other form is a method of the comparison at equal terms, with the same controls.
    | {prefix + "lists": f"{prefix}equal.jsonl" for prefix in (HOPS, SCRATCH)}
)
#: Anchor of the section on DELTA's selection layers.
_PLACED_AT = "delta-where-its-layers-select-section-5-of-its-paper"
#: Title and explanation of each comparison, in the order of the page.
TERMS = {
    "equal": (
        "Equal terms",
        "Layers 0 and 1 are dense for every method, and those that select once for several layers "
        "select in layer 1. Everywhere else 16 first tokens and the newest quarter of the budget "
        "are always read, and the budget counts every token. `sliding_window` has no first tokens "
        "by definition. `raas` evicts a page from all layers at once and cannot keep layers "
        "dense, so it is not here. The head of `spe_context` was trained on this model, by "
        "objectives of our own; no other method was trained.",
    ),
    "tuned": (
        "Tuned",
        "Every method with the settings that did best in the same number of trials on seeds that "
        "are not among these samples: two dense layers of its choice, and its own settings. The "
        "controls have the dense layers that the method chose. The head of `spe_context` was "
        "trained on this model.",
    ),
    "published": (
        "As published",
        "Every method with the settings of its paper or its authors' code. Dense layers, "
        "windows and what is read beyond the budget differ, so compare each row with its own "
        "controls only, not with other rows.",
    ),
}
_HOPS_TERMS = {
    HOPS + "equal": (
        "Equal terms",
        "Layers 0 and 1 of 8 are dense for every method, and those that select once for several "
        "layers select in layer 1. Everywhere else 16 first tokens and the newest quarter of the "
        "budget are always read, and the budget counts every token. `raas`, `r_kv` and `snapkv` "
        "evict a page from all layers at once and cannot keep layers dense, so they are not here. "
        "The head of `spe_context` is pruned from the model's draft, which was trained on this "
        "model; no other method was trained. `share_group=False` selects for each query head, "
        "as the authors do, and not for the heads of a group together.",
    ),
    HOPS + "tuned": (
        "Tuned",
        "Every method with the settings that did best in the same number of trials on seeds that "
        "are not among these samples: two dense layers of its choice, and its own settings. The "
        "controls have the dense layers that the method chose.",
    ),
    HOPS + "published": TERMS["published"],
}
_SCRATCH_TERMS = {
    SCRATCH + "equal": (
        "Equal terms",
        "The terms are those of [`tiny-hops`](tiny-hops.md#equal-terms). At the four places of "
        "2,048 and 4,096 words an eighth of the text can tell methods apart. The retrieval head "
        "of `spe_context` is pruned from the model's draft.",
    ),
    SCRATCH + "tuned": _HOPS_TERMS[HOPS + "tuned"],
    SCRATCH + "published": (
        TERMS["published"][0],
        f"{TERMS['published'][1]} The head of `spe_context` is pruned from the model's draft, as "
        "in the paper, and no layer is dense.",
    ),
}
_READING = "[How to read the tables](index.md#controls-intervals-and-tests)."


class ModelPage(NamedTuple):
    """A page of docs/results/: a model, and the terms of its comparisons."""

    file: str
    title: str
    about: str
    terms: Mapping[str, tuple[str, str]]


#: Before the names of a model's parts -> its page.
PAGES = {
    "": ModelPage(
        "tiny.md",
        "Methods and their controls on `tiny`",
        "The first bundled model: 6 layers, of which [layers 0 to 2 look everything "
        f"up](scope.md#what-tiny-can-and-cannot-tell). {_READING}",
        TERMS,
    ),
    HOPS: ModelPage(
        "tiny-hops.md",
        "Methods and their controls on `tiny-hops`",
        "The second bundled model has 8 layers, and in one of its tasks layers 3 and 4 look up "
        "what earlier ones have found. With layers 0 and 1 dense and an eighth of the text, "
        "neither the newest nor random tokens answer anything in these tasks, and the oracle "
        "choice nearly everything: **here a method is right only if it selects well in the "
        f"other layers**. {_READING}",
        _HOPS_TERMS,
    ),
    SCRATCH: ModelPage(
        "keyhole-scratch.md",
        "Methods and their controls on `keyhole-scratch`",
        "A model of 8 layers that learned from random weights where it looks things up. It is "
        "in `recipes/tiny_model` of a clone, and not in the package. The order of methods "
        "depends on task and budget, and `tiny_walk2` needs layer 3 to be dense rather than a "
        f"selection ([below](#{_PLACED_AT})). {_READING}",
        _SCRATCH_TERMS,
    ),
}
#: How a line describes tokens read outside the budget, and how the tables do.
OUTSIDE, EXTRA = "outside_budget", "extra"
_READ = "The text is read with full attention; the question and the answer run under the policy."
#: The tasks, in the order of the page.
TASKS = {
    "tiny_derive": ASKED["tiny_derive"],
    "tiny_walk": PageTask(
        title="A ring of names",
        setup="prompt",
        about="Facts in random order tell which name follows which, and the model writes the ring "
        "down: one look-up in each step. About half of the text is the model's own.",
    ),
    "tiny_walk2": PageTask(
        title="Every second name of a ring",
        setup="prompt",
        about="A ring of names in random order is walked: of two names that follow each other "
        "only the second one is written, so each word needs two look-ups, one after the other, in "
        "one step. About half of the text is the model's own.",
    ),
    "tiny_vartrack": PageTask(
        title="Chains of names",
        setup="question",
        about=f"A name leads to a name, and so on to a value; the links are scattered. {_READ}",
    ),
    "tiny_reference": PageTask(
        title="A fact by reference",
        setup="question",
        about=f"A document states a fact by referring to an earlier document. {_READ}",
    ),
}
#: The probability that any of a table's gains in bold is due to chance.
_LEVEL = 0.05
_Key = tuple[int, int]
_Text = Callable[[Line, Comparison | None], str]


def sections(
    terms: Mapping[str, tuple[str, str]],
    lines: Mapping[str, Sequence[Line]],
    pictures: Mapping[str, str],
) -> list[str]:
    """The comparisons of these terms that have lines; pictures: their figures, by name."""
    parts = []
    for name, (title, about) in terms.items():
        if own := lines.get(name):
            parts += [f"## {title}", paragraph(about)]
            for task in (task for task in TASKS if any(line["task"] == task for line in own)):
                parts += _task(task, [line for line in own if line["task"] == task])
            caption = f"Right answers against bytes read per step, {title.lower()}"
            parts += image(pictures.get(name), caption)
            parts += [*_settings(name, own), source(own)]
    return parts


def _task(task: str, lines: Sequence[Line]) -> list[str]:
    asked, beside = TASKS[task], dict(zip(map(id, lines), compared(lines), strict=True))
    samples = sorted({int(line["samples"]) for line in lines})
    shown = " to ".join(f"{number:,}" for number in dict.fromkeys((samples[0], samples[-1])))
    keys = sorted({(line["length"], line["budget"]) for line in lines if line["budget"]})
    bold = _significant([beside[id(line)] for line in lines if not line.get(OUTSIDE)])

    def right(line: Line, _: Comparison | None) -> str:
        return percent(line["score"])

    def gain(line: Line, found: Comparison | None) -> str:
        if line.get(OUTSIDE):
            return EXTRA
        if found is None or found.gain is None:
            return NOTHING
        if found.can_tell is False:
            return "cannot tell"
        text = f"{100 * found.gain.points:+.0f}"
        return f"**{text}**" if id(found) in bold else text

    def distance(line: Line, found: Comparison | None) -> str:
        if line.get(OUTSIDE):
            return EXTRA
        return NOTHING if found is None else percent(found.distance)

    details = comparisons.controls_table(_sorted(lines), [])
    return [
        f"### {asked.title} (`{task}`)",
        paragraph(f"{asked.about} {shown} samples in a cell. Columns: length, then budget."),
        "Right answers, %:",
        _table(lines, keys, beside, right, with_controls=True),
        "Gain over its own recent control, points:",
        _table(lines, keys, beside, gain),
        "Distance to the oracle, points:",
        _table(lines, keys, beside, distance),
        folded(
            "Intervals, keys and bytes read, time of a step",
            details.title,
            written(details.heads, [[_cell(text) for text in row] for row in details.rows]),
        ),
    ]


def _table(
    lines: Sequence[Line],
    keys: Sequence[_Key],
    beside: Mapping[int, Comparison | None],
    text: _Text,
    *,
    with_controls: bool = False,
) -> str:
    """A row per method, a column per length and budget."""
    heads = ["", *_column_marks(keys, "{length:,}: {budget:,}")]
    own = {
        (line["method"], line["length"], line["budget"]): line
        for line in lines
        if line.get(CONTROL) is None
    }
    rows = []
    if with_controls:
        rows.append([f"`{FULL}`", *(_full(lines, length) for length, _ in keys)])
        if controls := _shared_controls(lines, keys, beside):
            rows += controls
    for name in dict.fromkeys(name for name, *_ in own if name != FULL):
        cells = [own.get((name, *key)) for key in keys]
        rows.append(
            [
                f"`{name}`",
                *(NOTHING if line is None else text(line, beside[id(line)]) for line in cells),
            ]
        )
    return written(heads, rows)


def _shared_controls(
    lines: Sequence[Line], keys: Sequence[_Key], beside: Mapping[int, Comparison | None]
) -> list[list[str]]:
    """A row per control, if all methods of a column have the same controls."""
    rows = []
    for name in (RECENT, RANDOM, ORACLE):
        row = [f"*{name}*"]
        for length, budget in keys:
            found = {
                comparison.controls[name]
                for line in lines
                if (line["length"], line["budget"]) == (length, budget)
                and (comparison := beside[id(line)]) is not None
                and name in comparison.controls
            }
            if len(found) > 1:
                return []
            row.append(percent(found.pop()) if found else NOTHING)
        rows.append(row)
    return rows


def _full(lines: Sequence[Line], length: int) -> str:
    found = [line for line in lines if line["policy"] == FULL and line["length"] == length]
    return percent(found[-1]["score"]) if found else NOTHING


def _significant(found: Any) -> set[int]:
    """The comparisons whose gain or loss is significant, corrected by Holm's method."""
    tests = sorted(
        (one.gain.p, id(one)) for one in found if one and one.gain and one.can_tell is not False
    )
    good: set[int] = set()
    for rank, (p, which) in enumerate(tests):
        if p > _LEVEL / (len(tests) - rank):
            break
        good.add(which)
    return good


def _sorted(lines: Sequence[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: (line["length"], line["budget"] or 0))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _settings(terms: str, lines: Sequence[Line]) -> list[str]:
    """The settings of every method, collapsed; what they have in common is stated above."""
    if terms.endswith("equal"):
        return []
    texts: dict[str, str] = {}
    for line in lines:
        if line.get(CONTROL) is None and line["policy"] != FULL:
            told = {k: v for k, v in line["settings"].items() if v is not None}
            shown = " ".join(f"{k}={shlex.quote(str(v))}" for k, v in told.items())
            texts[f"{line['method']} {line['budget']} {line['length']}"] = shown
    rows = [[f"`{name}`", text] for name, text in texts.items()]
    table = written(["method, budget, length", "settings"], rows)
    return [folded("Settings", table)]


def _column_marks(heads: Sequence[tuple[int, int]], first: str) -> list[str]:
    """The budgets; first: formats the first one of each length, with `length` and `budget`."""
    begun = dict(reversed(heads))  # the first budget of each length
    return [
        (first if begun[length] == budget else "{budget:,}").format(length=length, budget=budget)
        for length, budget in heads
    ]
