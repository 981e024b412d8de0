"""Who computes in the kernel benchmark: a device's paths, the best first, and how to take one."""

from __future__ import annotations

import torch

from keyhole.kernels import cpu, operations, triton

TRITON = "triton"


def paths(device: torch.device) -> tuple[str, ...]:
    """What can compute there."""
    if device.type == "cpu":
        return cpu.paths()
    return (*([TRITON] if triton.usable() else []), cpu.REFERENCE)


def current(device: torch.device) -> str:
    """The path in use, as one begins; for `use` at the end."""
    return cpu.current() if device.type == "cpu" else paths(device)[0]


def use(path: str, device: torch.device) -> None:
    """Computes with that path from now on."""
    if device.type == "cpu":
        cpu.use(path)
    else:
        operations.use_triton(path == TRITON)
