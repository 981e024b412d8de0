"""The pages of docs/results/ about right answers and their cost.

`python -m benchmarks.evaluation --render` writes them from the stored lines; a cell that was not
measured is a dash in a table and white in a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.results_page import (
    adaptive,
    bundled_models,
    controls,
    controls_pictures,
    hops_figures,
    variations,
)
from benchmarks.results_page import errors as results_errors
from benchmarks.results_page import pictures as results_pictures
from benchmarks.results_page import scope as results_scope
from benchmarks.results_page.cells import (
    ASKED,
    TaskCells,
    column_marks,
    columns,
    methods,
    named,
    of_task,
)
from benchmarks.results_page.text import (
    folded,
    image,
    kib,
    month,
    paragraph,
    percent,
    written,
)
from keyhole.eval.line_file import Line, LineFile
from keyhole.eval.report.cells import Cell, cells
from keyhole.eval.report.plot_style import NOTHING

FOLDER = "results"
LINES, ERRORS, SCOPE = "evaluation.jsonl", "evaluation-errors.jsonl", "dense-layers.jsonl"
#: The budget and length at which each policy's configuration is shown.
_SHOWN = (256, 2048)
_WRITTEN_BY = (
    "<!-- Written by `python -m benchmarks.evaluation --render`; measure again instead. -->"
)


def write(results: Path, docs: Path) -> None:
    """Rewrites these pages and their figures; results: the folder of the lines."""
    lines, errors = stored(results / LINES), stored(results / ERRORS)
    scope = stored(results / SCOPE)
    claims = {name: stored(results / file) for name, file in controls.FILES.items()}
    for name, text in pages(lines, errors, scope, claims).items():
        (docs / FOLDER / name).write_text(text)
    latest = results_errors.latest(errors)
    controls_pictures.write(claims, docs / "images")
    results_pictures.write(measured(lines), latest, docs / "images", newest([*lines, *errors]))


def stored(path: Path) -> list[Line]:
    """The lines of a file; none if it does not exist."""
    return LineFile(path).lines


def newest(lines: Sequence[Line]) -> str:
    """The date of the last line, which is stored in the figures."""
    return max((str(line["date"]) for line in lines), default="")


def measured(lines: Sequence[Line]) -> list[Cell]:
    """Cells of the page's tasks, named by method; adaptive budgets have separate names.

    Of two lines of a cell, the later one counts.
    """
    return [named(cell) for cell in cells(lines) if cell.place.task in ASKED]


def pages(
    lines: Sequence[Line],
    errors: Sequence[Line] = (),
    scope: Sequence[Line] = (),
    claims: Mapping[str, Sequence[Line]] | None = None,
) -> dict[str, str]:
    """File -> text of the pages that have lines.

    scope: the lines for `scope`. claims: the lines for `controls`, by part.
    """
    claims = claims or {}
    pictures = controls_pictures.names(claims)
    about = [
        *results_scope.section(scope),
        *bundled_models.tasks_section(claims.get("tell", ())),
        *bundled_models.layers_section(claims.get("layers", ())),
        *bundled_models.far_section(claims.get("far", ())),
    ]
    found = {"scope.md": ("What the models can and cannot tell", about)}
    for prefix, page in controls.PAGES.items():
        parts = controls.sections(page.terms, claims, pictures)
        if prefix:
            parts += hops_figures.sections(claims, pictures, prefix)
        else:
            parts += variations.sections(claims, pictures)
        intro = [paragraph(page.about)] if parts else []
        found[page.file] = page.title, [*intro, *parts]
    if lines:
        title = f"Configurations as of {month(newest(lines))}"
        found["configurations.md"] = title, _configurations(lines, errors)
    return {
        name: "\n\n".join([f"{_WRITTEN_BY}\n\n# {title}", *parts]) + "\n"
        for name, (title, parts) in found.items()
        if parts
    }


def _configurations(lines: Sequence[Line], errors: Sequence[Line]) -> list[str]:
    """What was measured before there were controls."""
    found, errors = measured(lines), results_errors.latest(errors)
    pictures = results_pictures.names(found, errors)
    parts = [
        paragraph(
            f"{len(found)} cells, measured before there were controls. Dense layers, windows "
            "and tuning are **unequal**: the tables compare these configurations, not their "
            "selection rules. No row shows that one method selects better than another."
        ),
        *_unequal(found),
        paragraph(
            "The same samples for every policy, greedily, with the code of `keyhole eval` "
            "([evaluation](../evaluation.md) says what is counted). A length is that of prompt and "
            "answer together; a budget is the number of tokens that a step may read in a sparse "
            "layer. An answer counts as right only if every word is. Columns are budgets, each "
            f"after its length; {NOTHING} was not measured."
        ),
        *image(pictures.heat_map, "Right answers by configuration, length and budget"),
    ]
    for task in ASKED:
        if own := of_task(found, task):
            parts += _task(task, own, pictures.pareto.get(task))
    parts += adaptive.section(found)
    return [*parts, *results_errors.section(errors, pictures.maps), _about(lines)]


def _unequal(found: Sequence[Cell]) -> list[str]:
    """How the configurations differ, and a table of their settings."""
    budget, length = _SHOWN
    table = results_scope.configurations(found, budget, length)
    if not table:
        return []
    return [
        "\n".join(
            [
                "- `delta`: its layers were measured on this model (`keyhole calibrate`). No other "
                "policy was tuned.",
                "- `tidal_decode`, `omnikv`: the newest token is their whole window, where "
                "`delta` has an eighth of the budget.",
                "- `raas`: the prompt counts in its budget. Where that is longer than the budget, "
                "it keeps only one generated page, and budgets make no difference.",
                "- `infllm`: a block was represented by the keys farthest from its mean; the paper "
                "takes the tokens that queries nearby attend to most.",
                "- `spe_context`: its head was trained on this model by objectives of our own, "
                "its attention and then the effect of a selection on its predictions. The paper's "
                "is pruned from a draft model; such a head was not tested here.",
                "- `shadowkv`: what was `local_chunks` is `window_size` today, in tokens.",
            ]
        ),
        f"At {length:,} tokens and a budget of {budget:,}:",
        table,
    ]


def _task(task: str, own: list[Cell], picture: str | None) -> list[str]:
    asked = ASKED[task]
    caption = f"Right answers against bytes read per step, by configuration: {asked.title.lower()}"
    return [
        f"## {asked.title} (`{task}`)",
        paragraph(f"{asked.about} {_samples(own)}"),
        "Right answers, %:",
        _table(own, lambda cell, _: percent(cell.score)),
        *image(picture, caption),
        folded(
            "Keys read, bytes per step, length of answers",
            "Share of all keys that a step read, including layers that read everything, %:",
            _table(own, lambda cell, _: percent(cell.read_share)),
            "KiB read per step: keys, values, and what the policy reads in order to select:",
            _table(own, lambda cell, _: kib(cell.bytes_per_step)),
            "Words written, relative to full attention (below 1: answers stop early):",
            _table(own, _length),
        ),
    ]


def _table(own: list[Cell], text: Callable[[Cell, Cell | None], str]) -> str:
    """A row per method, a column per length and budget; full attention in every column."""
    table, heads = TaskCells(own), columns(own)
    rows = [
        [
            f"`{name}`",
            *(
                NOTHING if cell is None else text(cell, table.full(cell.place.length))
                for cell in table.row(name, heads)
            ),
        ]
        for name in methods(own)
    ]
    return written(["", *column_marks(heads, "{length:,}: {budget:,}")], rows)


def _length(cell: Cell, full: Cell | None) -> str:
    if full is None or not cell.tokens_generated or not full.tokens_generated:
        return NOTHING
    return f"{cell.tokens_generated / full.tokens_generated:.2f}"


def _samples(own: list[Cell]) -> str:
    """The number of samples of the cells of each length."""
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
