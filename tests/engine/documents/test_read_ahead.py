"""Rows that are read ahead are those that a document gives one by one; buffers have one owner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from keyhole.documents.store import DocumentStore, RecordError, StoredDocument
from keyhole.engine.documents.stored_rows import PinnedBuffer, PinnedRing, ReadAhead
from tests.documents.records import MODEL, make_record


@pytest.fixture(params=["open", "read"])
def documents(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[StoredDocument]]:
    store = DocumentStore(tmp_path, MODEL, check=request.param)
    for seed, name in enumerate("ab"):
        store.add(name, name, make_record(seed))
    found = store.open_all(["a", "b"])
    yield found
    for document in found:
        document.close()


@pytest.mark.parametrize("wanted", ["all", "gaps", "few", "edge"])
def test_rows_are_those_of_the_documents(documents: list[StoredDocument], wanted: str) -> None:
    starts = np.cumsum([0, *(document.length for document in documents)])
    tokens = {
        "all": np.arange(starts[-1]),
        "gaps": np.flatnonzero(np.arange(starts[-1]) % 5 > 1),  # read with those between them
        "few": np.array([0, 40, starts[1] + 3, starts[-1] - 1]),  # each read alone
        "edge": np.arange(starts[1] - 1, starts[1] + 1),  # neighbours in two documents
    }[wanted]
    ring = PinnedRing(torch.device("cpu"))
    for layer in range(2):
        read = ReadAhead(ring, documents, starts, layer, tokens, [tokens * 2])
        rows, (doubled,) = read.rows()
        every = [document.rows(layer, 0, document.length) for document in documents]
        for found, parts in zip(rows, zip(*every, strict=True), strict=True):
            assert found is not None
            expected = torch.cat([part for part in parts if part is not None])
            assert torch.equal(found, expected[torch.from_numpy(tokens)])
        assert doubled.tolist() == (tokens * 2).tolist()


def test_an_error_of_a_thread_arrives_and_frees_the_buffer(
    documents: list[StoredDocument], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RecordError("damaged", "cut off", "whole", "a")

    ring, starts = PinnedRing(torch.device("cpu")), np.array([0, documents[0].length])
    free = len(ring._buffers)
    monkeypatch.setattr(StoredDocument, "read_rows", broken)
    read = ReadAhead(ring, documents[:1], starts, 0, np.arange(9), [])
    assert len(ring._buffers) == free - 1
    with pytest.raises(RecordError, match="cut off"):
        read.rows()
    assert len(ring._buffers) == free


class Event:
    """An event of a copy, which counts how often it was waited for."""

    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_parts_arrive_as_they_were_written() -> None:
    ring = PinnedRing(torch.device("cpu"))
    for sizes in ((3, 1), (700,), (5, 256, 0, 4), (2,)):  # longer and shorter than before
        buffer = ring.take(sizes)
        for part, size in enumerate(sizes):
            buffer.memory(part)[:] = bytes([part + 1]) * size
        parts = ring.send(buffer)
        assert [part.tolist() for part in parts] == [
            [part + 1] * size for part, size in enumerate(sizes)
        ]


def test_a_buffer_waits_for_the_copy_that_was_made_from_it() -> None:
    buffer, event = PinnedBuffer(), Event()
    buffer.divide([6])
    buffer.copied = cast(torch.cuda.Event, event)
    buffer.divide([6])
    assert event.waited == 1


def test_nobody_gets_a_buffer_that_is_taken() -> None:
    ring = PinnedRing(torch.device("cpu"))
    taken = [ring.take([8]) for _ in range(9)]
    assert len({id(buffer) for buffer in taken}) == 9
    ring.put_back(taken[0])
    ring.send(taken[1])
    assert [ring.take([8]) for _ in range(2)] == taken[:2]
