"""The reasoning before an answer, if the chat template marks it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Markers:
    """The markers before and after the reasoning."""

    begin: str
    end: str


_KNOWN = (Markers("<think>", "</think>"), Markers("[THINK]", "[/THINK]"))


def markers_of(template: str) -> Markers | None:
    """The markers of a chat template; None: it marks no reasoning."""
    return next((markers for markers in _KNOWN if markers.end in template), None)


def held_back(text: str, markers: Iterable[str]) -> int:
    """Characters at the end of a text that may be the beginning of a marker."""
    sizes = (
        size
        for marker in markers
        for size in range(min(len(marker) - 1, len(text)), 0, -1)
        if text.endswith(marker[:size])
    )
    return max(sizes, default=0)


class ReasoningSplitter:
    """Splits streamed text into reasoning and answer.

    is_inside: whether the text begins inside the reasoning, as the prompt ends with its marker.
    """

    def __init__(self, markers: Markers, *, is_inside: bool) -> None:
        self._markers = markers
        self._left = ""  # not given out yet
        self._is_begun = is_inside
        self.is_inside = is_inside
        self._is_done = False

    def feed(self, text: str, *, final: bool = False) -> list[tuple[bool, str]]:
        """The new parts as (is reasoning, text); final: no more text follows."""
        self._left += text
        found: list[tuple[bool, str]] = []
        if not self._is_begun:
            self._begin(final=final)
        if self._is_begun and self.is_inside:
            found += self._inside(final=final)
        if self._is_done or (self._is_begun and not self.is_inside):
            found += self._after()
        return found

    def _begin(self, *, final: bool) -> None:
        start, begin = self._left.lstrip(), self._markers.begin
        if start.startswith(begin):
            self._left, self.is_inside, self._is_begun = start[len(begin) :], True, True
        elif final or not begin.startswith(start):
            self._is_begun = True

    def _inside(self, *, final: bool) -> list[tuple[bool, str]]:
        text, ended, rest = self._left.partition(self._markers.end)
        if ended:
            self.is_inside, self._is_done, self._left = False, True, rest
        else:
            size = 0 if final else held_back(text, [self._markers.end])
            text, self._left = text[: len(text) - size], text[len(text) - size :]
        return [(True, text)] if text else []

    def _after(self) -> list[tuple[bool, str]]:
        if self._is_done:  # drop the empty lines between reasoning and answer
            self._left = self._left.lstrip("\n")
            self._is_done = not self._left
        text, self._left = self._left, ""
        return [(False, text)] if text else []
