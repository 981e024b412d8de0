"""Memory: what is free, what this process uses, and the most that it used since it was asked last.

On a CPU these are the resident set and its peak, as the operating system counts them; on a GPU the
bytes that torch has allocated there.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

import torch

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
