"""Damage is found and named, losses are reported, and nothing else is touched."""

from __future__ import annotations

import functools
import json
import os
import sqlite3
import struct
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from keyhole.documents.index import Index
from keyhole.documents.record import (
    DocumentRecord,
    HeadRecord,
    Span,
    check_tensors,
    read_header,
    serialise,
)
from keyhole.documents.storage import LocalReader
from keyhole.documents.store import DocumentStore, RecordError, StoredDocument
from keyhole.errors import CapacityError, ConfigError, UnknownNameError
from tests.documents.records import MODEL, make_record, same, user_cache

__all__ = ["user_cache"]


class Bytes:
    """A reader of bytes in memory."""

    is_local = True
    identity = None

    def __init__(self, data: bytes) -> None:
        self.data, self.size, self.bytes_read = data, len(data), 0

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
        return [torch.tensor(list(self.data[a:b]), dtype=torch.uint8) for a, b in ranges]

    def close(self) -> None: ...


@pytest.fixture
def store(tmp_path: Path) -> DocumentStore:
    store = DocumentStore(tmp_path, MODEL)
    store.add("a", "one", make_record(1), pinned=True)
    store.add("b", "two", make_record(2))
    return store


def record_of(store: DocumentStore, name: str) -> Path:
    file = f"{store.info(name).digest}-{store.model}.safetensors"
    return Path(store._catalogue.place.url, "records", file)


def text_of(store: DocumentStore, name: str) -> Path:
    source = store._catalogue.source(name)
    return Path(store._catalogue.place.url, "documents", source.file)


def change(file: Path, edit: Callable[[bytearray], object]) -> None:
    data = bytearray(file.read_bytes())
    edit(data)
    file.write_bytes(data)


def header_of(data: bytes) -> dict[str, dict[str, object]]:
    found = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    assert isinstance(found, dict)
    return found


def with_header(data: bytes, header: object) -> bytes:
    line = json.dumps(header).encode()
    line += b" " * (-len(line) % 8)
    return struct.pack("<Q", len(line)) + line + data[8 + struct.unpack("<Q", data[:8])[0] :]


def at(data: bytes, key: str) -> int:
    """Where the data of a tensor begins."""
    offsets = header_of(data)[key]["data_offsets"]
    assert isinstance(offsets, list)
    return 8 + int(struct.unpack("<Q", data[:8])[0]) + int(offsets[0])


def b_is_well(store: DocumentStore) -> bool:
    with store.open("b") as stored:
        return same(stored, make_record(2)) and store.verify(["b"]) == []


# Records.


def test_no_byte_of_a_record_can_change_unseen() -> None:
    record = make_record(n=3, num_layers=1, heads=1, dims=(2, 2), block_size=2)
    pieces = serialise(record, name="x", digest="d" * 64, created=1.5, fingerprint=MODEL)
    data = b"".join(pieces)

    def read(changed: bytes) -> None:
        reader = Bytes(changed)
        check_tensors(reader, read_header(reader))

    read(data)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << (position % 8)
        with pytest.raises(RecordError):
            read(bytes(changed))
    for length in [*range(0, len(data), 7), len(data) - 1]:
        with pytest.raises(RecordError):
            read(data[:length])
    with pytest.raises(RecordError, match=f"has {len(data) + 1} bytes; expected {len(data)}"):
        read(data + b"\0")


@pytest.mark.parametrize(
    ("key", "seen_when_opened"),
    [
        ("token_ids", True),
        ("layers.1.block_keys", True),
        ("layers.2.representative_keys", True),
        ("layers.2.received", True),
        ("layers.0.keys", False),
        ("layers.1.values", False),
        ("layers.1.extreme_keys", False),
    ],
)
def test_a_changed_byte_is_named_by_its_tensor(
    store: DocumentStore, key: str, seen_when_opened: bool
) -> None:
    file = record_of(store, "a")
    change(file, lambda data: data.__setitem__(at(data, key), data[at(data, key)] ^ 4))
    [problem] = store.verify()
    assert (problem.name, problem.kind) == ("a", "damaged")
    assert problem.what.startswith(f"{key} of its record has changed")
    if seen_when_opened:
        with pytest.raises(RecordError, match=f"document 'a': {key} of its record has changed"):
            store.open("a")
    else:
        store.open("a").close()
    assert b_is_well(store)
    assert store.source("a") == "one"


def cut(data: bytearray) -> None:
    del data[-1000:]


def empty(data: bytearray) -> None:
    data.clear()


def flip_in_header(data: bytearray) -> None:
    data[bytes(data).index(b'"block_size"') + 3] ^= 1


def other_version(data: bytearray) -> None:
    header = header_of(data)
    header["__metadata__"]["version"] = "2"
    data[:] = with_header(data, header)


def other_file(data: bytearray) -> None:
    header = header_of(data)
    del header["__metadata__"]["format"]
    data[:] = with_header(data, header)


def no_object(data: bytearray) -> None:
    data[:] = with_header(data, ["a list"])


def other_dtype(data: bytearray) -> None:
    header = header_of(data)
    header["layers.0.keys"]["dtype"] = "F16"
    data[:] = with_header(data, header)


def noise(data: bytearray) -> None:
    data[:] = bytes(range(256)) * 100


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (cut, "its record has [0-9]+ bytes; expected [0-9]+ bytes"),
        (empty, "its record has 0 bytes"),
        (flip_in_header, "the header of its record has changed"),
        (other_version, "its record is a keyhole document of version 2; expected version 1"),
        (other_file, "the header of its record cannot be read"),
        (no_object, "the header of its record cannot be read"),
        (other_dtype, "the header of its record has changed"),
        (noise, "its record has 25600 bytes; expected a header"),
    ],
)
def test_a_damaged_record_is_named_and_encoded_again(
    store: DocumentStore, edit: Callable[[bytearray], None], what: str
) -> None:
    change(record_of(store, "a"), edit)
    for start in (False, True):
        again = DocumentStore(store._catalogue.place.url, MODEL) if start else store
        with pytest.raises(RecordError, match=f"^document 'a': {what}") as raised:
            again.open("a")
        assert raised.value.kind == "damaged"
        [problem] = again.verify()
        assert (problem.name, problem.kind) == ("a", "damaged")
        assert b_is_well(again)
        assert again.stored("a", "one") is None
    store.add("a", str(store.source("a")), make_record(1))
    assert store.verify() == []
    with store.open("a") as stored:
        assert same(stored, make_record(1))


def test_a_record_under_the_name_of_another_is_named(store: DocumentStore) -> None:
    file = record_of(store, "a")
    file.write_bytes(record_of(store, "b").read_bytes())
    with pytest.raises(RecordError, match="document 'a': its record belongs to another text"):
        store.open("a")
    other = DocumentStore(file.parents[1], MODEL | {"revision": "x"})
    other.add("b", "two", make_record(2))
    file.write_bytes(record_of(other, "b").read_bytes())
    with pytest.raises(
        RecordError, match="'a': its record was made by another model: revision 'x'"
    ):
        store.open("a")
    [problem] = store.verify()
    assert (problem.name, problem.kind) == ("a", "foreign")


def test_the_nearest_of_several_foreign_records_is_named(store: DocumentStore) -> None:
    other = DocumentStore(store._catalogue.place.url, MODEL | {"revision": "x", "dtype": "y"})
    other.add("a", "one", make_record())
    third = DocumentStore(store._catalogue.place.url, MODEL | {"dtype": "z"})
    with pytest.raises(RecordError, match=r"another model: dtype 'bfloat16'; expected dtype 'z'; "):
        third.open("a")


def test_a_record_that_was_taken_away_is_missing(store: DocumentStore) -> None:
    record_of(store, "a").unlink()
    for start in (False, True):
        again = DocumentStore(store._catalogue.place.url, MODEL) if start else store
        with pytest.raises(RecordError, match=r"'a': it has no record, .* to encode it ag"):
            again.open("a")
        assert again.verify() == []
        assert again.source("a") == "one"
        assert b_is_well(again)
    again = DocumentStore(store._catalogue.place.url, MODEL)
    assert not again.info("a").encoded
    assert again.info("a").records == ()
    again.add("a", "one", make_record(1))
    assert again.info("a").encoded
    assert again.info("a").pinned


# Texts.


def test_a_changed_text_is_named_and_its_record_stays(store: DocumentStore) -> None:
    change(text_of(store, "a"), lambda data: data.__setitem__(-1, 33))
    for start in (False, True):
        again = DocumentStore(store._catalogue.place.url, MODEL) if start else store
        with pytest.raises(
            RecordError, match=r"'a': its text has changed; .* add the right text again"
        ):
            again.source("a")
        [problem] = again.verify()
        assert (problem.name, problem.kind) == ("a", "source")
        with again.open("a") as stored:
            assert same(stored, make_record(1))
    assert store.stored("a", "one") is None
    assert store.add("a", "one", make_record(1)).pinned
    assert store.source("a") == "one"
    assert store.verify() == []


def test_a_text_that_is_gone_is_named_until_the_next_start(store: DocumentStore) -> None:
    """Also after a process was killed while it removed the document; then a change of it failed
    as "documents at ... cannot be written: No such file or directory".
    """
    text_of(store, "a").unlink()
    unpinned = functools.partial(store.pin, pinned=False)
    for call in (store.source, unpinned, functools.partial(store.describe, metadata={"x": 1})):
        with pytest.raises(RecordError, match="document 'a': its text is missing"):
            call("a")
    [problem] = store.verify()
    assert (problem.name, problem.kind) == ("a", "source")
    again = DocumentStore(store._catalogue.place.url, MODEL)
    assert [info.name for info in again.list()] == ["b"]
    assert b_is_well(again)


@pytest.mark.parametrize("index_is_there", [True, False])
def test_a_text_with_a_damaged_first_line_keeps_its_name(
    store: DocumentStore, index_is_there: bool
) -> None:
    change(text_of(store, "a"), lambda data: data.__setitem__(5, 33))
    if not index_is_there:
        (Path(store._catalogue.place.url) / "index.sqlite").unlink()
    for _ in range(2):  # starts
        again = DocumentStore(store._catalogue.place.url, MODEL)
        assert [info.name for info in again.list()] == ["a", "b"]
        assert again.source("a") == "one"
        with again.open("a") as stored:
            assert same(stored, make_record(1))
        [problem] = again.verify()
        assert (problem.name, problem.kind) == ("a", "damaged")
        assert b_is_well(again)
    assert again.stored("a", "one") is None
    again.add("a", "one", make_record(1))
    assert again.verify() == []


def test_an_unidentifiable_file_is_reported_and_nothing_is_deleted(
    store: DocumentStore, tmp_path: Path
) -> None:
    text, record = text_of(store, "a"), record_of(store, "a")
    for file in (text, record):
        change(file, lambda data: data.__setitem__(12, data[12] ^ 1))
    (tmp_path / "index.sqlite").unlink()
    again = DocumentStore(tmp_path, MODEL)
    assert [info.name for info in again.list()] == ["b"]
    [problem] = again.verify()
    assert (problem.name, problem.kind) == (f"documents/{text.name}", "source")
    assert text.exists()
    assert record.exists()
    again.add("a", "one", make_record(1))
    assert again.verify() == []
    with again.open("a") as stored:
        assert same(stored, make_record(1))


# Records that change while they are open.


def test_a_record_that_another_program_cuts_is_an_error(store: DocumentStore) -> None:
    with store.open("b") as document:
        os.truncate(record_path(store, "b"), 5000)
        with pytest.raises(RecordError, match=r"document 'b'.*the file ends at byte \d+, before"):
            document.rows(2, 0, document.length)


def add_with_head(store: DocumentStore) -> DocumentRecord:
    """Adds document "c", with keys of a retrieval head."""
    record = make_record(7)
    record.heads["head"] = HeadRecord(
        record.layers[0].keys[..., :4].clone(), torch.ones(4).bfloat16()
    )
    store.add("c", "text c", record)
    return record


def span_of(store: DocumentStore, document: str, tensor: str) -> Span:
    with closing(LocalReader(record_path(store, document))) as reader:
        return read_header(reader).spans[tensor]


@pytest.mark.parametrize("name", ["layers.1.keys", "layers.2.values", "heads.head.keys"])
def test_a_value_that_flips_is_not_answered_from(store: DocumentStore, name: str) -> None:
    """Before the record is opened and after it; blocks beside the changed one are read."""
    add_with_head(store)
    checking = DocumentStore(store._catalogue.place.url, MODEL, check="read")
    path, span = record_path(store, "c"), span_of(store, "c", name)
    row = (span.stop - span.start) // span.shape[0]

    def read(document: StoredDocument, start: int, stop: int) -> object:
        if name.startswith("heads"):
            return document.head_keys("head", start, stop)
        return document.rows(int(name.split(".")[1]), start, stop)

    with checking.open("c") as before:
        read(before, 0, 150)
        flip(path, span.start + 100 * row)
        for document in (before, checking.open("c")):
            read(document, 0, 64)
            read(document, 128, 150)
            for start, stop in ((64, 65), (100, 101), (3, 140)):
                with pytest.raises(RecordError, match=f"'c': block 1 of {name} of its record has"):
                    read(document, start, stop)
            document.close()
    with store.open("c") as trusting:
        read(trusting, 0, 150)
    assert [problem.kind for problem in store.verify(["c"])] == ["damaged"]


@pytest.mark.parametrize("name", ["layers.1.extreme_keys", "heads.head.last"])
def test_other_values_are_checked_as_a_whole(store: DocumentStore, name: str) -> None:
    record = add_with_head(store)
    checking = DocumentStore(store._catalogue.place.url, MODEL, check="read")
    path, span = record_path(store, "c"), span_of(store, "c", name)
    with checking.open("c") as document:
        assert same(document, record)
        flip(path, span.start)
        with pytest.raises(RecordError, match=f"'c': {name} of its record has changed"):
            document.head_last("head") if name.startswith("heads") else document.extreme_keys()


def test_rows_that_are_checked_are_those_that_were_stored(store: DocumentStore) -> None:
    checking = DocumentStore(store._catalogue.place.url, MODEL, check="read")
    record = make_record(1)
    checking.add("c", "text c", record)
    with checking.open("c") as document:
        for start in (0, 1, 63, 64, 100, 149):
            for stop in (start, start + 1, 128, 150):
                keys, values = document.rows(1, start, max(start, stop))
                assert torch.equal(keys, record.layers[1].keys[start:stop])
                assert values is not None
                assert torch.equal(values, record.layers[1].values[start:stop])  # type: ignore[index]


def test_what_is_checked_is_one_of_two_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check 'always' must be 'open' or 'read'"):
        DocumentStore(tmp_path, MODEL, check="always")


def record_path(store: DocumentStore, name: str) -> Path:
    url = Path(store._catalogue.place.url)
    return url / "records" / f"{store.info(name).digest}-{store.model}.safetensors"


def flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


# The index.


@pytest.mark.parametrize("code", [sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL])
def test_an_index_that_cannot_be_read_now_is_not_thrown_away(
    store: DocumentStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    index = Path(store._catalogue.place.url) / "index.sqlite"
    before = index.read_bytes()

    def fails(_: Index) -> sqlite3.Connection:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = code
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Index, "_connect", fails)
        with pytest.raises((ConfigError, CapacityError), match="disk I/O error"):
            DocumentStore(store._catalogue.place.url, MODEL)
    assert index.read_bytes() == before
    assert [info.name for info in DocumentStore(store._catalogue.place.url, MODEL).list()] == [
        "a",
        "b",
    ]


@pytest.mark.parametrize("damage", ["gone", "noise", "empty", "cut", "old", "flipped"])
def test_the_index_is_made_again(store: DocumentStore, damage: str) -> None:
    store.open("b").close()
    before = {info.name: info for info in store.list()}
    index = Path(store._catalogue.place.url) / "index.sqlite"
    if damage == "gone":
        index.unlink()
    elif damage == "old":
        with closing(sqlite3.connect(index)) as connection:
            connection.execute("PRAGMA user_version = 999")
    else:
        data = index.read_bytes()
        flipped = data[:4096] + bytes(x ^ 0xFF for x in data[4096:])
        changed = {"noise": b"no index" * 999, "empty": b"", "cut": data[:5000], "flipped": flipped}
        index.write_bytes(changed[damage])
    again = DocumentStore(store._catalogue.place.url, MODEL)
    for info in again.list():
        old = before[info.name]
        assert (info.created, info.pinned, info.digest) == (old.created, old.pinned, old.digest)
        assert (info.tokens, info.size_bytes, info.records) == (
            old.tokens, old.size_bytes, old.records,
        )  # fmt: skip
        assert info.hits == 0
    assert [info.name for info in again.list()] == ["a", "b"]
    assert again.verify() == []
    assert b_is_well(again)
    assert again.info("b").hits == 1


def test_what_is_read_late_does_not_undo_what_was_stored_meanwhile(store: DocumentStore) -> None:
    index = store._catalogue.index
    old = store._catalogue.source("a")
    store.add("a", "another", make_record(3), overwrite=True)
    new = store._catalogue.source("a")
    for before in (old, None):
        index.replace_document(before, old, 1)
        assert index.source("a") == new
    index.replace_document(new, old, 1)
    assert index.source("a") == old
    with store.open("a") as stored:  # which finds out
        assert same(stored, make_record(3))
    assert index.source("a") == new


def test_what_is_copied_in_by_hand_is_found(store: DocumentStore, tmp_path: Path) -> None:
    other = DocumentStore(tmp_path / "other", MODEL)
    other.add("c", "three", make_record(3))
    for folder in ("documents", "records"):
        for file in (tmp_path / "other" / folder).iterdir():
            (tmp_path / folder / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UnknownNameError):
        store.info("d")
    assert store.source("c") == "three"
    with store.open("c") as stored:
        assert same(stored, make_record(3))
    (tmp_path / "records" / "notes.txt").write_text("not ours")
    again = DocumentStore(tmp_path, MODEL)
    assert [info.name for info in again.list()] == ["a", "b", "c"]
    assert again.info("c").size_bytes == other.info("c").size_bytes
    assert again.verify() == []
    assert (tmp_path / "records" / "notes.txt").exists()


def test_an_overwrite_that_the_index_did_not_see_is_seen(
    store: DocumentStore, tmp_path: Path
) -> None:
    other = DocumentStore(tmp_path / "other", MODEL)
    other.add("a", "another", make_record(3))
    for folder in ("documents", "records"):
        for file in (tmp_path / "other" / folder).iterdir():
            (tmp_path / folder / file.name).write_bytes(file.read_bytes())
    record_of(store, "a").unlink()
    with store.open("a") as stored:
        assert same(stored, make_record(3))
    assert store.source("a") == "another"
    assert DocumentStore(tmp_path, MODEL).source("a") == "another"
