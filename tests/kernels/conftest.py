from collections.abc import Iterator

import pytest
import torch

from keyhole.kernels import cpu

#: The best path, and PyTorch's, which is what all others are compared with.
FIRST = (cpu.paths()[0], cpu.REFERENCE)
#: All of them, with more examples each, are for `make test-all`.
PATHS = [*FIRST, *(pytest.param(x, id=f"{x}-all", marks=pytest.mark.slow) for x in cpu.paths())]


@pytest.fixture(scope="module", autouse=True, params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test of this folder runs on every path that this machine has, by two threads."""
    before, threads = cpu.current(), torch.get_num_threads()
    torch.set_num_threads(2)
    yield cpu.use(request.param)
    cpu.use(before)
    torch.set_num_threads(threads)
