"""The tables of docs/samkv.md at equal budgets: every method, and selections against their control.

Written by `python -m benchmarks.samkv --render` from the stored lines, between two comments for
each bundled model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import read_lines
from benchmarks.document_reuse.methods import EQUAL, PAIRS
from benchmarks.document_reuse.page import PAGE, Line, Lines
from benchmarks.results_page.text import between, share, written
from keyhole.eval.comparisons import gain

#: The comments around the tables of each model.
TINY, HOPS, SCRATCH = (
    (f"<!-- equal budgets{of}: python -m benchmarks.samkv --render -->\n",
     f"<!-- end of equal budgets{of} -->")
    for of in ("", " of tiny-hops", " of keyhole-scratch-1")
)  # fmt: skip

#: The comments around the table of all models together.
TOGETHER = (
    "<!-- equal budgets, all models: python -m benchmarks.samkv --render -->\n",
    "<!-- end of equal budgets, all models -->",
)
_QUESTIONS = {"one": "one fact", "two_hop": "two hops", "needs_each_other": "each other"}
_HEADS = {
    "one/anywhere": "one, anywhere",
    "two_hop/anywhere": "two hops, anywhere",
    "needs_each_other/anywhere": "each other, anywhere",
    "one/middle": "one",
    "one/middle/subjects": "one, subjects",
    "two_hop/middle": "two hops",
    "two_hop/middle/subjects": "two hops, subjects",
    "needs_each_other/middle": "each other",
    "needs_each_other/middle/subjects": "each other, subjects",
}


def stored(path: Path) -> Lines:
    """The newest line of each cell."""
    return {(line["kind"], line["shape"]): line for line in read_lines(path)}


def write(lines: Lines, docs: Path, comments: tuple[str, str] = TINY) -> None:
    """Rewrites the tables of the page between these comments."""
    page = docs / PAGE
    page.write_text(between(page.read_text(), *comments, render(lines)))


def write_together(models: Sequence[Lines], docs: Path) -> None:
    """Rewrites the table of all models."""
    page = docs / PAGE
    page.write_text(between(page.read_text(), *TOGETHER, together(models)))


def render(lines: Lines) -> str:
    """Shares of right answers per shape, then each selection and its control."""
    parts = []
    for shape in sorted({shape for _, shape in lines}):
        found = {kind: lines[kind, shape] for kind in _HEADS if (kind, shape) in lines}
        number, words = shape.split("x")
        parts += [f"### {number} documents of {words} words", _shares(found), _gains(found)]
        parts.append(_about(list(found.values())))
    return "\n\n".join(parts) + "\n"


def _shares(found: dict[str, Line]) -> str:
    """Right answers with Wilson intervals; kept and recomputed tokens as means over the kinds."""
    rows = []
    for name in EQUAL:
        own = [_result(line, name) for line in found.values()]
        cells = [share(sum(result["right"]), len(result["right"])) for result in own]
        cells += [
            f"{sum(result[field] for result in own) / len(own):.1%}"
            for field in ("sequence_ratio", "recompute_ratio")
        ]
        rows.append([name, *cells])
    return written(["method", *(_HEADS[kind] for kind in found), "kept", "computed"], rows)


def _gains(found: dict[str, Line]) -> str:
    """Differences of pairs in points, with their interval and the p-value of the exact test."""
    rows = []
    for name, other in PAIRS:
        cells = []
        for line in found.values():
            own, theirs = (_result(line, which)["right"] for which in (name, other))
            cells.append(_gain(own, theirs))
        rows.append([f"{name} than {other}", *cells])
    return written(["as many tokens kept: points more", *(_HEADS[kind] for kind in found)], rows)


def together(models: Sequence[Lines]) -> str:
    """Each selection and its control on the questions of all models, by kind of question."""
    rows = []
    for pair in PAIRS:
        cells = []
        for question in _QUESTIONS:
            own, theirs = (
                [
                    right
                    for lines in models
                    for (kind, _), line in lines.items()
                    if kind.split("/")[0] == question
                    for right in _result(line, name)["right"]
                ]
                for name in pair
            )
            if not own:
                return ""
            cells.append(f"{sum(own)} and {sum(theirs)} of {len(own)}: {_gain(own, theirs)}")
        rows.append([" and ".join(pair), *cells])
    return written(["as many tokens kept", *_QUESTIONS.values()], rows) + "\n"


def _gain(own: Sequence[int], theirs: Sequence[int]) -> str:
    """Points more, with their interval and p."""
    more = gain(own, theirs)
    points, low, high = (100 * value for value in (more.points, more.low, more.high))
    return f"{points:+.0f} ({low:+.0f} to {high:+.0f}), p {more.p:.2g}"


def _result(line: Line, name: str) -> Line:
    result: Line = next(result for result in line["results"] if result["method"] == name)
    return result


def _about(lines: list[Line]) -> str:
    """Command, machine and date."""
    line = lines[-1]
    machine, versions = line["machine"], line["versions"]
    tokens = sum(line["results"][0]["tokens"] for line in lines) / len(lines)
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    commands = ", ".join(dict.fromkeys(f"`{line['command']}`" for line in lines))
    return (
        f"{tokens:,.0f} tokens a prompt; {line['items']} questions of each kind, blocks of "
        f"{line['block_size']} tokens; 95 % intervals (Wilson's; Newcombe's of differences) and "
        f"McNemar's exact test.\n{machine['cpu']}, {machine['cores']} cores; torch "
        f"{versions['torch']}, transformers {versions['transformers']}; {line['date'][:10]}, "
        f"commit {commits}; {commands}."
    )
