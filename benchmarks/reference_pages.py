"""Writes the generated documents: `python -m benchmarks.reference_pages`.

    docs/cli.md         every command with its help
    docs/methods.md     every policy, prefill policy and reuse method: the idea, the cost, the
                        differences from the paper, the settings
    docs/models.md      the families of models that run exactly; measured, so only with --families
    docs/python-api.md  its tables of settings; the rest is not generated

Tests compare them with `render()` and `with_settings()`. --time-families measures how long the
comparison of each family takes and adds a line to benchmarks/results/exactness-gate.jsonl, which
docs/models.md repeats.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from tqdm.auto import tqdm

import benchmarks
from benchmarks.command import header, target
from keyhole.cli import build_parser
from keyhole.cli.about import description, settings_of, summary
from keyhole.cli.common import terminal
from keyhole.cli.common.parser import Formatter, Parser
from keyhole.config import EngineConfig, SamplingParams
from keyhole.exactness_gate import families_of_transformers, measure_family
from keyhole.policies import available_policies
from keyhole.policies.prefill import available_prefill_policies
from keyhole.reuse import available_reuse_methods

_WIDTH = 100
_BEGIN, _END = "<!-- combinations: python -m tests.combinations -->", "<!-- end of combinations -->"
_SETTINGS = re.compile(r"(<!-- settings: (\w+) -->\n).*?(<!-- end of settings -->)", re.DOTALL)
_DIFFERENCES = "Differences (theirs | ours | effect measured):"
_WRITTEN_BY = "<!-- Written by `make docs`; edit the program instead. -->"


#: What models do that select tokens themselves; no policy, so that no class says it.
_INDEXER_ROW = """\
| [own indexer](#own-indexer) | of the model | The `index_topk` tokens that the model's own \
indexer scores highest, for all heads. |"""
_INDEXER = """\
## own indexer

DeepSeek-V3.2, GLM's DSA models, A.X-K2 and Hy-V4 select tokens themselves, in prompts as well as in
answers: an indexer in a layer scores all earlier tokens by small queries and keys of its own, and
attention reads the tokens of the highest scores (DeepSeek-V3.2, 2025, arXiv 2512.02556, section
2.1). Layers without an indexer read what the last one with an indexer selected.

Cost per step and layer: the indexer's keys of all tokens, then `index_topk` keys and values.

When to use it: it is what these models do under `full`, the default. Policies that select are
refused for them. `index_topk` stands in the model's config and is not a setting
([more](architecture.md#models-that-select-tokens-themselves))."""


_FAMILIES = """<!-- Written by `python -m benchmarks.reference_pages --families`. -->

# Families of models

What `keyhole models` prints with transformers {version}: every class for causal language models,
and whether a small random model of its default config gives the logits of transformers' eager
attention in the engine ([how](architecture.md#what-is-refused-and-why)). {exact} of {all} are
exact. A checkpoint is measured by its own config, so it may be refused where the default is
exact; `keyhole verify --model MODEL` compares its real weights.

{time}| family | verdict |
|---|---|
"""

#: Lines of `gate_times`.
_TIMES = benchmarks.results() / "exactness-gate.jsonl"
#: Target for the slowest family.
_MOST_SECONDS = 3.0

ROOT = Path(__file__).parents[1]


def render(combinations: str = "") -> dict[str, str]:
    """Text of each generated document, by its path from the root of the repository.

    combinations: a table of docs/methods.md that is generated elsewhere.
    """
    return {"docs/cli.md": _commands(), "docs/methods.md": _methods(combinations)}


def combinations_in(text: str) -> str:
    """The table of combinations in the text of docs/methods.md; empty if there is none."""
    _, found, rest = text.partition(f"{_BEGIN}\n")
    return rest.partition(f"\n{_END}")[0] if found else ""


def with_combinations(text: str, table: str) -> str:
    """The text of docs/methods.md with this table."""
    before, _, rest = text.partition(_BEGIN)
    return f"{before}{_BEGIN}\n{table}\n{_END}{rest.partition(_END)[2]}"


def with_settings(text: str) -> str:
    """The text of docs/python-api.md with a table of settings after each of its marks."""
    classes = {cls.__name__: cls for cls in (EngineConfig, SamplingParams)}
    return _SETTINGS.sub(lambda m: f"{m[1]}{_settings(classes[m[2]])}\n{m[3]}", text)


def render_families() -> str:
    """Text of docs/models.md: the table of `keyhole models`; takes a second per family."""
    verdicts = [measure_family(name) for name in tqdm(families_of_transformers(), leave=False)]
    exact = sum(verdict.exact for verdict in verdicts)
    lines = benchmarks.read_lines(_TIMES)
    head = _FAMILIES.format(
        version=transformers.__version__,
        exact=exact,
        all=len(verdicts),
        time=f"{_about_times(lines[-1])}\n\n" if lines else "",
    )
    return head + "".join(f"| {v.family} | {_without_name(v.reason)} |\n" for v in verdicts)


def gate_times(seconds: Mapping[str, float], note: str) -> dict[str, Any]:
    """A line of results about the seconds of each exact family."""
    slowest = sorted(seconds, key=lambda family: seconds[family], reverse=True)[:5]
    most = seconds[slowest[0]]
    return header("exactness_gate", "benchmarks.reference_pages", note) | {
        "families": len(seconds),
        "median_seconds": statistics.median(seconds.values()),
        "max_seconds": most,
        "slowest": {family: seconds[family] for family in slowest},
        "seconds": dict(seconds),
        "bars": [target("seconds of the slowest family", most, _MOST_SECONDS, "<=")],
    }


def seconds_of_family(family: str) -> float | None:
    """How long the verdict of a family takes that is not known yet; None if it is not exact."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        begin = time.perf_counter()
        exact = measure_family(family).exact
        return round(time.perf_counter() - begin, 3) if exact else None


def _time_families() -> dict[str, float]:
    """Each in a process of its own, in which torch and transformers are imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.reference_pages"])
    found = {}
    for family in tqdm(families_of_transformers(), leave=False):
        with context.Pool(1) as pool:
            seconds = pool.apply(seconds_of_family, (family,))
        if seconds is not None:
            found[family] = seconds
    return found


def _about_times(line: Mapping[str, Any]) -> str:
    machine, versions = line["machine"], line["versions"]
    slowest = ", ".join(f"{name} ({seconds:.1f})" for name, seconds in line["slowest"].items())
    note = f" Note: {line['note']}." if line["note"] else ""
    (bar,) = line["bars"]
    target = f"target {bar['wanted']} s{'' if bar['met'] else ', missed'}"
    return (
        f"The comparison takes {line['median_seconds']:.1f} s for the median of {line['families']} "
        f"exact families and\n{line['max_seconds']:.1f} s for the slowest ({target}), once; not "
        f"counted are the imports of torch and transformers.\nThe slowest, in seconds: {slowest}.\n"
        f"{machine['cpu']}, {machine['cores']} cores; torch {versions['torch']}, transformers "
        f"{versions['transformers']}; {line['date'][:10]}, commit\n{line['commit']}; "
        f"`{line['command']}`.{note}"
    )


def _without_name(reason: str | None) -> str:
    """A reason without the model's name, which the first column has."""
    if reason is None:
        return "exact"
    text = reason.split(") ", 1)[-1] if reason.startswith("model '") else reason
    return _cell(text).replace("<", "`<`")


def main() -> None:
    """Writes the documents into this repository; with --families only the table of families."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", action="store_true", help="docs/models.md alone")
    parser.add_argument("--time-families", action="store_true", help="measures; writes no document")
    parser.add_argument("--note", default="", help="what a reader should know of this run")
    given = parser.parse_args()
    if given.time_families:
        line = gate_times(_time_families(), given.note)
        benchmarks.append(_TIMES, line)
        print(_about_times(line))
        return
    if given.families:
        (ROOT / "docs/models.md").write_text(render_families())
        return
    api = ROOT / "docs" / "python-api.md"
    api.write_text(with_settings(api.read_text()))
    print("written: docs/python-api.md")
    page = ROOT / "docs" / "methods.md"
    combinations = combinations_in(page.read_text()) if page.is_file() else ""
    for name, text in render(combinations).items():
        (ROOT / name).parent.mkdir(exist_ok=True)
        (ROOT / name).write_text(text)
        print(f"written: {name}")


def _commands() -> str:
    parser = build_parser()
    parts = [
        f"{_WRITTEN_BY}\n\n# Commands",
        "Errors are one line on stderr and exit status 2; `--debug` after a command shows where\n"
        "they came from. `--json` prints one object with the names of the Python interface.",
        _help(parser),
    ]
    for command in parser.commands().values():
        parts.append(_section(command, "##"))
        parts += [_section(action, "###") for action in command.commands().values()]
    return "\n\n".join(parts) + "\n"


def _section(command: Parser, mark: str) -> str:
    return f"{mark} {command.prog}\n\n{_help(command)}"


def _help(parser: argparse.ArgumentParser) -> str:
    # A fixed width, not that of the terminal in which `make docs` runs.
    parser.formatter_class = functools.partial(Formatter, width=_WIDTH)
    return f"```\n{parser.format_help().rstrip()}\n```"


def _methods(combinations: str) -> str:
    parts = [
        f"{_WRITTEN_BY}\n\n# Methods",
        "A policy says what a decode step attends to. Prefill is exact, unless a\n"
        "prefill policy is set. With a budget of at least the length every policy is full\n"
        "attention.",
        "The *effect measured* of a difference from a paper: how many of 48 answers to\n"
        "`tiny_derive` (derivations of the bundled model in 1,024 tokens) are right, with 95 %\n"
        "Wilson intervals, where layers 0 and 1 are dense unless the method cannot keep layers\n"
        "dense (`benchmarks/results/differences.jsonl`, whose lines hold their commands). It says\n"
        "what a difference does on this model, not which method is better.",
        *_table(available_policies(), "policy", "what a step reads", (_INDEXER_ROW,)),
        _INDEXER,
        "# Prefill policies",
        "A prefill policy says what the tokens of a long prompt attend to. Without one, prompts\n"
        "are exact ([how to use one](how-to/long-prompts.md)). Any policy can follow it.",
        *_table(available_prefill_policies(), "prefill policy", "what a prompt reads"),
        "# Reuse methods",
        "A reuse method says what a prompt keeps of stored documents, and what it computes again\n"
        "in view of the other documents (`LLM.ask`, `keyhole documents ask`). The answer is then\n"
        "decoded under any policy.",
        "The *effect measured*: right answers to 48 questions over two documents of the bundled\n"
        "model's world, with 95 % Wilson intervals, and the median relative error of the first\n"
        "answer token's logits compared with a prompt that is computed whole\n"
        "(`python -m benchmarks.reuse_differences`).",
        *_table(available_reuse_methods(), "reuse method", "what a prompt keeps"),
        "# What works together",
        "Every policy was run with every kind of model, ragged requests side by side: on prompts,\n"
        "with offloaded layers (RAM or disk), in transformers' own `generate`, and over stored\n"
        "documents by every reuse method. *Yes*: a budget above the length gives the logits of\n"
        "full attention, and a smaller one gives each request what it gets alone, offloaded or\n"
        "not. All else is refused when the program starts, with the reason below.",
        f"{_BEGIN}\n{combinations}\n{_END}",
    ]
    return "\n\n".join(parts) + "\n"


def _table(
    classes: Mapping[str, type[Any]], kind: str, what: str, more: Sequence[str] = ()
) -> list[str]:
    """A table of our methods of one kind, with more rows, and a section for each method."""
    ours = {name: cls for name, cls in classes.items() if cls.__module__.startswith("keyhole.")}
    rows = [
        f"| [`{name}`](#{name}) | `{cls.__name__}` | {_cell(summary(cls))} |"
        for name, cls in ours.items()
    ]
    heads = f"| {kind} | class | {what} |\n|---|---|---|"
    return ["\n".join([heads, *rows, *more]), *(_method(name, cls) for name, cls in ours.items())]


def _method(name: str, cls: type[Any]) -> str:
    """Module docstring and settings of one method."""
    parts = [f"## {name}", with_differences(description(cls))]
    if dataclasses.fields(cls):
        parts.append(_settings(cls))
    return "\n\n".join(parts)


def _default(value: object) -> str:
    """A default as code; an empty one in words."""
    text = terminal.setting(value)
    return f"`{text}`" if text else "none"


def _settings(cls: type[Any]) -> str:
    """The settings of a dataclass as a table."""
    rows = [
        f"| `{field.name}` | {_default(field.default)} | {_cell(text)} |"
        for field, text in settings_of(cls)
    ]
    return "\n".join(["| setting | default | |\n|---|---|---|", *rows])


def with_differences(about: str) -> str:
    """The text of a docstring, with its list of differences as a Markdown table.

    The list is a paragraph whose first line is `_DIFFERENCES`; each row begins with "- ", continues
    in indented lines and has three cells separated by " | ". AssertionError for any other row.
    """
    parts = []
    for part in about.split("\n\n"):
        first, _, rest = part.partition("\n")
        if first == _DIFFERENCES:
            rows = [" ".join(row.split()) for row in f"\n{rest}".split("\n- ")[1:]]
            assert rows, "differences without a row"
            for row in rows:
                assert row.count(" | ") == 2, f"three cells, not: {row}"
            heads = "| theirs | ours | effect measured |\n|---|---|---|"
            parts += ["**Differences**", "\n".join([heads, *(f"| {row} |" for row in rows)])]
        else:
            parts.append(part)
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    """A text as one cell of a table: one line, without column marks."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
