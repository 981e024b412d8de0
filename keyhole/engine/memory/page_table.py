"""Pages of running sequences as one array, a row per slot, kept up to date as pages are added."""

from __future__ import annotations

import numpy as np

from keyhole.engine.sequence import Sequence


class PageTable:
    """Rows of page numbers; a step copies rows, and never turns whole lists into arrays again."""

    def __init__(self, num_slots: int) -> None:
        self._rows = np.zeros((num_slots, 64), np.int32)
        # Whose pages stand in a row. A sequence that leaves and comes back has a new list.
        self._lists: list[list[int] | None] = [None] * num_slots
        self._filled = [0] * num_slots

    def rows(self, sequences: list[Sequence], width: int) -> np.ndarray:
        """A row per sequence, int32 [B, width]; what a sequence does not have is 0."""
        for sequence in sequences:
            self._update(sequence)
        return self._rows[[sequence.slot for sequence in sequences], :width]

    def forget(self, sequence: Sequence, entry: int) -> None:
        """Takes a page out that the sequence no longer has."""
        self._rows[sequence.slot, entry] = 0

    def renumber(self) -> None:
        """Pages have other numbers in the sequences' lists (`PageCache.pack`)."""
        self._filled = [0] * len(self._filled)

    def _update(self, sequence: Sequence) -> None:
        slot, pages = sequence.slot, sequence.pages
        if self._lists[slot] is not pages:
            self._lists[slot], self._filled[slot] = pages, 0
            self._rows[slot] = 0
        start = self._filled[slot]
        if start < len(pages):
            while len(pages) > self._rows.shape[1]:
                self._rows = np.pad(self._rows, ((0, 0), (0, self._rows.shape[1])))
            # A hole (see prompt_pages) is page 0, which nobody looks at.
            self._rows[slot, start : len(pages)] = np.maximum(pages[start:], 0)
            self._filled[slot] = len(pages)
