"""Room: the least recently used records leave, never one in use, and a full disk loses nothing."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from keyhole.config import bytes_text
from keyhole.documents.store import DocumentStore, RecordError
from keyhole.errors import CapacityError, ConfigError
from tests.disks import files_at_most
from tests.documents.records import MODEL, make_record, place, same, user_cache

__all__ = ["place", "user_cache"]


@pytest.fixture
def size(tmp_path_factory: pytest.TempPathFactory) -> int:
    """What a document of these tests needs."""
    store = DocumentStore(tmp_path_factory.mktemp("size"), MODEL)
    return store.add("0", "text 0", make_record(0)).size_bytes


def fill(store: DocumentStore, *numbers: int, pinned: bool = False) -> None:
    for number in numbers:
        store.add(str(number), f"text {number}", make_record(number), pinned=pinned)


def encoded(store: DocumentStore) -> str:
    """The documents that have a record; that these and no others lie in the place is checked."""
    infos = [info for info in store.list() if info.encoded]
    files = store._catalogue.place.files("records")
    assert set(files) == {f"{info.digest}-{store.model}.safetensors" for info in infos}
    return "".join(info.name for info in infos)


def total(store: DocumentStore) -> int:
    """Bytes that lie in the place, index aside."""
    found = store._catalogue.place
    return sum(e.size_bytes for f in ("documents", "records") for e in found.files(f).values())


# Eviction.


def test_the_least_recently_used_record_leaves(place: str | Path, size: int) -> None:
    store = DocumentStore(place, MODEL, limit_bytes=3 * size + size // 2)
    fill(store, 0, 1, 2)
    assert encoded(store) == "012"
    assert sum(info.size_bytes for info in store.list()) == total(store)
    store.open("0").close()
    fill(store, 3)
    assert encoded(store) == "023"
    fill(store, 4)
    assert encoded(store) == "034"
    assert total(store) <= 3 * size + size // 2
    assert [info.name for info in store.list()] == list("01234")
    assert store.source("1") == "text 1"
    with pytest.raises(
        RecordError, match="document '1': it has no record, because it was evicted"
    ) as e:
        store.open("1")
    assert e.value.kind == "missing"
    assert store.verify() == []
    fill(store, 1)
    assert encoded(store) == "134"
    with store.open("1") as stored:
        assert same(stored, make_record(1))


def test_what_was_used_last_is_known_to_other_processes(place: str | Path, size: int) -> None:
    fill(DocumentStore(place, MODEL), 0, 1, 2)
    DocumentStore(place, MODEL).open("0").close()
    assert encoded(DocumentStore(place, MODEL, limit_bytes=2 * size + size // 2)) == "02"


def test_a_pinned_record_stays(place: str | Path, size: int) -> None:
    store = DocumentStore(place, MODEL, limit_bytes=2 * size + size // 2)
    fill(store, 0, pinned=True)
    fill(store, 1, 2, 3)
    assert encoded(store) == "03"
    store.pin("3")
    with pytest.raises(CapacityError, match=r"would exceed the limit of .* pinned or in use"):
        fill(store, 4)
    assert encoded(store) == "03"
    assert [info.name for info in store.list()] == list("0123")
    store.pin("0", False)
    fill(store, 4)
    assert encoded(store) == "34"


def test_a_record_in_use_stays(place: str | Path, size: int) -> None:
    store = DocumentStore(place, MODEL, limit_bytes=2 * size + size // 2)
    fill(store, 0, 1)
    with store.open("0") as stored, DocumentStore(place, MODEL).open("1"):
        with pytest.raises(CapacityError):
            fill(store, 2)
        assert encoded(store) == "01"
        assert same(stored, make_record(0))
    fill(store, 2)
    assert encoded(store) == "12"


def test_an_open_document_that_is_forgotten_is_free(tmp_path: Path, size: int) -> None:
    store = DocumentStore(tmp_path, MODEL, limit_bytes=size + size // 2)
    fill(store, 0)
    store.open("0")
    fill(store, 1)
    assert encoded(store) == "1"


def test_a_record_in_use_may_be_removed_and_leaves_later(place: str | Path, size: int) -> None:
    store = DocumentStore(place, MODEL)
    fill(store, 0, 1)
    with store.open("0") as zero, store.open("1") as one:
        store.remove("0")
        store.add("1", "another", make_record(5), overwrite=True)
        assert same(zero, make_record(0))
        assert same(one, make_record(1))
        with store.open("1") as stored:
            assert same(stored, make_record(5))
        assert [info.name for info in store.list()] == ["1"]
    # Those that belong to nothing leave first.
    fill(DocumentStore(place, MODEL, limit_bytes=2 * size + size // 2), 2)
    assert encoded(DocumentStore(place, MODEL)) == "12"


def test_a_document_larger_than_the_limit_changes_nothing(place: str | Path, size: int) -> None:
    store = DocumentStore(place, MODEL, limit_bytes=2 * size + size // 2)
    fill(store, 0, 1)
    with pytest.raises(
        CapacityError, match=f"limit of {bytes_text(2 * size + size // 2)} for docum"
    ):
        store.add("big", "text", make_record(9, n=1500))
    with pytest.raises(CapacityError):
        store.add("0", "text", make_record(9, n=1500), overwrite=True)
    assert encoded(store) == "01"
    assert store.source("0") == "text 0"
    assert total(store) == sum(info.size_bytes for info in store.list())


def test_overwriting_needs_space_only_for_the_difference(place: str | Path, size: int) -> None:
    store = DocumentStore(place, MODEL, limit_bytes=2 * size + size // 2)
    fill(store, 0, 1, pinned=True)
    store.add("0", "text 9", make_record(9), overwrite=True)
    store.add("1", "text 1", make_record(8), overwrite=True)
    assert encoded(store) == "01"
    assert store.verify() == []


def test_a_limit_that_is_lowered_holds_from_the_next_start(place: str | Path, size: int) -> None:
    fill(DocumentStore(place, MODEL), 0, 1, 2)
    assert encoded(DocumentStore(place, MODEL, limit_bytes=size + size // 2)) == "2"
    fill(DocumentStore(place, MODEL), 0, 1, pinned=True)
    assert encoded(DocumentStore(place, MODEL, limit_bytes=size)) == "01"


def test_records_of_other_models_are_evicted_too(place: str | Path, size: int) -> None:
    fill(DocumentStore(place, MODEL | {"dtype": "other"}), 0, 1)
    store = DocumentStore(place, MODEL, limit_bytes=2 * size + size // 2)
    fill(store, 0, 2)
    assert encoded(store) == "02"


# Disks.


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    store = DocumentStore(tmp_path, MODEL)
    fill(store, 0, 1)
    with files_at_most(100_000):
        with pytest.raises(CapacityError, match="cannot be written: File too large; the store is"):
            store.add("big", "text", make_record(2, n=1500))
        with pytest.raises(CapacityError):
            store.add("0", "other", make_record(2, n=1500), overwrite=True)
        assert encoded(store) == "01"
        assert store.verify() == []
    assert list((tmp_path / "parts").iterdir()) == []
    fill(store, 2)
    assert encoded(store) == "012"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, CapacityError),
        (errno.EDQUOT, CapacityError),
        (errno.EIO, ConfigError),
        (errno.EACCES, ConfigError),
    ],
)
@pytest.mark.parametrize(
    ("function", "steps"),
    [
        ("write", (1, 9, 35, 36, 37, 38)),  # header and 34 tensors; first line and text
        ("fsync", (1, 2, 3, 4, 5)),  # record, its folder; text, its folder
        ("replace", (1, 2, 3)),
    ],
)
def test_a_failure_at_any_step_loses_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error: type[Exception],
    function: str,
    steps: tuple[int, ...],
) -> None:
    store = DocumentStore(tmp_path, MODEL)
    fill(store, 0, 1)
    real = getattr(os, function)
    for step in steps:
        left = step

        def fail(*arguments: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(number, os.strerror(number))
            return real(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(os, function, fail)
            told = pytest.raises(error, match=f"{tmp_path}.* written: {os.strerror(number)}")
            with told if step != steps[-1] else nullcontext():
                store.add("0", f"text of step {step}", make_record(step), overwrite=True)
        assert list((tmp_path / "parts").iterdir()) == []
        digests = {info.digest for info in store.list()}
        assert {path.name[:64] for path in (tmp_path / "records").iterdir()} == digests
        for open_again in (False, True):
            again = DocumentStore(tmp_path, MODEL) if open_again else store
            assert again.verify() == []
            with again.open("1") as stored:
                assert same(stored, make_record(1))
            text = str(again.source("0"))
            with again.open("0") as stored:
                assert same(stored, make_record(int(text.split()[-1])))
        assert (left > 0) == (step == steps[-1])


def test_a_place_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"documents cannot be stored at '.*/file/x': Not a directory; name"
    ):
        DocumentStore(tmp_path / "file" / "x", MODEL)


def test_a_read_only_place_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    fill(DocumentStore(tmp_path / "place", MODEL), 0, 1)
    real = os.open

    def refuse(path: str | Path, flags: int, *arguments: int, **named: int) -> int:
        if str(path).startswith(str(tmp_path)) and flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *arguments, **named)

    def refuse_file(path: str | Path, mode: str = "r", **named: int) -> object:
        if str(path).startswith(str(tmp_path)) and mode != "rb":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return open(path, mode, **named)

    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "place").rglob("*")}
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr("keyhole.documents.storage.open", refuse_file, raising=False)
    store = DocumentStore(tmp_path / "place", MODEL, limit_bytes=size)
    assert encoded(store) == "01"
    with store.open("1") as stored:
        assert same(stored, make_record(1))
    assert store.info("1").hits == 1
    assert store.verify() == []
    store = DocumentStore(tmp_path / "place", MODEL)
    for call in (lambda: fill(store, 2), lambda: store.pin("0")):
        with pytest.raises(ConfigError, match="cannot be written: Read-only file system"):
            call()
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "place").rglob("*")} == before


def test_a_place_must_be_named() -> None:
    with pytest.raises(ConfigError, match="place of documents '' must be a folder or a URL"):
        DocumentStore("", MODEL)


def test_a_store_beyond_its_limit_may_shrink(place: str | Path) -> None:
    """A smaller document in place of a pinned one was refused: "-16000 bytes more do not fit"."""
    store = DocumentStore(place, MODEL)
    large = store.add("0", "text 0", make_record(0, n=300), pinned=True).size_bytes
    small = DocumentStore(place, MODEL, limit_bytes=1000)
    info = small.add("0", "text 1", make_record(1), overwrite=True)
    assert info.encoded
    assert info.size_bytes < large
    with pytest.raises(CapacityError, match=r"KiB more would exceed the limit of 1000 B"):
        small.add("0", "text 0", make_record(0, n=300), overwrite=True)
