"""Stored documents: they are found again by name, bitwise equal."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from keyhole.documents.store import DocumentStore
from keyhole.errors import ConfigError, UnknownNameError
from tests.documents.records import MODEL, make_record, place, same, store, user_cache

__all__ = ["place", "store", "user_cache"]

# What is added is there.


def test_what_is_added_is_there_after_a_restart(place: str | Path, store: DocumentStore) -> None:
    before = time.time()
    record = make_record()
    info = store.add("handbook", "The text.\r\n\0 Ünïcode 🙂", record)
    assert (info.name, info.tokens, info.block_size) == ("handbook", 150, 64)
    assert info.digest == hashlib.sha256("The text.\r\n\0 Ünïcode 🙂".encode()).hexdigest()
    assert before <= info.created <= time.time()
    assert (info.hits, info.pinned, info.encoded) == (0, False, True)
    assert info.records == (store.model,)
    for start in (False, True):
        again = DocumentStore(place, MODEL) if start else store
        assert again.source("handbook") == "The text.\r\n\0 Ünïcode 🙂"
        assert [x.name for x in again.list()] == ["handbook"]
        with again.open("handbook") as stored:
            assert same(stored, record)
            assert stored.length == 150
        assert again.verify() == []
    info = store.info("handbook")
    assert info.hits == 2
    assert info.last_used > info.created


def test_token_ids_are_a_source(store: DocumentStore) -> None:
    store.add("ids", [5, 0, 2**40], make_record())
    store.add("text", "[5,0,1099511627776]", make_record(1))
    assert store.source("ids") == [5, 0, 2**40]
    assert store.source("text") == "[5,0,1099511627776]"
    assert store.info("ids").digest != store.info("text").digest
    assert store.verify() == []


def test_token_ids_beyond_64_bits_are_refused(store: DocumentStore) -> None:
    """They ended in an OverflowError."""
    with pytest.raises(ConfigError, match=r"token id 9223372036854775808 of a document must be"):
        store.add("ids", [5, 2**63], make_record())
    store.add("ids", [5, 2**63 - 1], make_record())
    assert store.source("ids") == [5, 2**63 - 1]


def test_a_text_is_readable_without_a_program(tmp_path: Path) -> None:
    DocumentStore(tmp_path, MODEL).add("x", "one\ntwo\n", make_record())
    [file] = (tmp_path / "documents").iterdir()
    assert file.read_text().split("\n", 1)[1] == "one\ntwo\n"


# Names.


def test_the_same_text_again_changes_nothing(store: DocumentStore) -> None:
    assert store.stored("x", "text") is None
    first = store.add("x", "text", make_record(0))
    assert store.stored("x", "text") == first
    assert store.add("x", "text", make_record(1)) == first
    with store.open("x") as stored:
        assert same(stored, make_record(0))
    with store.open("x"):
        pass
    assert store.add("x", "text", make_record(1)).hits == 2


def test_another_text_under_a_name_is_refused_unless_overwritten(store: DocumentStore) -> None:
    store.add("x", "text", make_record(0), pinned=True)
    with pytest.raises(ConfigError, match=r"'x' is stored with another text .* overwrite it"):
        store.add("x", "text two", make_record(1))
    with pytest.raises(ConfigError, match="'x' is stored with another text"):
        store.stored("x", "text two")
    assert store.stored("x", "text two", overwrite=True) is None
    assert store.source("x") == "text"
    info = store.add("x", "text two", make_record(1), overwrite=True)
    assert info.pinned
    assert info == store.info("x")
    assert store.source("x") == "text two"
    with store.open("x") as stored:
        assert same(stored, make_record(1))
    assert store.verify() == []
    assert len(store._catalogue.place.files("records")) == 1


def test_overwriting_with_the_same_text_puts_the_record_anew(store: DocumentStore) -> None:
    store.add("x", "text", make_record(0))
    store.add("x", "text", make_record(1), overwrite=True)
    with store.open("x") as stored:
        assert same(stored, make_record(1))


def test_names_with_one_text_share_a_record(store: DocumentStore) -> None:
    store.add("a", "text", make_record())
    assert store.stored("b", "text") is None
    store.add("b", "text", make_record())
    assert len(store._catalogue.place.files("records")) == 1
    store.remove("a")
    with store.open("b") as stored:
        assert same(stored, make_record())
    store.add("c", "text", make_record())
    store.add("b", "text two", make_record(1), overwrite=True)
    with store.open("c") as stored:
        assert same(stored, make_record())
    assert store.verify() == []
    store.remove("b")
    store.remove("c")
    assert store._catalogue.place.files("records") == {}


def test_removed_documents_are_gone(place: str | Path, store: DocumentStore) -> None:
    store.add("a", "one", make_record())
    store.add("b", "two", make_record())
    store.remove("a")
    for start in (False, True):
        again = DocumentStore(place, MODEL) if start else store
        assert [info.name for info in again.list()] == ["b"]
        for call in (again.info, again.open, again.source, again.remove, again.pin):
            with pytest.raises(UnknownNameError, match="unknown document 'a'"):
                call("a")
    assert len(store._catalogue.place.files("documents")) == 1
    assert len(store._catalogue.place.files("records")) == 1


def test_the_nearest_name_is_offered(store: DocumentStore) -> None:
    store.add("handbook", "text", make_record())
    with pytest.raises(UnknownNameError, match="unknown document 'hanbook'; did you mean 'handb"):
        store.open("hanbook")
    with pytest.raises(UnknownNameError, match="unknown document 'hanbook'"):
        store.verify(["handbook", "hanbook"])


def test_of_many_names_the_nearest_are_listed(store: DocumentStore) -> None:
    for number in range(14):
        store.add(f"chapter {number}", "text", make_record())
    with pytest.raises(UnknownNameError) as raised:
        store.open("chapter 77")
    assert "unknown document 'chapter 77'; did you mean 'chapter 7'? (known: " in str(raised.value)
    assert "… and 2 others)" in str(raised.value)
    with pytest.raises(UnknownNameError, match=r"\(known: chapter 0, … and 13 others\)$"):
        store.open("zzz")


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "a\0", "\x1b[1m", "x" * 201, "\ud800", 7, None])
def test_names_that_cannot_be(store: DocumentStore, name: str) -> None:
    with pytest.raises(ConfigError, match=r"document name .* must be printable"):
        store.add(name, "text", make_record())
    assert store.list() == []


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "a/b", ".", "con", "ÄÖ 文書 🙂", "x" * 200, "a'; DROP TABLE x", "%s"],
)
def test_any_other_name_can_be(place: str | Path, store: DocumentStore, name: str) -> None:
    store.add(name, "text", make_record())
    again = DocumentStore(place, MODEL)
    assert [info.name for info in again.list()] == [name]
    assert again.source(name) == "text"
    again.remove(name)
    assert again.list() == []


# Pins, models.


def test_a_pin_survives_a_restart(place: str | Path, store: DocumentStore) -> None:
    assert store.add("a", "one", make_record(), pinned=True).pinned
    assert not store.add("b", "two", make_record()).pinned
    assert store.add("b", "two", make_record(), pinned=True).pinned
    assert store.add("b", "two", make_record()).pinned
    assert store.add("b", "other", make_record(), overwrite=True).pinned
    assert not store.add("a", "one", make_record(), pinned=False).pinned
    again = DocumentStore(place, MODEL)
    assert [info.pinned for info in again.list()] == [False, True]
    assert again.source("a") == "one"
    assert again.verify() == []


def test_another_text_is_unpinned_on_request(store: DocumentStore) -> None:
    store.add("a", "one", make_record(), pinned=True)
    assert not store.add("a", "two", make_record(), overwrite=True, pinned=False).pinned


def test_records_of_several_models_live_side_by_side(place: str | Path) -> None:
    other = MODEL | {"dtype": "float32", "tokenizer": "11"}
    one, two = DocumentStore(place, MODEL), DocumentStore(place, other)
    record, wide = make_record(n=150), make_record(n=70, dtype=torch.float32, block_size=32)
    one.add("x", "text", record)
    assert not two.info("x").encoded
    assert two.stored("x", "text") is None
    two.add("x", "text", wide)
    for each in (one, two, DocumentStore(place, MODEL), DocumentStore(place, other)):
        mine = record if each.model == one.model else wide
        info = each.info("x")
        assert info.records == tuple(sorted([one.model, two.model]))
        assert (info.tokens, info.block_size) == (len(mine.token_ids), mine.block_size)
        with each.open("x") as stored:
            assert same(stored, mine)
        assert each.verify() == []


def test_what_a_model_counts_is_known_after_the_index_is_lost(tmp_path: Path) -> None:
    one, two = (DocumentStore(tmp_path, MODEL | {"tokenizer": name}) for name in ("a", "b"))
    one.add("x", "text", make_record(n=150))
    two.add("x", "text", make_record(n=70, block_size=32))
    (tmp_path / "index.sqlite").unlink()
    infos = [DocumentStore(tmp_path, store.fingerprint).info("x") for store in (one, two)]
    assert [(info.tokens, info.block_size) for info in infos] == [(150, 64), (70, 32)]


@pytest.mark.parametrize(
    "fingerprint", [{}, {"a": None}, {"a": [1]}, {1: "a"}, {"a": float("nan")}]
)
def test_fingerprints_that_cannot_be(tmp_path: Path, fingerprint: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="fingerprint"):
        DocumentStore(tmp_path, fingerprint)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "1GB"])
def test_limits_that_cannot_be(tmp_path: Path, limit: int) -> None:
    with pytest.raises(ConfigError, match="limit_bytes"):
        DocumentStore(tmp_path, MODEL, limit_bytes=limit)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_another_process_says_of_a_document_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """The pin and the metadata of before were written back."""
    one, two = DocumentStore(tmp_path, MODEL), DocumentStore(tmp_path, MODEL)
    one.add("x", "text", make_record(n=64))
    if not overwrite:
        (record,) = (tmp_path / "records").iterdir()
        record.unlink()
    place = one._catalogue.place
    stage = place.stage

    def meanwhile(path: str, pieces: Any) -> Any:
        if path.startswith("records/"):
            two.pin("x")
            two.describe("x", {"k": 1})
        return stage(path, pieces)

    monkeypatch.setattr(place, "stage", meanwhile)
    info = one.add("x", "text", make_record(n=64), overwrite=overwrite)
    assert (info.pinned, info.metadata) == (True, {"k": 1})
    assert (one.info("x").pinned, one.info("x").metadata) == (True, {"k": 1})


@pytest.mark.parametrize("pinned", [[], {}, 1, None])
def test_a_pin_that_is_neither_true_nor_false_is_refused(tmp_path: Path, pinned: Any) -> None:
    """The file was written with a list, and the store could not be opened again."""
    store = DocumentStore(tmp_path, MODEL)
    store.add("x", "text", make_record(n=64))
    with pytest.raises(ConfigError, match=r"pinned .* must be True or False$"):
        store.pin("x", pinned)
    (found,) = DocumentStore(tmp_path, MODEL).list()
    assert found.pinned is False


def test_more_documents_than_a_process_may_open_files_are_open_at_once(tmp_path: Path) -> None:
    """Questions over more than 500 documents failed: most systems allow 1024 files at first."""
    store = DocumentStore(tmp_path, MODEL)
    store.add("x", "text", make_record(n=1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(map(int, os.listdir("/dev/fd"))) + 80
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        opened = [store.open("x") for _ in range(few)]  # each has two files
        for document in opened:
            document.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_many_files_for_the_system_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DocumentStore(tmp_path, MODEL)
    store.add("x", "text", make_record(n=1))

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("keyhole.documents.storage._opened", refuse)
    with pytest.raises(ConfigError, match="Too many open files; name fewer documents, or allow"):
        store.open("x")
