"""Small tensors for what measures the bandwidth of the memory, as in `tests/bench`."""

from tests.bench.conftest import _short

__all__ = ["_short"]
