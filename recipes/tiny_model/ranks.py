"""One to a few training processes on one machine that add up their gradients.

Two processes of one thread each outrun one process of two threads where matrices are this small,
and suffer less when the machine is busy with something else.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among its peers."""

    rank: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def add_up(self, values: Tensor) -> None:
        """Replace `values` by the sum over all processes."""
        if self.count > 1:
            dist.all_reduce(values)


@contextmanager
def joined(rank: int, count: int, meeting_point: Path) -> Iterator[Ranks]:
    """Meet the other processes through a file that did not exist before, and part in the end.

    A process that ends while its peers still talk to it would be aborted by its own threads.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=count
    )
    try:
        yield Ranks(rank=rank, count=count)
        dist.barrier()
    finally:
        dist.destroy_process_group()
