"""Measures this machine beside what others do on it: operations (kernels) or whole steps (decode).

All systems of a run take turns and must agree before they are timed. Every run adds a line to
benchmarks/results/ of the checkout, or of the current directory where there is none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keyhole
from keyhole.bench.settings import DecodeSettings, KernelSettings, Settings
from keyhole.cli import flags, show
from keyhole.errors import ConfigError, UnknownNameError

_SETTINGS: dict[str, type[Settings]] = {"kernels": KernelSettings, "decode": DecodeSettings}
_OWN = {"kernels": ("ops", "paths"), "decode": ("systems", "layers", "device")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole bench`."""
    parser.add_argument("benchmark", metavar="BENCHMARK", help=" or ".join(_SETTINGS))
    parser.add_argument("--note", metavar="TEXT", help="what a reader should know of this run")
    parser.add_argument("--output", metavar="FILE", help="add the line to this file instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags.add_settings(parser, Settings, "what is measured")
    for benchmark, names in _OWN.items():
        flags.add_settings(parser, _SETTINGS[benchmark], f"{benchmark} only", names)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints tables as results come, and adds a line to the stored ones."""
    name = arguments.benchmark
    if name not in _SETTINGS:
        raise UnknownNameError("benchmark", name, _SETTINGS)
    for other, names in _OWN.items():
        wrong = [n for n in names if other != name and getattr(arguments, n) is not None]
        if wrong:
            raise ConfigError(f"--{wrong[0]} is for `keyhole bench {other}`, not for {name}")
    settings: Any = _SETTINGS[name](**flags.settings_of(arguments, _SETTINGS[name]))
    flags.quiet()
    from keyhole.bench import decode, kernels, measure

    device = measure.device(settings.device if name == "decode" else "cpu")
    output = Path(arguments.output or measure.results() / f"{name}.jsonl")
    line = measure.header(name, device, arguments.note or "", keyhole.__version__)
    # Beside one JSON object on stdout, tables still show how far a long run has come.
    stream = sys.stderr if arguments.json else sys.stdout
    columns = _DECODE if name == "decode" else _KERNELS

    def report(results: Sequence[dict[str, Any]], notes: Sequence[str]) -> None:
        if results:
            print(_table(columns, results), end="\n\n", file=stream)
        for note in notes:
            print(note, file=stream)
        stream.flush()

    line |= decode.run(settings, report) if name == "decode" else kernels.run(settings, report)
    measure.append(output, line)
    if arguments.json:
        print(show.to_json(line))
        return 0
    for bar in line.get("bars", []):
        met = "met" if bar["met"] else "MISSED"
        print(f"{met}: {bar['bar']} is {bar['value']:.2f}, wanted {bar['wanted']}")
    print(f"memory is read at {line['read_bytes_per_s'] / 1e9:.1f} GB/s; written: {output}")
    return 0


#: Head of a column, the field of a result, and how it is written.
_Columns = Sequence[tuple[str, str, Callable[[Any], str]]]


def _milliseconds(value: float) -> str:
    return f"{value:.3f} ms" if value < 1 else f"{value:.1f} ms"


_COMMON: _Columns = (
    ("GB/s", "gb_per_s", "{:.1f}".format),
    ("of bandwidth", "bandwidth_share", "{:.0%}".format),
    ("time / peer", "ratio_to_peer", "{:.2f}".format),
)
_KERNELS: _Columns = (
    ("operation", "op", str),
    ("on", "about", str),
    ("system", "system", str),
    ("time", "ms", _milliseconds),
    ("moved", "moved_bytes", show.bytes_text),
    ("GFLOP/s", "gflop_per_s", "{:.0f}".format),
    *_COMMON,
)
_DECODE: _Columns = (
    ("tokens", "context", "{:,}".format),
    ("system", "system", str),
    ("step", "step_ms", _milliseconds),
    ("KV read", "kv_bytes", show.bytes_text),
    ("keys read", "attended_fraction", "{:.1%}".format),
    *_COMMON,
    ("peak memory", "peak_bytes", show.bytes_text),
    ("stated", "stated_bytes", show.bytes_text),
)


def _table(columns: _Columns, results: Sequence[dict[str, Any]]) -> str:
    rows = [
        ["-" if result[field] is None else text(result[field]) for _, field, text in columns]
        for result in results
    ]
    return show.table([head for head, _, _ in columns], rows, left=3 if columns is _KERNELS else 2)
