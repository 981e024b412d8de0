from collections.abc import Iterator

import pytest

from keyhole.kernels import cpu


@pytest.fixture(scope="module", autouse=True, params=cpu.paths())
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test of this folder runs on every path that this machine has."""
    before = cpu.current()
    yield cpu.use(request.param)
    cpu.use(before)
