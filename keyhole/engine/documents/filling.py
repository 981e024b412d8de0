"""Filling a prompt's pages with stored documents, in units that may be spread over several steps.

Before each unit the work yields that unit's kind, and the pace decides whether the unit still
fits into the current step. The pages depend on the order of the units alone, not on which step runs
them.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.cache.page_list import NO_PAGE, PageList
from keyhole.engine.documents.context import Reused
from keyhole.engine.documents.pace import Pace


@dataclass(frozen=True, eq=False)
class Filled:
    """What a prompt has before its question.

    end: tokens. kept: bool [L, end], what each layer has of them; None: everything.
    reused: what it cost.
    """

    end: int
    kept: Tensor | None
    reused: Reused


#: Yields the kind of each unit before it runs, and returns what came of all.
Units = Generator[str, None, Filled]


class OutOfPages(Exception):  # noqa: N818 - a signal, like StopIteration
    """Fewer pages are left than filling needs now."""


class Filling:
    """The pages of one request, and what is still to be done to fill them.

    filled: what they hold, when all is done; None before.
    """

    def __init__(self, pages: PageList, units: Units) -> None:
        self.filled: Filled | None = None
        self._pages = pages
        self._units = units
        self._began = False

    def run(self, pace: Pace) -> None:
        """Goes on as long as `pace` says, by one unit at least.

        Raises OutOfPages, and what filling raises; `release` is all that can come then.
        """
        assert self.filled is None, "it is filled already"
        try:
            pace.resume()
            goes_on = True
            while goes_on:
                with torch.no_grad():
                    kind = next(self._units)
                goes_on = pace.goes_on(kind)
        except StopIteration as done:
            self.filled = done.value

    def release(self) -> None:
        """Gives the pages back and ends the work."""
        self._units.close()
        self._pages.release()

    def take(self) -> list[int]:
        """The entries of the pages up to the question, as a sequence keeps them."""
        assert self.filled is not None, "it is not filled yet"
        return self._pages.listed(self.filled.end)

    @property
    def held(self) -> list[int]:
        """The pages that are held."""
        return [int(page) for page in self._pages.present() if page != NO_PAGE]
