"""Documents read without an index and without locks, as the workers of a server do."""

from __future__ import annotations

import fcntl
import uuid
from pathlib import Path

import pytest

from keyhole.documents.lookup import DocumentLookup
from keyhole.documents.remote import open_storage
from keyhole.documents.source import file_of
from keyhole.documents.store import DocumentStore, RecordError
from keyhole.errors import ConfigError, UnknownNameError
from tests.documents.records import MODEL, make_record, same, user_cache

__all__ = ["user_cache"]

OTHER = MODEL | {"revision": "next", "dtype": "float16"}


@pytest.fixture(params=["folder", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{uuid.uuid4().hex}" if request.param == "url" else str(tmp_path / "store")


def test_a_record_is_read_without_a_lock(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record()
    store = DocumentStore(place, MODEL)
    store.add("handbook", "its text", record)

    def locked(*_: object) -> None:
        raise AssertionError("a lock was taken")

    monkeypatch.setattr(fcntl, "flock", locked)
    lookup = DocumentLookup(place, MODEL)
    lookup.check_model()
    digest = lookup.digest("handbook")
    with lookup.open("handbook", digest) as document:
        assert same(document, record)
        assert document.info.name == "handbook"
        assert document.info.digest == digest


def test_documents_that_are_added_later_are_found(place: str) -> None:
    store, lookup = DocumentStore(place, MODEL), DocumentLookup(place, MODEL)
    store.add("handbook", "its text", make_record())
    before = lookup.digest("handbook")
    store.add("handbook", "another text", make_record(1), overwrite=True)
    assert lookup.digest("handbook") != before
    with lookup.open("handbook", lookup.digest("handbook")) as document:
        assert same(document, make_record(1))


def test_an_unknown_name_is_refused_with_the_nearest(place: str) -> None:
    DocumentStore(place, MODEL).add("handbook", "its text", make_record())
    with pytest.raises(UnknownNameError, match="did you mean 'handbook'"):
        DocumentLookup(place, MODEL).digest("handbok")


def test_half_of_a_character_is_an_unknown_name(place: str) -> None:
    """It ended in a UnicodeEncodeError; JSON may contain one."""
    DocumentStore(place, MODEL).add("handbook", "its text", make_record())
    with pytest.raises(UnknownNameError, match=r"document '\\ud800'"):
        DocumentLookup(place, MODEL).digest("\ud800")


def test_an_unknown_name_is_refused_beside_a_damaged_document(place: str) -> None:
    """The damaged document's error was raised instead, as if it had been asked for."""
    store = DocumentStore(place, MODEL)
    store.add("handbook", "its text", make_record())
    store.add("leaflet", "another text", make_record(1))
    storage = open_storage(place)
    path = f"documents/{file_of('leaflet')}"
    storage.stage(path, [storage.read(path).replace(b"leaflet", b"leaf1et")]).commit()
    with pytest.raises(UnknownNameError, match="did you mean 'handbook'"):
        DocumentLookup(place, MODEL).digest("handbok")
    with pytest.raises(RecordError, match="document 'leaflet': the first line"):
        DocumentLookup(place, MODEL).digest("leaflet")


def test_a_store_of_another_model_is_refused_with_the_difference(place: str) -> None:
    DocumentStore(place, MODEL).add("handbook", "its text", make_record())
    lookup = DocumentLookup(place, OTHER)
    with pytest.raises(ConfigError, match="another model: it has dtype 'bfloat16', revision"):
        lookup.check_model()
    with pytest.raises(
        RecordError, match="'handbook': its record was made by another model: dtype"
    ):
        lookup.open("handbook", lookup.digest("handbook"))


def test_a_store_with_records_of_several_models_is_accepted(place: str) -> None:
    DocumentStore(place, MODEL).add("handbook", "its text", make_record())
    DocumentStore(place, OTHER).add("leaflet", "another text", make_record(1))
    DocumentLookup(place, OTHER).check_model()


def test_an_empty_store_is_accepted(place: str) -> None:
    DocumentLookup(place, MODEL).check_model()


def test_a_record_that_was_taken_away_is_said_to_be_missing(tmp_path: Path) -> None:
    DocumentStore(tmp_path, MODEL).add("handbook", "its text", make_record())
    lookup = DocumentLookup(tmp_path, MODEL)
    for record in (tmp_path / "records").iterdir():
        record.unlink()
    with pytest.raises(RecordError, match="'handbook': it has no record") as error:
        lookup.open("handbook", lookup.digest("handbook"))
    assert error.value.kind == "missing"
