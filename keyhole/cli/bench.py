"""Measures this machine: decode steps next to transformers (decode), how long steps of other
requests take while a question over stored documents is admitted (admission), or load on a running
server (serve).

admission uses the bundled model. All systems of a run take turns and must agree before
they are timed. Every run adds a line with its machine, versions and settings to --output.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import keyhole
from keyhole.bench.settings import (
    AdmissionSettings,
    BenchSettings,
    DecodeSettings,
    ServeSettings,
)
from keyhole.cli.common import flags, terminal
from keyhole.cli.common.terminal import LINES, Output, check_outputs
from keyhole.config import bytes_text, require_known
from keyhole.errors import ConfigError
from keyhole.eval.line_file import LineFile

if TYPE_CHECKING:
    from keyhole.bench.measure import Report

#: The head of a column, the field of a result, and how the value is formatted.
Columns = Sequence[tuple[str, str, Callable[[Any], str]]]
#: Columns, and the number of leading columns that are names.
Table = tuple[Columns, int]

#: Benchmarks by name: their settings, and the flags that only they have.
SETTINGS: dict[str, type[Any]] = {
    "decode": DecodeSettings,
    "admission": AdmissionSettings,
    "serve": ServeSettings,
}
_OWN = {
    "decode": ("systems", "token_budget", "layers"),
    "admission": ("methods", "documents", "tokens", "question", "others", "prompt"),
    "serve": tuple(field.name for field in dataclasses.fields(ServeSettings)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole bench`."""
    parser.add_argument("benchmark", metavar="BENCHMARK", help=", ".join(SETTINGS))
    add_common(parser)
    flags.add_settings(parser, BenchSettings, "what is measured")
    for benchmark, names in _OWN.items():
        flags.add_settings(parser, SETTINGS[benchmark], f"{benchmark} only", names)


def add_common(parser: argparse.ArgumentParser) -> None:
    """The flags that all benchmarks share."""
    parser.add_argument("--note", metavar="TEXT", help="a remark that is stored with the results")
    parser.add_argument(
        "--output",
        metavar="FILE",
        default="keyhole-bench.jsonl",
        help="file that the line is added to",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints tables as results come, and adds a line to the stored ones."""
    name = arguments.benchmark
    require_known("benchmark", name, SETTINGS)
    _check_own(arguments, name)
    settings: Any = SETTINGS[name](**flags.settings_of(arguments, SETTINGS[name]))
    return measured(name, settings, arguments, _RUNS[name])


def _decode(settings: DecodeSettings, report: Report) -> dict[str, Any]:
    from keyhole.bench import decode

    return decode.run(settings, report)


def _admission(settings: AdmissionSettings, report: Report) -> dict[str, Any]:
    from keyhole.bench import admission, measure
    from keyhole.models.loading import load

    model = load(keyhole.tiny(), str(measure.device(settings.device)))
    return admission.run(model, settings, report)


def _serve(settings: ServeSettings, report: Report) -> dict[str, Any]:
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError("keyhole bench serve needs more packages: pip install 'keyhole[bench]'")
    from keyhole.bench import serve

    line = serve.run(settings)
    report([_flat(result) for result in line["results"]], [])
    return line


def _flat(result: dict[str, Any]) -> dict[str, Any]:
    """The result with the percentiles of a time as one cell."""
    return {
        name: " / ".join(f"{x:.1f}" for x in value.values()) if isinstance(value, dict) else value
        for name, value in result.items()
    }


_RUNS: dict[str, Callable[[Any, Report], dict[str, Any]]] = {
    "decode": _decode,
    "admission": _admission,
    "serve": _serve,
}


def measured(
    name: str,
    settings: Any,
    arguments: argparse.Namespace,
    benchmark: Callable[[Any, Report], dict[str, Any]],
    table: Table | None = None,
    command: Sequence[str] = ("keyhole",),
) -> int:
    """Runs a benchmark, prints its results as they come, and adds its line to --output.

    table: of the results; None: the table of `name` in this module. command: the program, without
    its flags.
    """
    check_outputs(Output("--output", arguments.output, LINES))
    file = LineFile(arguments.output)
    terminal.status("loading torch and transformers ...")
    flags.quiet()
    from keyhole.bench import measure

    device = measure.device(settings.device)
    line = measure.header(name, device, arguments.note or "", command)
    # With --json the tables go to stderr, where they show the progress of a long run.
    stream = sys.stderr if arguments.json else sys.stdout
    columns = _TABLES[name] if table is None else table

    def report(results: Sequence[dict[str, Any]], notes: Sequence[str]) -> None:
        if results:
            print(_table(columns, results, stream), end="\n\n", file=stream)
        for note in notes:
            print(note, file=stream)
        stream.flush()

    line |= benchmark(settings, report)
    status = 130 if line.get("interrupted") else 0
    if arguments.json:
        print(terminal.to_json(line), flush=True)
        file.add(line)  # after the results, which a disk without room must not cost
        return status
    print_targets(line.get("bars", []))
    file.add(line)
    bandwidth = line.get("read_bytes_per_s")
    speed = "" if bandwidth is None else f"memory is read at {bandwidth / 1e9:.1f} GB/s; "
    print(f"{speed}written: {arguments.output}")
    return status


def print_targets(targets: Sequence[dict[str, Any]]) -> None:
    """Prints a line for each target of a line of results."""
    for target in targets:
        met = "met" if target["met"] else "MISSED"
        met = terminal.styled(met, terminal.MARKS[met], sys.stdout)
        print(f"{met}: {target['bar']} is {target['value']:.2f}, target {target['wanted']}")


def _check_own(arguments: argparse.Namespace, name: str) -> None:
    """Refuses flags of another benchmark."""
    owners: dict[str, list[str]] = {}
    for benchmark, cls in SETTINGS.items():
        for field in dataclasses.fields(cls):
            owners.setdefault(field.name, []).append(benchmark)
    for field_name, benchmarks in owners.items():
        if name not in benchmarks and getattr(arguments, field_name) is not None:
            right = " and ".join(f"`keyhole bench {benchmark}`" for benchmark in benchmarks)
            flag = flags.flag_of(field_name)
            raise ConfigError(f"{flag} can be used with {right} only, not with {name}")


def milliseconds(value: float) -> str:
    """A time for a table."""
    return f"{value:.3f} ms" if value < 1 else f"{value:.1f} ms"


COMMON: Columns = (
    ("GB/s", "gb_per_s", "{:.1f}".format),
    ("of bandwidth", "bandwidth_share", "{:.0%}".format),
    ("time / peer", "ratio_to_peer", "{:.2f}".format),
)
_DECODE: Columns = (
    ("tokens", "context", "{:,}".format),
    ("system", "system", str),
    ("step", "step_ms", milliseconds),
    ("KV read", "kv_bytes", bytes_text),
    ("keys read", "attended_fraction", "{:.1%}".format),
    *COMMON,
    ("peak memory", "peak_bytes", bytes_text),
    ("stated", "stated_bytes", bytes_text),
)


_ADMISSION: Columns = (
    ("reuse", "method", str),
    ("stored", "stored_tokens", "{:,}".format),
    ("step", "step_ms", milliseconds),
    ("longest", "longest_ms", milliseconds),
    ("longest / median", "longest_ratio", "{:.2f}".format),
    ("of CPU time", "longest_cpu_ratio", "{:.2f}".format),
    ("the worst", "worst_cpu_ratio", "{:.2f}".format),
    ("without a question", "noise_ratio", "{:.2f}".format),
    ("first token", "ttft_ms", milliseconds),
    ("alone", "alone_ms", milliseconds),
)
_SERVE: Columns = (
    ("answered", "answered", "{:,}".format),
    ("unfinished", "unfinished", "{:,}".format),
    ("requests/s", "requests_per_s", "{:.2f}".format),
    ("good/s", "goodput_per_s", "{:.2f}".format),
    ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("first token, ms: p50 / p90 / p99", "first_token_ms", str),
    ("between tokens", "between_tokens_ms", str),
    ("answer", "answer_ms", str),
)
_TABLES: dict[str, Table] = {
    "decode": (_DECODE, 2),
    "admission": (_ADMISSION, 1),
    "serve": (_SERVE, 0),
}


def _table(table: Table, results: Sequence[dict[str, Any]], stream: TextIO) -> str:
    columns, names = table
    rows = [
        ["-" if result[field] is None else text(result[field]) for _, field, text in columns]
        for result in results
    ]
    return terminal.table([head for head, _, _ in columns], rows, left=names, stream=stream)
