"""What all benchmarks share: machine, versions, time, bandwidth, kernel launches, results."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm.auto import tqdm

from keyhole.config import require
from keyhole.engine.engine import Engine
from keyhole.errors import KeyholeError
from keyhole.kernels.graph_capture import without_collection

#: The root of the repository, if this file is in a checkout.
ROOT = Path(__file__).parents[2]

#: The result of one system in one case, as stored in a line.
Result = dict[str, Any]
#: Receives results as they come, and notes on them.
Report = Callable[[Sequence[Result], Sequence[str]], None]

# Far more than any cache holds, so that a sum over it reads memory; even more on a GPU, where the
# launch would otherwise take a significant part of the time.
_BANDWIDTH_BYTES = 1 << 29
_MORE_ON_GPU = 8
BANDWIDTH_RUNS = 7


def header(
    benchmark: str, device: torch.device, note: str = "", command: Sequence[str] = ("keyhole",)
) -> dict[str, Any]:
    """The fields of a line of results that say how, where and when it was measured.

    command: the program, without the flags of this process.
    """
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([*command, *sys.argv[1:]]),
        "commit": commit(),
        "note": note,
        "machine": machine(device),
        "versions": versions(),
    }


def in_checkout() -> bool:
    """Whether this file is in a checkout of the repository, not in an installed package."""
    return (ROOT / "pyproject.toml").is_file()


def device(name: str) -> torch.device:
    """The device of this name; "auto" is a GPU if there is one. ConfigError if it does not
    exist.
    """
    cuda = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if cuda else "cpu"
    kind, _, number = name.partition(":")
    there = kind == "cpu" or (kind == "cuda" and cuda)
    there = there and (not number or (number.isdigit() and int(number) < torch.cuda.device_count()))
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if cuda else []
    require(there, "device", name, f"one of {', '.join(('auto', 'cpu', *gpus))}")
    return torch.device(name)


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores, torch threads, memory, current load, and the device."""
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
    """Versions of the measured software."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "keyhole": _keyhole_version(),
    }


def _keyhole_version() -> str:
    try:
        return importlib.metadata.version("keyhole")
    except importlib.metadata.PackageNotFoundError:  # a bare copy of the source
        return "0+unknown"


def commit() -> str | None:
    """The git commit, followed by "+" if tracked files differ from it; None without git.

    Results and docs do not count, because every cell of a long run changes them.
    """
    if not in_checkout():  # a virtual environment may be inside of another repository
        return None
    try:
        name = _git("rev-parse", "--short=12", "HEAD").strip()
        code = [":/", ":(top,exclude)benchmarks/results", ":(top,exclude)docs"]
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *code).strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return name + ("+" if changed else "")


def time_ms(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of `run`, until the device has finished."""
    synchronize(device)
    begin = time.perf_counter()
    run()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


def median_ratio(own: Sequence[float], other: Sequence[float]) -> float:
    """The median over rounds of one time divided by another of the same round."""
    return statistics.median(a / b for a, b in zip(own, other, strict=True))


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of a sum over a large tensor with all threads; the best of several."""
    numbers = large_tensor(device)
    best = min(time_ms(numbers.sum, device) for _ in range(BANDWIDTH_RUNS))
    return numbers.nbytes / (1e-3 * best)


def large_tensor(device: torch.device) -> torch.Tensor:
    """Ones, float32, far larger than any cache, so that a sum over them reads memory."""
    size = _BANDWIDTH_BYTES * (_MORE_ON_GPU if device.type == "cuda" else 1)
    return torch.ones(size // 4, device=device)


_NUMBERS = (("family", "cpu family"), ("model", "model"))


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    # Virtual machines often report only "AMD EPYC"; these numbers distinguish generations.
    numbers = [f"{name} {fields[key]}" for name, key in _NUMBERS if key in fields]
    return " ".join([fields.get("model name", platform.machine()), *numbers])


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The turn of a system; only `call` is timed.

    `told_ms` is for a system in another process, which times itself: the time of its last call.
    """

    call: Callable[[], object]
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing
    told_ms: Callable[[], float] | None = None


def take_turns(
    turns: Mapping[str, Turn], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of every call, by system."""
    names = list(turns)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in tqdm(range(rounds), desc="measure", unit="round", leave=False, disable=None):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            turn = turns[name]
            turn.before()
            spent = time_ms(turn.call, device)
            times[name].append(spent if turn.told_ms is None else turn.told_ms())
            turn.after()
    return times


Output = TypeVar("Output")

# As torch advises: whatever is created by the first calls must exist before a capture.
_WARM_UP = 3


def capture(
    call: Callable[[], Output], device: torch.device
) -> tuple[Callable[[], object], Output]:
    """A function that replays `call`, and its result, which each replay overwrites.

    RuntimeError for a call that synchronises with the device; it may be called again then.
    """
    with torch.cuda.device(device):
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                call()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        try:
            with without_collection(), torch.cuda.graph(graph):
                result = call()
        finally:
            torch.cuda.set_stream(here)  # a failed capture leaves its own stream current
    return graph.replay, result


class Captured:
    """Replays `call` for tensors like `given`; `call` must not synchronise with the device."""

    def __init__(self, call: Callable[[Tensor], Tensor], given: Tensor) -> None:
        self._given = given.clone()
        self._replay, self._result = capture(lambda: call(self._given), given.device)

    def __call__(self, given: Tensor) -> Tensor:
        """The result, which the next call overwrites."""
        self._given.copy_(given)
        self._replay()
        return self._result


# How the steps of a system are launched on a GPU: replayed as CUDA graphs, or kernel by kernel.
#
# Without graphs the host may take longer than the device, so the two cannot be compared. Every
# result of decode steps says which it was. It is an error if Keyhole's steps should have been
# replayed and were not.


Launches = dict[str, Any]

#: Why the baselines' steps are not replayed, unless the benchmark captures them.
THEIRS = "transformers launches its operations one by one"


class NotRecordedError(KeyholeError):
    """Keyhole's steps were launched one by one although they could be replayed as CUDA graphs."""


def launches(replayed_steps: int, why_not: str | None) -> Launches:
    """For a line of results: the number of replayed steps, and the reason if some were not
    replayed.
    """
    return {"replayed_steps": replayed_steps, "why_not": why_not}


def checked(who: str, engine: Engine, before: int, device: torch.device) -> Launches:
    """The launches of an engine's steps since it had replayed `before` of them, on `device`.

    NotRecordedError if none was replayed on a GPU, or replaying has stopped, without a known
    reason.
    """
    replayed, why_not = engine.replayed_steps - before, engine.why_not_replayed
    wanted = engine.config.graphs and engine.policy.capturable is True
    # The engine itself does not replay the steps of these policies (`Policy.reads_keys`).
    wanted = wanted and not (engine.policy.reads_keys and engine.cache.offloaded_layers)
    if device.type == "cuda" and wanted and (replayed == 0 or why_not is not None):
        raise NotRecordedError(
            f"{who}: {replayed} steps were replayed as CUDA graphs, the others launched one by "
            f"one: {why_not or 'no step was of a kind that is recorded'}"
        )
    return launches(replayed, why_not)
