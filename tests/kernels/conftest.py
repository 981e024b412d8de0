from collections.abc import Iterator

import pytest

from keyhole.kernels import cpu

#: The best path, and PyTorch's, which is what all others are compared with.
FIRST = (cpu.paths()[0], cpu.REFERENCE)
PATHS = [
    pytest.param(name, marks=[] if name in FIRST else [pytest.mark.slow]) for name in cpu.paths()
]


@pytest.fixture(scope="module", autouse=True, params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test of this folder runs on every path that this machine has."""
    before = cpu.current()
    yield cpu.use(request.param)
    cpu.use(before)
