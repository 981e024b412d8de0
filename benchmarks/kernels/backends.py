"""The backends of the kernel benchmark: a device's paths, best first, and how to select one."""

from __future__ import annotations

import torch

from keyhole.kernels import cpu, operations, triton

TRITON = "triton"


def paths(device: torch.device) -> tuple[str, ...]:
    """The paths of the device."""
    if device.type == "cpu":
        return cpu.paths()
    return (*([TRITON] if triton.usable() else []), cpu.REFERENCE)


def current(device: torch.device) -> str:
    """The current path, to be restored by `use`."""
    return cpu.current() if device.type == "cpu" else paths(device)[0]


def use(path: str, device: torch.device) -> None:
    """Selects a path."""
    if device.type == "cpu":
        cpu.use(path)
    else:
        operations.use_triton(path == TRITON)
