"""Memory: what is free, the most that was used, and which systems fit beside each other.

On a CPU these are the resident set and its peak, as the operating system counts them; on a GPU the
bytes that torch has allocated there.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from keyhole.bench.baselines import Need
from keyhole.bench.keyhole_system import needed_bytes
from keyhole.bench.settings import ALL_PEERS, PAGE_SIZE
from keyhole.cache.layout import Geometry
from keyhole.models.loading import Model

try:
    from keyhole.kernels import _cpu
except ImportError:  # see keyhole/kernels/cpu.py
    _cpu = None  # type: ignore[assignment]

_STATUS, _CLEAR, _MEMINFO = (
    Path("/proc") / name for name in ("self/status", "self/clear_refs", "meminfo")
)
_RESET_PEAK = "5"  # see clear_refs in proc(5): the peak becomes what is resident now


def free_bytes(device: torch.device) -> int:
    """What can be allocated now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    if _MEMINFO.is_file():
        return _field(_MEMINFO, "MemAvailable")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def used_bytes(device: torch.device) -> int:
    """What this process uses now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _field(_STATUS, "VmRSS") if _STATUS.is_file() else peak_bytes(device)


def reset_peak(device: torch.device) -> None:
    """Lets the peak begin anew; where the system cannot do that it stays the process's own."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access(_CLEAR, os.W_OK):
        _CLEAR.write_text(_RESET_PEAK)


def peak_bytes(device: torch.device) -> int:
    """The most that this process used since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.is_file():
        return _field(_STATUS, "VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def give_back() -> None:
    """Returns what is free inside this process to the system, where it would count as used."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing where no GPU was used
    pinned = getattr(torch.accelerator, "empty_host_cache", None)  # newer than what we ask for
    if pinned is not None and torch.cuda.is_available():
        pinned()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def workspace_bytes() -> int:
    """Buffers that the C++ kernels keep for this thread; 0 without them."""
    return 0 if _cpu is None else _cpu.workspace_bytes()


def gib(size: float) -> str:
    """A size for people."""
    return f"{size / 2**30:.1f} GiB"


def _field(file: Path, name: str) -> int:
    """A size in a file of /proc with lines such as "VmRSS:  12 kB"."""
    text = file.read_text()
    return 1024 * int(text[text.index(f"{name}:") :].split()[1])


#: What stays free for the rest of the machine.
RESERVE_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A system that does not fit; None: ours, and with them the whole context."""

    context: int
    batch: int
    system: str | None
    need_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        who = "the caches" if self.system is None else self.system
        where = f"{self.context:,} tokens, batch {self.batch}"
        need, free = gib(self.need_bytes), gib(self.free_bytes)
        return f"skipped at {where}: {who} would need {need}, {free} are free"

    def as_dict(self) -> dict[str, Any]:
        """For a line of results."""
        return asdict(self)


def fitting(
    model: Model,
    policies: Sequence[str],
    peers: Sequence[str],
    *,
    batch: int,
    context: int,
    steps: int,
    outside: tuple[str, Need] | None = None,
) -> tuple[list[str], list[Skipped]]:
    """The peers for which there is room beside our cache, one after the other, and who is left out.

    `outside`: a system in another process and what it needs, the first to get room beside ours; it
    is filled before there is anything else. If there is no room for our cache itself, that is the
    one entry of the second list.
    """
    free = max(0, free_bytes(model.device) - RESERVE_BYTES)
    geometry = model.geometry(PAGE_SIZE)
    past = batch * (context + steps) * geometry.token_bytes
    layer = past // geometry.num_layers

    def skipped(system: str | None, need: int) -> Skipped:
        sizes = {"need_bytes": need, "free_bytes": free}
        return Skipped(context=context, batch=batch, system=system, **sizes)

    ours = needed_bytes(model, policies, batch, context, steps)
    # While a layer of a sequence is written there are its keys, and the same in the order of pages.
    writing = layer // batch
    if ours + writing > free:
        return [], [skipped(None, ours + writing)]
    free -= ours
    kept: list[str] = []
    left_out: list[Skipped] = []
    if outside is not None:
        name, its = outside
        need = its.stays + max(writing, its.passes - ours)
        if need > free:
            left_out.append(skipped(name, need))
        else:
            kept.append(name)
            free -= its.stays
    for name in peers:
        kind = ALL_PEERS[name][1]
        is_there = any(ALL_PEERS[other][1] == kind for other in kept if other in ALL_PEERS)
        need = (0 if is_there else past) + passing_layers(name, geometry) * layer
        if need > free:
            left_out.append(skipped(name, need))
        else:
            kept.append(name)
            free -= 0 if is_there else past
    return kept, left_out


def passing_layers(name: str, geometry: Geometry) -> int:
    """The most that a peer needs for a moment, in layers of its cache."""
    attention, kind = ALL_PEERS[name]
    group = geometry.num_query_heads // geometry.layers[0].num_kv_heads
    # A dynamic cache copies one layer at a time; eager repeats keys and values for each head.
    # While a cache is filled, a layer and parts of its copy pass.
    return max(2, (kind == "dynamic") + (group if attention == "eager" else 1))
