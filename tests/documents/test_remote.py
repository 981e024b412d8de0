"""Documents at URLs: byte ranges, several machines, packages that are missing, failures."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from keyhole.documents.remote import RemoteStorage
from keyhole.documents.storage import LocalStorage
from keyhole.documents.store import DocumentStore, RecordError
from keyhole.errors import ConfigError, UnknownNameError
from tests.documents.records import MODEL, make_record, same, user_cache

__all__ = ["user_cache"]


class ShareFileSystem(LocalFileSystem):
    """Files of a server: nothing can be mapped, and what is half-written can be seen."""

    protocol = "keyhole-share"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(LocalFileSystem._strip_protocol(path.removeprefix("keyhole-share://")))


fsspec.register_implementation("keyhole-share", ShareFileSystem, clobber=True)


@pytest.fixture
def bucket() -> Iterator[str]:
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    system, path = fsspec.url_to_fs(url)
    if system.exists(path):
        system.rm(path, recursive=True)


@pytest.fixture
def share(tmp_path: Path) -> str:
    return f"keyhole-share://{tmp_path}/share"


@pytest.fixture(params=["bucket", "share"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def machine(url: str, tmp_path: Path, name: str) -> DocumentStore:
    """The same place from another machine: another index, other locks."""
    return DocumentStore(url, MODEL, cache_folder=tmp_path / name)


def test_a_share_is_written_by_moving(share: str, tmp_path: Path) -> None:
    store = DocumentStore(share, MODEL)
    store.add("x", "text", make_record())
    store.add("x", "text two", make_record(1), overwrite=True)
    store.pin("x")
    again = machine(share, tmp_path, "other")
    assert again.source("x") == "text two"
    assert again.info("x").pinned
    with again.open("x") as stored:
        assert same(stored, make_record(1))
    assert again.verify() == []
    assert sorted(os.listdir(tmp_path / "share")) == ["documents", "parts", "records"]
    assert os.listdir(tmp_path / "share" / "parts") == []
    assert len(os.listdir(tmp_path / "share" / "records")) == 1


def test_what_other_machines_add_and_remove_is_listed(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists were those of the start: what was added elsewhere was in none, and never found."""
    monkeypatch.setattr("keyhole.documents.catalogue.FRESH_S", 0.0)
    here, there = machine(url, tmp_path, "here"), machine(url, tmp_path, "there")
    here.add("x", "text", make_record())
    assert [info.name for info in there.list()] == ["x"]
    there.add("y", "another text", make_record(1))
    here.remove("x")
    assert [[info.name for info in store.list()] for store in (here, there)] == [["y"], ["y"]]
    monkeypatch.undo()
    here.remove("y")
    assert [[info.name for info in store.list()] for store in (here, there)] == [[], ["y"]]


def test_what_is_read_is_counted(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DocumentStore(bucket, MODEL)
    record = make_record(n=2000, heads=4, dims=(64, 32))
    size = store.add("x", "text", record).size_bytes
    asked: list[bytes] = []
    real = MemoryFileSystem.cat_file

    def counted(self: MemoryFileSystem, *arguments: Any, **named: Any) -> bytes:
        asked.append(real(self, *arguments, **named))
        return asked[-1]

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    with store.open("x") as stored:
        del asked[0]  # the first line of its text
        assert len(asked) == 2
        assert stored.bytes_read == sum(map(len, asked)) < size / 4
        before = stored.bytes_read
        keys, _ = stored.rows(1, 100, 300)
        assert keys.equal(record.layers[1].keys[100:300])
        assert len(asked) == 4
        blocks = 320 - 64  # as they are compared with their checksums
        assert stored.bytes_read == sum(map(len, asked)) == before + blocks * 4 * (64 + 32) * 2


def test_the_index_of_a_url_lies_in_the_users_cache(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    DocumentStore(bucket, MODEL).add("x", "text", make_record())
    [folder] = (tmp_path / "cache" / "keyhole" / "documents").iterdir()
    assert (folder / "index.sqlite").exists()
    machine(bucket, tmp_path, "here")
    assert list((tmp_path / "here").glob("*/index.sqlite"))
    system, path = fsspec.url_to_fs(bucket)
    assert all(name.endswith((".txt", ".safetensors")) for name in system.find(path))


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    store = DocumentStore(f"file://{tmp_path}/x", MODEL)
    store.add("x", "text", make_record())
    assert isinstance(store._catalogue.place, LocalStorage)
    assert DocumentStore(tmp_path / "x", MODEL).source("x") == "text"


# Several machines.


def test_what_another_machine_does_is_seen(url: str, tmp_path: Path) -> None:
    here, there = (machine(url, tmp_path, name) for name in ("here", "there"))
    there.add("x", "text", make_record(), pinned=True)
    info = here.info("x")
    assert (info.tokens, info.pinned, info.encoded) == (150, True, True)
    assert here.source("x") == "text"
    with here.open("x") as stored:
        assert same(stored, make_record())
    there.add("x", "text two", make_record(1), overwrite=True)
    with here.open("x") as stored:
        assert same(stored, make_record(1))
    assert here.source("x") == "text two"
    there.add("x", "text three", make_record(2), overwrite=True)
    assert here.source("x") == "text three"
    assert here.verify() == []
    there.add("y", "text", make_record(3))
    again = machine(url, tmp_path, "here")
    assert [(x.name, x.encoded) for x in again.list()] == [("x", True), ("y", True)]
    there.remove("x")
    with pytest.raises(RecordError, match="document 'x': it has no record"):
        here.open("x")
    assert [x.name for x in machine(url, tmp_path, "here").list()] == ["y"]


def test_a_text_that_another_machine_replaced_is_read_though_the_old_one_has_a_record(
    url: str, tmp_path: Path
) -> None:
    """The old text was read as long as another name had it, too."""
    here, there = (machine(url, tmp_path, name) for name in ("here", "there"))
    there.add("x", "text", make_record())
    there.add("y", "text", make_record())
    here.open("x").close()
    there.add("x", "text two", make_record(1), overwrite=True)
    with pytest.raises(ConfigError, match="'x' is stored with another text"):
        here.stored("x", "text")
    [x, y] = here.open_all(["x", "y"])
    with x, y:
        assert same(x, make_record(1))
        assert same(y, make_record())


@pytest.mark.parametrize("others", [{"block_size": 16}, {"num_layers": 4}])
def test_an_open_record_that_is_replaced_is_noticed(
    url: str, tmp_path: Path, others: dict[str, int]
) -> None:
    """Bytes of other places in the new file were taken for keys and values."""
    here, there = (machine(url, tmp_path, name) for name in ("here", "there"))
    here.add("x", "text", make_record(n=20_000))
    with here.open("x") as stored:
        there.add("x", "text", make_record(n=20_000, **others), overwrite=True)
        for read in (lambda: stored.rows(1, 0, 20_000), stored.extreme_keys):
            with pytest.raises(RecordError, match="of its record has changed"):
                read()


def test_what_another_machine_is_about_to_add_is_left_alone(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (machine(url, tmp_path, name) for name in ("here", "there"))
    place = there._catalogue.place
    staged = place.stage("documents/x", [b"half a text"])
    real = type(place).stage

    def fail(self: RemoteStorage, path: str, *arguments: Any) -> Any:
        if path.startswith("documents"):
            raise KeyboardInterrupt
        return real(self, path, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(RemoteStorage, "stage", fail)
        with pytest.raises(KeyboardInterrupt):
            there.add("x", "text", make_record())
    assert len(place.files("records")) == 1
    machine(url, tmp_path, "here")
    assert len(place.files("records")) == 1
    assert here.list() == []
    here.add("y", "text", make_record())
    with here.open("y") as stored:
        assert same(stored, make_record())
    here.remove("y")
    with monkeypatch.context() as patched:
        patched.setattr(RemoteStorage, "stage", fail)
        with pytest.raises(KeyboardInterrupt):
            there.add("x", "text", make_record())
    monkeypatch.setattr(RemoteStorage, "grace_s", -60.0)
    machine(url, tmp_path, "here")
    assert len(place.files("records")) == 0
    assert len(place.files("parts")) == 0
    staged.discard()


# What goes wrong.


def test_a_missing_package_is_named() -> None:
    text = "Install such_a_package to access it"
    fsspec.register_implementation("keyhole-none", "such_a_package.FileSystem", True, text)
    with pytest.raises(ConfigError, match="'keyhole-none://x' need a package: Install such_a_pack"):
        DocumentStore("keyhole-none://x", MODEL)


def test_an_unknown_protocol_is_an_error_with_the_nearest() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown protocol .* 'memry'; did you mean 'memory"
    ):
        DocumentStore("memry://x", MODEL)


class _LibraryError(Exception):
    """Every remote library has errors of its own."""


def test_failures_of_a_library_are_reported(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DocumentStore(bucket, MODEL)
    store.add("x", "text", make_record(n=20_000))
    stored = store.open("x")

    def fail(*arguments: Any, **named: Any) -> Any:
        raise _LibraryError("the network is gone\nmany lines")

    with monkeypatch.context() as patched:
        for function in ("cat_file", "pipe_file", "ls", "info"):
            patched.setattr(MemoryFileSystem, function, fail)
        right = "_LibraryError: the network is gone"
        with pytest.raises(ConfigError, match=f"'{bucket}' cannot be read: {right}$"):
            store.open("x")
        with pytest.raises(ConfigError, match=f"cannot be read: {right}$"):
            store.open("of another machine")  # it was called unknown
        with pytest.raises(ConfigError, match=f"cannot be written: {right}$"):
            store.add("y", "text", make_record())
        with pytest.raises(ConfigError, match=f"cannot be read: {right}$"):
            store.source("x")
        with pytest.raises(ConfigError, match=f"cannot be read: {right}$"):
            DocumentStore(bucket, MODEL)
        with pytest.raises(RecordError, match=f"document 'x': its record cannot be read: {right};"):
            stored.rows(2, 19_000, 20_000)
    assert stored.rows(2, 19_000, 20_000)[0].shape == (1000, 2, 8)
    assert [info.name for info in store.list()] == ["x"]
    assert store.verify() == []


def test_a_record_that_vanishes_while_it_is_open(url: str, tmp_path: Path) -> None:
    here, there = (machine(url, tmp_path, name) for name in ("here", "there"))
    here.add("x", "text", make_record(n=20_000))
    with here.open("x") as stored:
        there.remove("x")
        with pytest.raises(RecordError, match="document 'x': its record cannot be read"):
            stored.rows(2, 19_000, 20_000)


def test_too_few_bytes_are_an_error(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DocumentStore(bucket, MODEL)
    store.add("x", "text", make_record(n=20_000))
    real = MemoryFileSystem.cat_file
    with store.open("x") as stored:
        monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *a, **n: real(*a, **n)[:-1])
        with pytest.raises(RecordError, match="received 18431 bytes instead of 18432"):
            stored.rows(2, 19_000, 19_500)


def test_a_damaged_record_is_named(url: str) -> None:
    store = DocumentStore(url, MODEL)
    store.add("x", "text", make_record())
    system, path = fsspec.url_to_fs(url)
    [file] = system.find(f"{path}/records")
    data = bytearray(system.cat_file(file))
    data[-1] ^= 1
    system.pipe_file(file, bytes(data))
    [problem] = store.verify()
    assert problem.what.startswith("layers.2.extreme_keys of its record has changed")
    system.pipe_file(file, bytes(data[:-5]))
    with pytest.raises(RecordError, match=f"has {len(data) - 5} bytes; expected {len(data)} bytes"):
        store.open("x")
    store.add("x", "text", make_record())
    assert store.verify() == []


def test_a_failed_upload_leaves_nothing(share: str, tmp_path: Path, monkeypatch: Any) -> None:
    store = DocumentStore(share, MODEL)
    store.add("x", "text", make_record())
    real = ShareFileSystem.pipe_file

    def half(self: ShareFileSystem, path: str, value: bytes, **named: Any) -> None:
        real(self, path, value[: len(value) // 2], **named)
        raise _LibraryError("the connection is gone")

    with monkeypatch.context() as patched:
        patched.setattr(ShareFileSystem, "pipe_file", half)
        for text in ("text", "other"):
            with pytest.raises(ConfigError, match="_LibraryError: the connection is gone"):
                store.add("x", text, make_record(1), overwrite=True)
    assert os.listdir(tmp_path / "share" / "parts") == []
    assert store.verify() == []
    with store.open("x") as stored:
        assert same(stored, make_record())
