"""Steps over pages with random keys and values, for tests without an engine."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from keyhole.integrations.vllm.step_rows import Requests, StepRows, step_rows
from keyhole.policies.base import Step


def make_rows(lengths: list[int], page_size: int, generator: torch.Generator) -> StepRows:
    """Requests that decode, their pages anywhere in the pool; page 0 is vLLM's null block."""
    most = max(-(-length // page_size) for length in lengths)
    order = torch.randperm(len(lengths) * most, generator=generator) + 1
    return step_rows(
        Requests(
            starts=np.arange(len(lengths) + 1),
            most=np.array(lengths),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            block_table=order.view(len(lengths), most).to(torch.int32),
            prefilling=np.zeros(len(lengths), bool),
        ),
        page_size,
        1,
    )


def make_step(
    lengths: list[int], page_size: int, heads: int, dim: int, generator: torch.Generator
) -> tuple[Step, Tensor, Tensor]:
    """A step, and keys and values [P, Hkv, page_size, D]."""
    rows = make_rows(lengths, page_size, generator)
    shape = (int(rows.page_table.max()) + 1, heads, page_size, dim)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    return rows.begin([keys], [{}]), keys, values
