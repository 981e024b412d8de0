"""The decoding sequences of a step in numbers, as the host knows them before the device does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.engine.decode.policy_state import SequenceState
from keyhole.engine.memory.eviction import Eviction
from keyhole.engine.memory.page_table import PageTable
from keyhole.engine.sequence import Sequence


@dataclass(frozen=True)
class DecodeInputs:
    """One token of each of B sequences, which have up to M pages.

    position, prompts: int64 [B], where the token stands, and tokens before the first decode step.
    fresh: bool [B], whether this one is the first.
    sent: what the device gets, by name. As in `Step`: lengths, pages, page_table, prompts and
    state_rows (its `slots`). As in `Remaining`, where pages are evicted: left_table, left_pages,
    left_lengths, pinned, goes. written: as in `Batch`: slots, touched, filled.
    entries, due: as in `Remaining`; None where nothing is evicted.
    """

    position: np.ndarray
    prompts: np.ndarray
    fresh: np.ndarray
    sent: dict[str, np.ndarray]
    written: dict[str, np.ndarray]
    entries: np.ndarray | None = None
    due: np.ndarray | None = None


def numbers_of(
    decodes: list[Sequence],
    page_size: int,
    table: PageTable,
    state: SequenceState,
    eviction: Eviction | None,
) -> DecodeInputs:
    """For at least one sequence; once a step, as sequences enter `state` and `eviction` by it."""
    position = np.asarray([s.num_computed for s in decodes], np.int64)
    fresh, prompts = state.enter(decodes)
    entry, place = position // page_size, position % page_size
    rows = table.rows(decodes, int(entry.max()) + 1)
    page = rows[np.arange(len(rows)), entry].astype(np.int64)
    sent = {
        "lengths": (position + 1).astype(np.int32),
        "pages": (entry + 1).astype(np.int32),
        "page_table": rows,
        "prompts": prompts.astype(np.int32),
        "state_rows": np.asarray([s.slot for s in decodes], np.int64),
    }
    written = {"slots": page * page_size + place, "touched": page, "filled": place + 1}
    if eviction is None:
        return DecodeInputs(position, prompts, fresh, sent, written)
    entries, pages, pinned, due = eviction.view(decodes, position, fresh)
    left = np.take_along_axis(rows, np.maximum(entries, 0), 1)
    sent |= {
        "left_table": np.where(entries < 0, 0, left),
        "left_pages": pages.astype(np.int32),
        "left_lengths": (pages * page_size - (page_size - 1 - place)).astype(np.int32),
        "pinned": pinned,
        "goes": due,
    }
    return DecodeInputs(position, prompts, fresh, sent, written, entries, due)
