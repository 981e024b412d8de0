"""Paces of filling that do not look at the clock, so that tests see the same steps every time."""

from __future__ import annotations

from keyhole.engine.documents.filling import Pace
from keyhole.engine.engine import Engine


class Units(Pace):
    """A fixed number of units per step and of tokens per forward pass, whatever else is running."""

    def __init__(self, units: int, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self._most = units
        self._left = 0
        self.kinds: list[str] = []

    def begin(self, *, spent: float, alone: bool, only_decodes: bool) -> bool:
        self._left = self._most
        return True

    def goes_on(self, kind: str) -> bool:
        self.kinds.append(kind)
        self._left -= 1
        return self._left > 0

    def size(self, left: int, most: int) -> int:
        return self.part(left, most)

    def computed(self, tokens: int, seconds: float) -> None:
        """The number of tokens stays."""

    def encoded(self, tokens: int, seconds: float) -> None:
        """The number of tokens stays."""

    def forward(self, tokens: int, seconds: float) -> None:
        """The number of tokens stays."""


class AtOnce(Pace):
    """All of a prompt's documents in one step, in forwards as long as can be."""

    def begin(self, *, spent: float, alone: bool, only_decodes: bool) -> bool:
        return True

    def goes_on(self, kind: str) -> bool:
        return True

    def size(self, left: int, most: int) -> int:
        return min(left, most)

    def part(self, left: int, most: int) -> int:
        return min(left, most)


def paced(engine: Engine, pace: Pace) -> None:
    """Lets an engine that has not begun yet run at this pace."""
    assert not engine.has_work
    engine.pace = engine.scheduler._pace = engine.filler._pace = pace
    engine._document_prefills.clear()
