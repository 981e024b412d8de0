"""The section of docs/results.md on where the bundled models look things up.

Each layer in turn reads the first and the newest tokens only, and all others everything: if the
answers are wrong then, that layer looks something up. The lines are those of `keyhole eval` with a
`streaming_llm` per layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.results_page.controls import source
from benchmarks.results_page.text import paragraph, percent, written
from keyhole.eval.line_file import Line


def section(lines: Sequence[Line]) -> list[str]:
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
        "### Which layers look something up",
        paragraph(
            f"One layer at a time reads {line['budget']} of {line['length']:,} tokens, the first "
            "and the newest ones, and all others read everything. Right answers, %, by the number "
            f"of that layer, of {line['samples']} samples. A layer with few right answers looks "
            "something up that the task needs. `keyhole-hops` began as copies of layers of "
            "`keyhole-tiny`, and single look-ups have stayed in the layers that do them there: so "
            "at equal terms derivations and rings tell how well a method selects for layer 2, and "
            "only `tiny_walk2` how well for later layers."
        ),
        written(["model", "task", *(str(n) for n in range(width))], rows),
        source(lines),
    ]


def _sparse(line: Line) -> int:
    """The layer that does not read everything."""
    dense = set(line["settings"]["full_layers"])
    return next(n for n in range(len(dense) + 1) if n not in dense)
