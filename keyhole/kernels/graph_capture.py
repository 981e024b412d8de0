"""What every capture of a CUDA graph needs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Disables garbage collection: freeing the graph of an old engine would abort the capture.

    A graph owns device memory, which must not be freed during a capture.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
