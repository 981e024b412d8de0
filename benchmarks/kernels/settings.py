"""Settings of the kernel benchmark. Does not import torch, as the flags derive from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keyhole.bench.settings import BenchSettings, Names
from keyhole.config import require_known, setting

#: Operations of the kernel benchmark, in the order of its table.
OPS = (
    "attend",
    "attend_and_score",
    "attend_low_rank",
    "head_scores",
    "prefill",
    "append",
    "page_bounds",
    "bound_scores",
    "summary_scores",
    "spread_scores",
    "top_k",
    "trim",
    "linear",
    "packed_linear",
)


@dataclass(frozen=True, kw_only=True)
class KernelSettings(BenchSettings):
    """The kernel benchmark; without paths, all of `benchmarks.kernels.run` on the device."""

    default_shape: ClassVar[str] = "llama-3.1-8b"
    default_repeat: ClassVar[int] = 51

    ops: Names = setting((), f"{', '.join(OPS)}; default: all")  # noqa: RUF009
    paths: Names = setting((), "who computes; default: all this device has")  # noqa: RUF009

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ops", self.ops or OPS)
        for name in self.ops:
            require_known("operation", name, OPS)
