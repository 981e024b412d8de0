"""Rows that are read ahead are those that a document gives one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from keyhole.documents.store import DocumentStore, RecordError, StoredDocument
from keyhole.engine.documents.pinned_ring import PinnedRing
from keyhole.engine.documents.read_ahead import ReadAhead
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
