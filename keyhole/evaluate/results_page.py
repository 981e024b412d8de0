"""What docs/results.md says of right answers and their cost, between two comments.

Written by `python -m benchmarks.evaluation --render` from the stored lines, with whatever cells
there are: one that was not measured is a dash in a table, and white in a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from keyhole.evaluate import results_claims, results_errors, results_pictures
from keyhole.evaluate.cells import Cell, cells, read_lines
from keyhole.evaluate.line_file import Line
from keyhole.evaluate.looks import NOTHING
from keyhole.evaluate.results_cells import ASKED, FULL, Table, columns, methods, named, of_task
from keyhole.evaluate.results_text import image, kib, paragraph, percent, ratio, written

PAGE = "results.md"
LINES, ERRORS = "evaluation.jsonl", "evaluation-errors.jsonl"
BEGIN = "<!-- evaluation: python -m benchmarks.evaluation --render -->\n"
END = "<!-- end of evaluation -->\n"


def write(results: Path, docs: Path) -> None:
    """Rewrites the part of the page and its pictures; results: the folder of the lines."""
    page, lines, errors = docs / PAGE, stored(results / LINES), stored(results / ERRORS)
    head, rest = page.read_text().split(BEGIN)
    _, tail = rest.split(END)
    page.write_text(f"{head}{BEGIN}{render(lines, errors)}{END}{tail}")
    latest = results_errors.latest(errors)
    results_pictures.write(measured(lines), latest, docs / "images", newest([*lines, *errors]))


def stored(path: Path) -> list[Line]:
    """The lines of a file; none where there is no file."""
    return read_lines(path) if path.is_file() else []


def newest(lines: Sequence[Line]) -> str:
    """The date of the last line, which pictures have in them."""
    return max((str(line["date"]) for line in lines), default="")


def measured(lines: Sequence[Line]) -> list[Cell]:
    """Cells of the page's tasks, named by their method; adaptive budgets have names of their own.

    Of two lines of a cell the later counts.
    """
    return [named(cell) for cell in cells(lines) if cell.place.task in ASKED]


def render(lines: Sequence[Line], errors: Sequence[Line]) -> str:
    """All of it; nothing without lines."""
    found, errors = measured(lines), results_errors.latest(errors)
    if not found:
        return ""
    pictures = results_pictures.names(found, errors)
    parts = [
        "## Right answers, and what they cost",
        paragraph(
            "The bundled model answers the same samples under every policy, greedily, with the "
            "code of `keyhole eval` ([evaluation.md](evaluation.md) says what is counted). A "
            "length is that of prompt and answer together; a budget is the tokens that a step may "
            "read in a layer that is sparse (`raas` keeps all of a prompt, whatever its budget). "
            "An answer is right to its last word, or wrong. "
            f"Columns are budgets, each after its length; {NOTHING} was not measured."
        ),
        *image(pictures.heat_map, "Right answers by method, length and budget"),
    ]
    for task in ASKED:
        if own := of_task(found, task):
            parts += _task(task, own, pictures.pareto.get(task))
    parts += results_claims.adaptive(found)
    parts += results_errors.section(errors, pictures.maps)
    return "\n\n".join([*parts, _about(lines)]) + "\n\n"


def _task(task: str, own: list[Cell], picture: str | None) -> list[str]:
    asked = ASKED[task]
    claims = results_claims.claims(own) if asked.is_long else []
    return [
        f"### {asked.title} (`{task}`)",
        paragraph(f"{asked.about} {_samples(own)}"),
        *(["What was to be shown:", "\n".join(map(str, claims))] if claims else []),
        "Right answers, %:",
        _table(own, lambda cell, _: percent(cell.score)),
        *image(picture, f"Right answers against bytes read per step, {asked.title.lower()}"),
        "<details><summary>Keys read, bytes per step, length of answers</summary>",
        "Share of all keys that a step read, those of layers that read everything among them, %:",
        _table(own, lambda cell, _: percent(cell.read_share)),
        "KiB read per step: keys, values, and what the policy chooses by:",
        _table(own, lambda cell, _: kib(cell.bytes_per_step)),
        "Words written, by those under full attention (below 1: answers stop early):",
        _table(own, _length),
        "</details>",
    ]


def _table(own: list[Cell], text: Callable[[Cell, Cell | None], str]) -> str:
    """A row for each method, a column for each length and budget; full attention in all of them."""
    table, heads = Table(own), columns(own)
    top = [""]
    for number, (length, budget) in enumerate(heads):
        is_first = number == 0 or heads[number - 1][0] != length
        top.append(f"{length:,}: {budget:,}" if is_first else f"{budget:,}")
    rows = []
    for name in methods(own):
        texts = []
        for length, budget in heads:
            full = table.full(length)
            cell = full if name == FULL else table.get(name, length, budget)
            texts.append(NOTHING if cell is None else text(cell, full))
        rows.append([f"`{name}`", *texts])
    return written(top, rows)


def _length(cell: Cell, full: Cell | None) -> str:
    found = ratio(cell, full)
    return NOTHING if found is None else f"{found:.2f}"


def _samples(own: list[Cell]) -> str:
    """How many samples the cells of each length have."""
    by_length: dict[int, set[int]] = {}
    for cell in own:
        by_length.setdefault(cell.place.length, set()).add(cell.samples or 0)
    texts = [
        f"{min(found)}{'' if len(found) == 1 else f' to {max(found)}'} at {length:,} tokens"
        for length, found in sorted(by_length.items())
    ]
    return f"Samples in a cell: {', '.join(texts)}."


def _about(lines: Sequence[Line]) -> str:
    line = max(lines, key=lambda line: str(line["date"]))
    machine, versions = line["machine"], line["versions"]
    commits = dict.fromkeys(str(at["commit"]) for at in lines)
    hours = sum(at.get("cpu_seconds", 0) for at in lines) / 3600
    return paragraph(
        f"{line['model']}; {len(lines)} lines in `benchmarks/results/{LINES}`, each with its "
        f"command; {hours:.1f} hours of one core. {machine['cpu']}; torch {versions['torch']}, "
        f"transformers {versions['transformers']}; until {newest(lines)[:10]}, commit "
        f"{', '.join(commits)}; `python -m benchmarks.evaluation`."
    )
