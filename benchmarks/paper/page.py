"""The papers' headline settings in docs/results/speed.md: targets and results."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.paper import setting
from benchmarks.paper.settings import (
    FLASH,
    HEADLINES,
    Headline,
    SpeedTarget,
    StepSettings,
    ThroughputSettings,
    named,
    step_at,
)
from benchmarks.paper.throughput import step_gain, traffic_bound
from benchmarks.results_page.text import written
from benchmarks.speed_pages import tables

Line = dict[str, Any]

UNMEASURED = "unmeasured"
#: Systems that read everything once and in place.
_DENSE = ("full", FLASH)
_HEADS = "setting;speed;in the paper;target;found".split(";")


def section(lines: Sequence[Line]) -> list[str]:
    """Paragraphs and a table with a row per target; only lines measured on a GPU count.

    Targets without a line are marked as unmeasured.
    """
    last = {line["headline"]: line for line in lines if counts(line)}
    left = len(HEADLINES) - len(last)
    return [
        "## The papers' headline settings, on a GPU",
        "Targets on one NVIDIA GPU, at the settings that the papers present first: the speed\n"
        "relative to another system of the same run, with random weights of the right shape\n"
        "(`make gpu PART=4` and higher; `benchmarks/paper/settings.py` has the settings).\n"
        "SpeContext's table 3 is about whole answers: as many requests at once as fit in memory\n"
        "with the weights, steps timed at 4 lengths along the answer, and their times integrated;\n"
        "prompts are not counted. With 24 GB only one request fits, so the target there is for\n"
        "`spe_context_below`: its layers are offloaded as sequences grow, as many requests run as\n"
        "memory and 32 GiB of the host allow, and its head selects about four of five tokens\n"
        "again at the next step, as in the paper's figure 6b.\n"
        f"Settings: {len(HEADLINES)}; {UNMEASURED}: {left}.",
        written(_HEADS, [row for name in HEADLINES for row in _rows(name, last.get(name))]),
        *dict.fromkeys(one.note for one in HEADLINES.values() if one.note),
        *_arithmetic(),
        *(_about(last[name]) for name in HEADLINES if name in last),
    ]


def _arithmetic() -> list[str]:
    """The speed-up over dense steps that a step's bytes allow, with the same number of requests."""
    rows = []
    for one in HEADLINES.values():
        if not isinstance(one.settings, ThroughputSettings):
            continue
        wanted = max(target.wanted for target in one.targets if target.by in _DENSE)
        found = traffic_bound(one.settings)
        far = ": out of reach without offloading, which `spe_context_below` uses"
        reach = "" if found.gain >= wanted else far
        plural = "" if found.requests == 1 else "s"
        sizes = one.about.removesuffix(f", budget {one.settings.decode.token_budget:,}")
        rows.append(
            f"- {sizes}: {found.requests} request{plural}, by bytes at most {found.gain:.2f}, "
            f"target {wanted}{reach}"
        )
    return [
        "What arithmetic allows: a step must read the weights, without the input embedding, and\n"
        "keys and values: either all of them, or those of the budget and the keys of\n"
        "`spe_context`'s head. If nothing is offloaded, every system has room for the same number\n"
        "of requests, and at equal bandwidth `spe_context` can be at most this much faster than\n"
        f"{' and '.join(f'`{name}`' for name in _DENSE)}, over the whole answer:",
        "\n".join(rows),
        *_arithmetic_of_steps(),
    ]


def _arithmetic_of_steps() -> list[str]:
    """The speed-up over a dense step of one sequence that the bytes of the weights allow."""
    rows = []
    for one in HEADLINES.values():
        if not isinstance(one.settings, StepSettings):
            continue
        decode = one.settings.decode
        for label, context in zip(one.settings.labels, decode.contexts, strict=True):
            dense = step_at("full", label)
            wanted = max((t.wanted for t in one.targets if t.by == dense), default=None)
            if wanted is not None:
                gain = step_gain(decode, context)
                reach = "" if gain >= wanted else ": out of reach"
                rows.append(f"- {one.about}, {label}: at most {gain:.2f}, target {wanted}{reach}")
    return [
        "A step of one sequence reads all weights. At equal bandwidth it can be at most this much\n"
        "faster than a dense one, if it read no keys and values at all:",
        "\n".join(rows),
    ]


def counts(line: Line) -> bool:
    """Whether a line measures a setting at full size on a GPU."""
    known = line["headline"] in HEADLINES
    return known and not line["small"] and line["machine"]["device"] != "cpu"


def _rows(name: str, line: Line | None) -> list[list[str]]:
    one = HEADLINES[name]
    return [
        [
            _setting(one) if i == 0 else "",
            _speed(name, target),
            target.paper,
            *_found(name, target, line),
        ]
        for i, target in enumerate(one.targets)
    ]


def _setting(one: Headline) -> str:
    return one.about if one.source == "ours" else f"{one.source}: {one.about}"


def _speed(name: str, target: SpeedTarget) -> str:
    by = "" if target.by is None else f" by `{target.by}`"
    return f"`{target.of}`{by}, {setting.unit(name)}"


def _found(name: str, target: SpeedTarget, line: Line | None) -> list[str]:
    wanted = f">= {target.wanted}"
    if line is None:
        return [wanted, UNMEASURED]
    said = named(target, setting.unit(name))
    for entry in line["bars"]:
        if entry["bar"] == said:
            if (slow := _slow(target, line["speeds"])) is not None:
                return ["–", f"{entry['value']:.2f}, not meaningful: {slow}"]
            return [entry["wanted"], f"{entry['value']:.2f}{'' if entry['met'] else ' (missed)'}"]
    return [wanted, "not measured"]


def _slow(target: SpeedTarget, speeds: Mapping[str, float]) -> str | None:
    """Why a speed relative to the target's other system says nothing; None if it does."""
    if target.floor is None or target.by is None or not {target.by, target.floor} <= speeds.keys():
        return None
    times = speeds[target.floor] / speeds[target.by]
    return (
        f"`{target.by}` takes {times:.1f} times as long as `{target.floor}`" if times > 1 else None
    )


def _is_replayed(result: dict[str, Any]) -> bool:
    return bool(result.get("launches", {}).get("replayed_steps"))


def _about(line: Line) -> str:
    versions = line["versions"]
    note = f" Note: {line['note']}." if line["note"] else ""
    speeds = ", ".join(f"`{name}` {speed:.4g}" for name, speed in line["speeds"].items())
    graphs = [f"`{r['system']}`" for r in line["results"] if _is_replayed(r)]
    launched = f" Steps as CUDA graphs: {', '.join(graphs)}." if graphs else ""
    return (
        f"{line['headline']}, {line['unit']}: {speeds}.{launched}\n{line['machine']['device']}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}; "
        f"{line['date'][:10]}, commit {line['commit']}; "
        f"`{shlex.join(tables.command(line))}`.{note}"
    )
