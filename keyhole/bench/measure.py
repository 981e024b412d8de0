"""What every benchmark shares: the machine, versions, time, read bandwidth, a line of results."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from keyhole.config import require

#: The repository that this file is in; meaningless where Keyhole is installed without one.
ROOT = Path(__file__).parents[2]

#: What one system did in one case, as it stands in a line.
Result = dict[str, Any]
#: Takes results as they come, and notes for a reader beside them.
Report = Callable[[Sequence[Result], Sequence[str]], None]

# Far more than any cache holds, so that a sum over it reads memory; on a GPU more again, where what
# a launch takes would not be small beside it.
_BANDWIDTH_BYTES = 1 << 29
_MORE_ON_GPU = 8
_BANDWIDTH_RUNS = 7


def header(
    benchmark: str,
    device: torch.device,
    note: str,
    version: str,
    command: Sequence[str] = ("keyhole",),
) -> dict[str, Any]:
    """What a line says about how, where and when it was measured; version: of Keyhole.

    command: what the flags of this process stand behind.
    """
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([*command, *sys.argv[1:]]),
        "commit": commit(),
        "note": note,
        "machine": machine(device),
        "versions": versions() | {"keyhole": version},
    }


def in_checkout() -> bool:
    """Whether this file is part of a checkout of the repository, not of an installed package."""
    return (ROOT / "pyproject.toml").is_file()


def results() -> Path:
    """The folder of the stored lines, in a checkout."""
    return ROOT / "benchmarks/results"


def device(name: str) -> torch.device:
    """The device of that name, a GPU if there is one for "auto"; ConfigError if it is not here."""
    cuda = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if cuda else "cpu"
    kind, _, number = name.partition(":")
    there = kind == "cpu" or (kind == "cuda" and cuda)
    there = there and (not number or (number.isdigit() and int(number) < torch.cuda.device_count()))
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if cuda else []
    require(there, "device", name, f"one that is here: {', '.join(('auto', 'cpu', *gpus))}")
    return torch.device(name)


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores, threads of torch, memory, load now, and the device."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    cuda = device.type == "cuda"
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(pages * size / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
    }


def versions() -> dict[str, str]:
    """Versions of what was measured."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
    }


def commit() -> str | None:
    """The git commit, with a "+" if tracked files differ from it; None without git.

    Results and docs do not count: each cell of a long run adds to them.
    """
    if not in_checkout():  # a virtual environment may lie in the repository of somebody else
        return None
    try:
        name = _git("rev-parse", "--short=12", "HEAD").strip()
        code = [":/", ":(top,exclude)benchmarks/results", ":(top,exclude)docs"]
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *code).strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return name + ("+" if changed else "")


def time_ms(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds that `run` takes, until the device is done."""
    synchronize(device)
    begin = time.perf_counter()
    run()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second that a sum over a large tensor reads with all threads; the best of a few."""
    numbers = _much(device)
    best = min(time_ms(numbers.sum, device) for _ in range(_BANDWIDTH_RUNS))
    return numbers.nbytes / (1e-3 * best)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy of a large tensor reads and writes; the best of a few."""
    numbers = _much(device)
    copy = torch.empty_like(numbers)
    best = min(time_ms(lambda: copy.copy_(numbers), device) for _ in range(_BANDWIDTH_RUNS))
    return 2 * numbers.nbytes / (1e-3 * best)


def _much(device: torch.device) -> torch.Tensor:
    size = _BANDWIDTH_BYTES * (_MORE_ON_GPU if device.type == "cuda" else 1)
    return torch.ones(size // 4, device=device)


def append(path: Path, line: dict[str, Any]) -> None:
    """Adds one JSON line to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


_NUMBERS = (("family", "cpu family"), ("model", "model"))


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    # Rented machines often say no more than "AMD EPYC": the numbers tell generations apart.
    numbers = [f"{name} {fields[key]}" for name, key in _NUMBERS if key in fields]
    return " ".join([fields.get("model name", platform.machine()), *numbers])


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout
