"""Stored lines as Markdown tables; accepts lines of older versions, which have fewer fields."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.kernels.linear_cases import SUM
from benchmarks.llama_cpp.system import SYSTEMS
from benchmarks.results_page.text import written
from keyhole.bench.settings import BASELINES

Line = dict[str, Any]
_PEER = next(iter(BASELINES))
# Flags that the text states, or that are irrelevant to a rerun.
_UNSAID = ("--note", "--output")
_OUTSIDE_TEXT = "\n(llama.cpp: of its own process, weights and cache)"


def ratios(line: Line) -> str:
    """Times relative to the peer, and the share of keys read."""
    names = [name for name in _systems(line) if name != _PEER]
    return _by_context(line, names, _ratio)


def times(line: Line) -> str:
    """Times of all systems, and the share of the bandwidth they used."""
    return _by_context(
        line, _systems(line), lambda r: f"{r['step_ms']:.0f} ({r['bandwidth_share']:.0%})"
    )


def memory(line: Line) -> list[str]:
    """Peak memory relative to the prediction; empty for a line without peaks."""
    if not all("peak_bytes" in result for result in line["results"]):
        return []
    return [
        "Peak memory of the process in a step, divided by the sum of what it was before the\n"
        "model, the weights, the caches of all systems and the kernels' buffers; in brackets GiB"
        f"{_OUTSIDE_TEXT if set(SYSTEMS) & set(_systems(line)) else ''}:",
        _by_context(line, _systems(line), _peak),
        *(f"- {_skipped(entry)}" for entry in line["skipped"]),
    ]


#: Names of operations in older lines -> current names.
_RENAMED = {"top_indices": "top_k", "attend_rebuilt": "attend_low_rank"}


def kernels(line: Line) -> list[str]:
    """A row per operation with the times of all paths and peers; then the targets."""
    results = line["results"]
    cases = list(dict.fromkeys((r["op"], r["about"]) for r in results))
    paths = line["settings"]["paths"]
    rows = []
    for op, about in cases:
        found = {r["system"]: r for r in results if (r["op"], r["about"]) == (op, about)}
        shown = {name: r for name, r in found.items() if name not in paths and name != SUM}
        others = [f"{name}: {r['ms']:.3g}" for name, r in shown.items()]
        cells = [_rate(found[name]) if name in found else "" for name in paths]
        rows.append([f"`{_RENAMED.get(op, op)}`", about, *cells, "; ".join(others)])
    heads = ["operation", "on", *(f"`{path}`" for path in paths), "for comparison"]
    return [
        "Milliseconds, medians of interleaved calls; in brackets the share of the read bandwidth\n"
        f"that the run measured ({line['read_bytes_per_s'] / 1e9:.1f} GB/s):",
        written(heads, rows),
        *([_ABOVE] if any((r["bandwidth_share"] or 0) > 1 for r in results) else []),
        targets(line),
    ]


#: Measured in turns (benchmarks/LOG.md): neither huge pages nor caches explain it.
_ABOVE = """\
The bandwidth is that of a sum by torch over 512 MiB with all threads, the fastest of seven before
the calls. It is not the most that the memory gives: products that read several rows at once read
faster than the sum, so shares can exceed 100 %."""


def targets(line: Line) -> str:
    """A row per target; empty without targets."""
    return "\n".join(
        f"- {bar['bar']}: {bar['value']:.2f}, target {bar['wanted']}"
        f"{'' if bar['met'] else ' (missed)'}"
        for bar in line.get("bars", [])
    )


def about(line: Line) -> str:
    """Settings, command, machine and date of the measurement."""
    settings = line["settings"]
    batch = "" if settings["batch"] == 1 else f", batch {settings['batch']}"
    kind = "steps" if line["benchmark"] == "decode" else "calls"
    return (
        f"Shape of {settings['shape']}, {settings['dtype']}{batch}, medians of "
        f"{settings['repeat']} interleaved {kind}. {origin(line)}"
    )


def origin(*lines: Line) -> str:
    """Machine, versions, date and command of the newest line; commits and notes of all."""
    last = max(lines, key=lambda line: str(line["date"]))
    machine, versions, peer = last["machine"], last["versions"], last.get("llama_cpp")
    device = "" if machine["device"] == "cpu" else f"{machine['device']}, "
    outside = f", llama-cpp-python {peer['version']}" if peer else ""
    commits = ", ".join(dict.fromkeys(str(line["commit"]) for line in lines))
    notes = dict.fromkeys(f" Note: {line['note']}." for line in lines if line["note"])
    return (
        f"{device}{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB; "
        f"torch {versions['torch']}, transformers {versions['transformers']}{outside}; "
        f"{last['date'][:10]}, commit {commits};\n`{shlex.join(command(last))}`.{''.join(notes)}"
    )


def command(line: Line) -> list[str]:
    """The arguments of the command, for a rerun."""
    words = shlex.split(line["command"])
    for flag in _UNSAID:
        while flag in words:
            place = words.index(flag)
            del words[place : place + 2]
    return words


def _systems(line: Line) -> list[str]:
    return list(dict.fromkeys(result["system"] for result in line["results"]))


def _by_context(line: Line, names: Sequence[str], cell: Callable[[Any], str]) -> str:
    """A row per context, a column per system; empty where unmeasured."""
    found = {(r["context"], r["system"]): r for r in line["results"]}
    contexts = list(dict.fromkeys(r["context"] for r in line["results"]))
    rows = [
        [f"{n:,}", *(cell(found[n, name]) if (n, name) in found else "" for name in names)]
        for n in contexts
    ]
    return written(["tokens", *(f"`{name}`" for name in names)], rows)


def _ratio(result: dict[str, Any]) -> str:
    ratio = result["ratio_to_peer"]
    return f"{'–' if ratio is None else f'{ratio:.2f}'} ({result['attended_fraction']:.0%})"


def _rate(result: dict[str, Any]) -> str:
    share = result["bandwidth_share"]
    bound = f"{result['gflop_per_s']:.0f} GFLOP/s" if share is None else f"{share:.0%}"
    return f"{result['ms']:.3g} ({bound})"


def _peak(result: dict[str, Any]) -> str:
    peak, stated = result["peak_bytes"], result["stated_bytes"]
    return f"{peak / stated:.3f} ({peak / 2**30:.2f})"


def _skipped(entry: dict[str, Any]) -> str:
    who = entry["system"] or "everything"
    need, free = entry["need_bytes"] / 2**30, entry["free_bytes"] / 2**30
    return f"`{who}` at {entry['context']:,} tokens needs {need:.1f} GiB; {free:.1f} were free."
