"""`keyhole bench decode` with two more systems, llama_cpp and llama_cpp_flash."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import command
from benchmarks.command import target
from benchmarks.llama_cpp.file import LlamaFile
from benchmarks.llama_cpp.system import SYSTEMS, LlamaCpp
from keyhole.bench import decode, measure
from keyhole.bench.measure import Report, Result
from keyhole.bench.settings import DecodeSettings
from keyhole.config import require

# The context at which full attention is compared with llama.cpp, and the target ratio of its tokens
# per second to llama.cpp's, by batch.
_TOKENS = 32768
_WANTED = {1: 1.3, 8: 2.0}


def run(settings: DecodeSettings, report: Report) -> dict[str, Any]:
    """As `keyhole.bench.decode.run`. ConfigError without llama.cpp or on a GPU."""
    device = measure.device(settings.device).type
    require(device == "cpu", "device", device, f"cpu with {' and '.join(SYSTEMS)}")
    with LlamaFile() as file:
        line = decode.run(settings, report, LlamaCpp(file))
        bars = targets(line["results"], settings.batch)
        return line | {"llama_cpp": file.about, "bars": bars}


def targets(results: Sequence[Result], batch: int) -> list[dict[str, Any]]:
    """Tokens per second of full attention relative to llama.cpp, the faster of its two systems."""
    found = [
        r
        for r in results
        if r["system"] in SYSTEMS and r["context"] == _TOKENS and r["ratio_to_full"]
    ]
    if not found or batch not in _WANTED:
        return []
    best = min(found, key=lambda r: float(r["ratio_to_full"]))
    name = f"full, {_TOKENS:,} tokens, batch {batch}: tokens/s by those of {best['system']}"
    return [target(name, best["ratio_to_full"], _WANTED[batch])]


#: Runs the benchmark with the given flags, or those of this process; returns its exit status.
main = functools.partial(
    command.main, "benchmarks.llama_cpp", DecodeSettings, run, about=__doc__, name="decode"
)


if __name__ == "__main__":
    sys.exit(main())
