"""The section on wrong answers in docs/results/: what was read for the first wrong word."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.results_page import first_error
from benchmarks.results_page.text import image, paragraph, percent, written
from keyhole.eval.line_file import Line
from keyhole.eval.report.plot_style import NOTHING

#: What a method cannot read by design, even if a word needs it; not a measurement.
_HIDDEN = {
    "sliding_window": "tokens before the window",
    "streaming_llm": "tokens between the first tokens and the window",
    "quest": "pages whose upper bounds are below those of others",
    "delta": "pages that the selection layer does not attend to, even if a later layer would",
    "tidal_decode": "tokens that the choosing layer does not attend to",
    "omnikv": "tokens that the choosing layer does not attend to",
    "infllm": "blocks whose few representative tokens score low",
    "raas": "pages of the answer that no step has needed for long; beside a prompt that fills the "
    "budget, all of the answer but its newest page",
    "clusterkv": "tokens that are unlike the mean of their cluster",
    "shadowkv": "chunks that are unlike their mean key; of the prompt's other chunks it reads "
    "low-rank keys",
    "seer_attention_r": "pages whose gate score is lower than that of others",
    "spe_context": "tokens that the retrieval head does not select, in all layers",
}
_HEADS = (
    "method",
    "task",
    "length",
    "budget",
    "wrong",
    "looked at",
    "copied, computed",
    "tokens back",
    "read then",
    "read before",
)


def latest(lines: Sequence[Line]) -> list[Line]:
    """The newest line of each cell."""
    keys = ("task", "length", "method", "budget")
    return list({tuple(line[key] for key in keys): line for line in lines}.values())


def section(lines: Sequence[Line], picture: str | None) -> list[str]:
    """Paragraphs, a table and the figure; empty without lines."""
    if not lines:
        return []
    there = {line["method"] for line in lines}
    hidden = [f"- `{name}`: {text}" for name, text in _HIDDEN.items() if name in there]
    return [
        "## Where a configuration fails",
        paragraph(
            "Answers that full attention has right and a policy has wrong, at an eighth of the "
            "length, up to their first wrong word. *Copied*: the word repeats an earlier "
            "sentence of the prompt or the answer, which a step had to find, or it ends the "
            "answer, which depends on the question. *Computed*: it is a sum of what the two "
            "sentences before it say. *Tokens back*: the median distance to the beginning of "
            "what the word depends on. *Read then*: the share of this that the step read, "
            "averaged over the layers that do not read everything. *Read before*: the same for "
            "earlier words of this kind that were right. If the first is far below the second, "
            "the sparse layers did not see what the word depends on; if they are similar, there "
            "is another reason. It was not measured which layer would have needed it: layers "
            "that read everything always see it."
        ),
        written(_HEADS, [_row(line) for line in lines]),
        "What each of them cannot read, by its design:",
        "\n".join(hidden),
        *image(picture, "Tokens that steps of wrong answers read"),
        *([paragraph(_MAP)] if picture else []),
        "\n".join(f"- {text(line)}" for line in lines),
    ]


_KINDS = {
    first_error.COPIED: "which stands",
    first_error.COMPUTED: "which is computed from what begins",
    first_error.CLOSING: "which depends on the question,",
}
_MAP = (
    "The first wrong answer of each method, in the first layer that does not read everything. "
    "Each row is a decode step; dark cells were read. The line is the step of the first wrong "
    "word, and the marks above it are what that word needed."
)


def _row(line: Line) -> list[str]:
    found = line["found"]
    known = [one for one in found if one["tokens_back"] is not None]
    computed = sum(one["kind"] == first_error.COMPUTED for one in found)

    def mean(name: str) -> str:
        shares = [one[name] for one in known if one[name] is not None]
        return percent(statistics.fmean(shares) if shares else None, " %")

    back = f"{statistics.median(o['tokens_back'] for o in known):,.0f}" if known else NOTHING
    return [
        f"`{line['method']}`",
        f"`{line['task']}`",
        f"{line['length']:,}",
        f"{line['budget']:,}",
        f"{line['wrong']} of {line['samples']}",
        str(len(found)),
        f"{len(found) - computed}, {computed}",
        back,
        mean("read"),
        mean("read_before"),
    ]


def text(line: Line) -> str:
    """The first wrong answer of a cell in words."""
    name = f"`{line['method']}`, {line['budget']:,} of {line['length']:,} tokens, `{line['task']}`"
    if not line["found"]:
        return f"{name}: not wrong again, one sample at a time"
    one = line["found"][0]
    said = (
        f"{name}, sample {one['seed']}: after {one['word']} right words it writes "
        f"“{one['written']}” for “{one['right']}”"
    )
    if one["tokens_back"] is None:
        return said
    read = "" if one["read"] is None else f"; the step read {one['read']:.0%} of that"
    return f"{said}, {_KINDS[one['kind']]} {one['tokens_back']:,} tokens back{read}"
