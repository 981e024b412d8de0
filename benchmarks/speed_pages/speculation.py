"""The section on several tokens per step in docs/results/speed.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.results_page.text import written
from benchmarks.speed_pages import tables
from keyhole.eval.attention.tables import estimate

Line = dict[str, Any]


def own_drafts(lines: Sequence[Line]) -> list[str]:
    """The newest line of each model that has its own draft beside `full`; empty without one."""
    whole = [
        line
        for line in lines
        if {"full", "full+eagle3"} <= {*line["settings"]["systems"]}
        and len(line["settings"].get("shares", [4])) == 1
    ]
    newest = {line["settings"]["model"].split("/")[-1]: line for line in whole}
    if not newest:
        return []
    parts = [
        "## The small models with their own drafts",
        "EAGLE-3 drafts that were trained on these models propose "
        f"{whole[-1]['settings']['num_draft_tokens']} tokens, all of which are checked by real "
        "steps; the texts are\ntasks of their own language. Tokens per step with their 95 % "
        "interval over texts, in brackets tokens/s\nby those of `full` without a draft, one system "
        "after the other, and how many answers are right where not all\nare. Steps of these models "
        "cost little more than those of a draft, so tokens/s say nothing about large models:",
    ]
    for name, line in newest.items():
        parts += _of_model(name, line)
    return parts


def _of_model(name: str, line: Line) -> list[str]:
    settings, results = line["settings"], line["results"]
    found = {(one["task"], one["length"], one["system"]): one for one in results}
    systems = [system for system in settings["systems"] if system != "full"]
    rows = [
        [f"`{task}`", f"{length:,}", *(_own(found, task, length, system) for system in systems)]
        for task, length in dict.fromkeys((one["task"], one["length"]) for one in results)
    ]
    return [
        f"`{name}`:",
        written(["task", "words", *(f"`{system}`" for system in systems)], rows),
        f"{settings['items']} texts of each kind, the last {settings['written']} words of which "
        f"are written; load {line['machine']['load_average']}. {tables.origin(line)}",
    ]


def _own(found: dict[Any, Line], task: str, length: int, system: str) -> str:
    one, full = found[task, length, system], found[task, length, "full"]
    ratio = one["tokens_per_second"] / full["tokens_per_second"]
    # Lines before 2026-11-30 have the mean over texts alone.
    accepted = estimate(one.get("accepted_lengths") or [one["accepted_length"]])
    wrong = f", {one['right']} of {one['items']} right" if one["right"] < one["items"] else ""
    margin = "" if accepted.half is None else f" ± {accepted.half:.2f}"
    return f"{accepted.mean:.2f}{margin} ({ratio:.2f}){wrong}"


def section(lines: Sequence[Line]) -> list[str]:
    """Tables and targets of the newest line of each processor and format of weights, if any."""
    if not lines:
        return []
    newest = {(line["machine"]["cpu"], _weights(line)): line for line in lines}
    settings = lines[-1]["settings"]
    parts = [
        "## Several tokens per step, on a CPU",
        f"A draft of {settings['num_draft_tokens']} tokens with random weights, whose tokens are "
        f"accepted with a probability\nof {settings['accept']}, the same ones for each system "
        "([how](../how-to/draft.md)). Batch 1:",
    ]
    for line in sorted(newest.values(), key=lambda line: str(line["date"]), reverse=True):
        parts += _of_processor(line)
    return parts


def _of_processor(line: Line) -> list[str]:
    settings = line["settings"]
    rows = [
        [f"{result['context']:,}", f"`{name}`", *_cells(found)]
        for result in line["results"]
        for name, found in result["systems"].items()
    ]
    heads = ["tokens", "system", "step in ms", "tokens per step", "tokens/s by those of `full`"]
    return [
        written(heads, rows),
        "\n".join(_target(result) for result in line["results"] if "target" in result),
        f"Shape of {settings['shape']}, weights in {_weights(line)}, medians of "
        f"{settings['rounds']} turns of {settings['steps']} steps. {tables.origin(line)}",
    ]


def _weights(line: Line) -> str:
    return str(line["settings"].get("weights") or "bfloat16")


def _cells(found: dict[str, Any]) -> list[str]:
    return [
        f"{found['step_ms']:.0f}",
        f"{found['tokens_per_step']:.2f}",
        f"{found['times_full']:.2f}",
    ]


def _target(result: dict[str, Any]) -> str:
    target, context = result["target"], result["context"]
    value = result["systems"][target["system"]]["times_full"]
    missed = "" if target["met"] else " (missed)"
    return (
        f"- {target['system']}, {context:,} tokens: {value:.2f} times the tokens/s of full, "
        f"target >= {target['times_full']}{missed}"
    )
