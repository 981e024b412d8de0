"""A Chrome trace of some decode steps: what runs when, on every stream and thread.

Open it in chrome://tracing or ui.perfetto.dev. On a GPU copies for later layers lie on a row of
their own beside the kernels; on a CPU they are the work of another thread.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

#: Steps in a trace.
STEPS = 4


def write(path: Path, step: Callable[[], object], device: torch.device) -> None:
    """Runs `step` so many times, and writes what happened."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=every) as recorded:
        for i in range(STEPS):
            with record_function(f"step {i}"):
                step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(str(path))
