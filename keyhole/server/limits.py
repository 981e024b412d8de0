"""How many completions a server runs at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from keyhole.server.errors import ApiError


class Admission:
    """Counts running completions; those beyond the limit are refused at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.running = 0
        self.is_draining = False

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """Counts `count` completions as running; ApiError 429 if too many, 503 while draining."""
        if self.is_draining:
            raise ApiError(503, "the server is stopping", kind="server_error", code="draining")
        if self.running + count > self._limit:
            raise ApiError(
                429,
                f"{self.running} completions are under way and at most {self._limit} may be; "
                "try again later",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.running += count
        try:
            yield
        finally:
            self.running -= count
