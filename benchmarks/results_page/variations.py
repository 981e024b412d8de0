"""The sections of docs/results/ on settings that only one method has, with the same controls.

DELTA's window by budget (table 1 of its paper), SpeContext's list per head against one list for all
heads (figure 5a), offloading layers as sequences grow against offloading all (figure 11, C3), and
lengths of answers (DELTA, figure 4, left).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.results_page.controls import TASKS
from benchmarks.results_page.tasks import FULL
from benchmarks.results_page.text import image, kib, paragraph, percent, share, source, written
from keyhole.eval.comparisons import (
    ORACLE,
    RECENT,
    Comparison,
    compared,
    gain,
    gain_text,
    p_text,
)
from keyhole.eval.line_file import Line
from keyhole.eval.methods import CONTROL
from keyhole.eval.report.plot_style import NOTHING


def sections(lines: Mapping[str, Sequence[Line]], pictures: Mapping[str, str]) -> list[str]:
    """The sections that have lines; pictures: by name."""
    parts = []
    if own := lines.get("recency"):
        parts += recency_section(own)
    if own := lines.get("lists"):
        parts += [
            "## SpeContext: a list for each KV head, or one for all (figure 5a of its paper)",
            paragraph(
                "The same head and the same equal terms as above; only the lists differ. The "
                "paper finds more hits with lists per head. The head here was trained on this "
                "model by an objective of our own."
            ),
            *by_place(own, lists_table),
            source(own),
        ]
    if own := lines.get("adaptive"):
        parts += _adaptive(own[-1])
    if "lengths" in pictures:
        parts += [
            "## How long answers get (figure 4 of DELTA's paper, left)",
            paragraph(
                "The share of derivations that end within a given number of tokens, at equal "
                "terms. Under full attention an answer has the length that the task asks for; a "
                "method that loses its place stops early, or writes until it is stopped."
            ),
            *image(pictures["lengths"], "Distribution of the lengths of answers"),
        ]
    return parts


def by_place(lines: Sequence[Line], table: Callable[[Sequence[Line]], str]) -> list[str]:
    """A table for every task and length, with a line above it."""
    parts = []
    for task, length in dict.fromkeys((line["task"], line["length"]) for line in lines):
        own = [line for line in lines if (line["task"], line["length"]) == (task, length)]
        full = next((line for line in own if line["policy"] == FULL), None)
        share = NOTHING if full is None else percent(full["score"])
        parts += [
            f"{TASKS[task].title} (`{task}`), {length:,} tokens, {own[0]['samples']} samples; "
            f"full attention {share} %:",
            table(own),
        ]
    return parts


def recency_section(own: Sequence[Line]) -> list[str]:
    """DELTA's window by budget; own: the lines of one model."""
    return [
        "## DELTA: newest pages by budget (table 1 of its paper)",
        paragraph(
            "Layer 0 is dense and layer 1 selects, so DELTA's selection has to find the "
            "facts. Right answers in percent with 95 % intervals. A budget is divided "
            "between the newest pages (rows) and the pages with the best scores. A row "
            "whose budget is all newest pages is the recent control itself."
        ),
        *by_place(own, _recency),
        source(own),
    ]


def _recency(lines: Sequence[Line]) -> str:
    """A row per number of newest pages, a column per budget, controls last."""
    found = dict(zip(map(id, lines), compared(lines), strict=True))
    own = [line for line in lines if line.get(CONTROL) is None and line["policy"] != FULL]
    budgets = sorted({line["budget"] for line in own})
    cells = {(line["settings"]["recent_pages"], line["budget"]): line for line in own}
    rows = [
        [str(pages), *(right_share(cells.get((pages, budget))) for budget in budgets)]
        for pages in sorted({pages for pages, _ in cells})
    ]
    for name in (RECENT, ORACLE):
        shares = [
            next(
                (
                    percent(one.controls[name])
                    for line in own
                    if line["budget"] == budget
                    and (one := found[id(line)]) is not None
                    and name in one.controls
                ),
                NOTHING,
            )
            for budget in budgets
        ]
        rows.append([f"*{name}*", *shares])
    return written(["newest pages", *(f"budget {budget}" for budget in budgets)], rows)


def lists_table(lines: Sequence[Line]) -> str:
    """A row per budget: both forms, and the difference on the same samples."""
    found = dict(zip(map(id, lines), compared(lines), strict=True))
    own = [line for line in lines if line.get(CONTROL) is None and line["policy"] != FULL]
    rows = []
    for budget in sorted({line["budget"] for line in own}):
        pair = {line["settings"]["per_head"]: line for line in own if line["budget"] == budget}
        if len(pair) < 2:
            continue
        difference = gain(pair[True]["scores"], pair[False]["scores"])
        rows.append(
            [
                f"{budget:,}",
                right_share(pair[True]),
                right_share(pair[False]),
                gain_text(difference),
                p_text(difference),
                *(_control(found[id(pair[True])], name) for name in (RECENT, ORACLE)),
            ]
        )
    heads = ["budget", "per head, %", "one list, %", "difference", "p", "*recent*", "*oracle*"]
    return written(heads, rows)


def _adaptive(line: Line) -> list[str]:
    """A row per quarter of the answers."""
    adaptive, offloaded = (list(line["parts"][0]["moved_bytes"])[i] for i in range(2))
    rows = [
        [
            " to ".join(f"{length:,}" for length in part["lengths"]),
            " to ".join(map(str, part["offloaded_layers"])),
            kib(part["moved_bytes"][adaptive]),
            kib(part["moved_bytes"][offloaded]),
            f"{part['ratio']:.2f} ({part['low']:.2f} to {part['high']:.2f})",
        ]
        for part in line["parts"]
    ]
    heads = [
        "tokens per sequence",
        "layers offloaded, adaptive",
        "KiB loaded per step, adaptive",
        "all offloaded",
        "step time, adaptive / all offloaded",
    ]
    return [
        "## SpeContext: layers offloaded as sequences grow, or all (figure 11 of its paper)",
        paragraph(
            f"{line['texts']} derivations of {line['words']:,} tokens at once under a budget of "
            f"{line['budget']}, in {line['share']:.0%} of the memory that all their keys and "
            "values need. Both engines write the same tokens; their steps take turns. Times are "
            "medians over pairs of neighbouring steps, with quartiles. Layers are offloaded to a "
            "file that stays in the page cache, so loading costs little here; on a slower bus the "
            "bytes matter more."
        ),
        written(heads, rows),
        source([line]),
    ]


def _control(found: Comparison | None, name: str) -> str:
    return NOTHING if found is None else percent(found.controls.get(name))


def right_share(line: Line | None) -> str:
    """Right answers with a Wilson interval."""
    if line is None:
        return NOTHING
    return share(sum(score == 1 for score in line["scores"]), len(line["scores"]))
