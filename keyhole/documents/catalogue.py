"""A storage backend and its index, kept consistent under one lock; and eviction at a size limit.

The storage is authoritative; the index is a fast copy of its names. At startup the two are
compared: files that were copied in are added, missing ones are dropped, and leftovers of crashed
writers are deleted.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import sqlite3
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from errno import EDQUOT, EFBIG, EMFILE, ENOSPC
from pathlib import Path

from keyhole.config import bytes_text, is_several, require
from keyhole.documents.index import Index
from keyhole.documents.integrity import RecordError
from keyhole.documents.record import find_header
from keyhole.documents.source import HEAD_BYTES, SourceFile, file_of
from keyhole.documents.storage import Entry, Lease, StorageBackend, is_free, locked
from keyhole.errors import ConfigError, StorageFullError, UnknownNameError

_SOURCE = re.compile(r"[0-9a-f]{32}\.txt")
_RECORD = re.compile(r"[0-9a-f]{64}-[0-9a-f]{16}\.safetensors")
_NO_SPACE = (ENOSPC, EDQUOT, EFBIG)
# An error is one line.
_MOST_NAMES_TOLD = 12
#: How old a list of a storage that other machines may change can be: /metrics and every search ask.
FRESH_S = 10.0


@contextmanager
def told(place: str, how: str) -> Iterator[None]:
    """Turns failures of the storage at `place` and of its index into errors for users."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        where = f"documents at {place!r} cannot be {how}: {reason}"
        if error.errno in _NO_SPACE:
            raise StorageFullError(
                f"{where}; the store is unchanged; free disk space, remove documents, or use "
                "another folder"
            ) from error
        if error.errno == EMFILE:
            where += "; name fewer documents, or allow more open files: `ulimit -n`"
        raise ConfigError(where) from error
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            raise StorageFullError(
                f"the index of the documents at {place!r} cannot be written: {error}; free disk "
                "space"
            ) from error
        raise ConfigError(
            f"the index of the documents at {place!r} cannot be used: {error}; if it is damaged, "
            "it is rebuilt at the next start"
        ) from error


class Catalogue:
    """A storage backend, its index and its lock.

    cache_folder: where the index is stored, in a subfolder, if it cannot be in the storage; None:
    the user's cache folder.
    """

    def __init__(self, place: StorageBackend, cache_folder: Path | None) -> None:
        self.place = place
        self.folder = place.folder or _index_folder(place.url, cache_folder)
        self._leases = self.folder / "leases"
        (self.folder if place.folder else self._leases).mkdir(parents=True, exist_ok=True)
        with self.locked():
            self.index = Index(self.folder / "index.sqlite")
            self._reconcile()

    def follow(self) -> None:
        """Updates the index where other machines may have changed the storage since FRESH_S ago."""
        if self.place.folder is None and time.monotonic() - self._read >= FRESH_S:
            with self.locked():
                self._reconcile()

    def locked(self) -> AbstractContextManager[None]:
        """Excludes all other processes of this machine that change the store. Must not be
        nested.
        """
        return locked(self.folder / "lock")

    def _reconcile(self) -> None:
        self._read = time.monotonic()
        self._clean()
        sources = self.source_files()
        records = _matching(_RECORD, self.place.files("records"))
        known = self.index.stamps()
        self.index.forget_documents(known.keys() - sources.keys())
        changed = [file for file, entry in sources.items() if known.get(file) != entry.stamp]
        unreadable = self._read_sources({file: sources[file] for file in changed})
        indexed = self.index.records()
        self.index.forget_records(indexed.keys() - records.keys())
        sizes = {file: entry.size_bytes for file, entry in records.items()}
        self.index.put_records({f: size for f, size in sizes.items() if indexed.get(f) != size})
        self._recover({file: sources[file] for file in unreadable - known.keys()})
        if not unreadable - self.index.stamps().keys():
            old = time.time() - self.place.grace_s
            times = {file: entry.written for file, entry in records.items()}
            self.collect(f for f in self.index.orphans() if (times.get(f) or old + 1) <= old)
        for file in self.index.uncounted():
            header = find_header(self.place, file)
            if header is not None:
                size = records[file].size_bytes
                self.index.put_records({file: size}, header.tokens, header.block_size)

    def source_files(self) -> dict[str, Entry]:
        """The existing files of documents."""
        return _matching(_SOURCE, self.place.files("documents"))

    def _clean(self) -> None:
        with suppress(OSError):  # readers do not need it
            self.place.clean()

    def _read_sources(self, entries: dict[str, Entry]) -> set[str]:
        """Adds files to the index; returns those whose first line cannot be read."""
        heads = self.place.heads([f"documents/{file}" for file in entries], HEAD_BYTES)
        found, unreadable = [], set()
        for (file, entry), head in zip(entries.items(), heads, strict=True):
            try:
                source = SourceFile.parse(head)
            except RecordError:
                unreadable.add(file)
                continue
            if source.file == file:
                found.append((source, entry.size_bytes, entry.stamp))
            else:  # copied under another name
                unreadable.add(file)
        self.index.put_documents(found)
        return unreadable

    def unreadable(self) -> set[str]:
        """Files of documents that are not indexed and cannot be."""
        if not self.source_files().keys() - self.index.stamps().keys():
            return set()
        with self.locked():
            found, known = self.source_files(), self.index.stamps()
            return self._read_sources({f: e for f, e in found.items() if f not in known})

    def _recover(self, unreadable: dict[str, Entry]) -> None:
        """Identifies documents with a damaged first line by their records."""
        for record in self.index.orphans() if unreadable else ():
            header = find_header(self.place, record)
            entry = unreadable.get(file_of(header.name)) if header is not None else None
            if header is None or entry is None:
                continue
            model = record.partition("-")[2].partition(".")[0]
            source = SourceFile(
                name=header.name,
                digest=header.digest,
                model=model,
                tokens=header.tokens,
                block_size=header.block_size,
                created=header.created,
                pinned=False,
            )
            self.index.put_documents([(source, entry.size_bytes, "")])

    def find(self, name: str) -> SourceFile | None:
        """The document of this name; looked up in the storage if it is not indexed, or if other
        machines may have changed it, which have indexes of their own.
        """
        require(isinstance(name, str), "document name", name, "text")
        if not name.isprintable():  # none has such a name, and SQLite takes no lone surrogates
            return None
        if self.place.folder is None:
            return self.refresh(name) or self.index.source(name)
        return self.index.source(name) or self.refresh(name)

    def source(self, name: str) -> SourceFile:
        """See `find`; UnknownNameError if there is none."""
        found = self.find(name)
        if found is None:
            raise self.unknown(name)
        return found

    def sources(self, names: Sequence[str]) -> list[SourceFile]:
        """See `source`, of each of these names; the storage is read once."""
        require(is_several(names), "documents", names, "a list of names")
        names = [*names]
        for name in names:
            require(isinstance(name, str), "document name", name, "text")
        if self.place.folder is None:
            self._refresh([name for name in names if name.isprintable()])
        known = {source.name: source for source in self.index.sources(names)}
        return [known.get(name) or self.source(name) for name in names]

    def unknown(self, name: str) -> UnknownNameError:
        """The error for an unknown name; it lists at most a few names, the nearest first."""
        names = self.index.names()
        if len(names) > _MOST_NAMES_TOLD:
            near = difflib.get_close_matches(name, names, n=_MOST_NAMES_TOLD, cutoff=0.5)
            shown = [*near, *names][: max(len(near), 1)]
            names = [*shown, f"… and {len(names) - len(shown)} others"]
        return UnknownNameError("document", name, names)

    def current(self, name: str) -> SourceFile:
        """See `source`; from the storage if the first line of the file can be read."""
        found = self.refresh(name) or self.index.source(name)
        if found is None:
            raise self.unknown(name)
        return found

    def text(self, found: SourceFile) -> bytes:
        """The document's whole file; RecordError if it is gone."""
        try:
            return self.place.read(f"documents/{found.file}")
        except FileNotFoundError as error:
            raise RecordError("source", "its text is missing", "a file", found.name) from error

    def refresh(self, name: str) -> SourceFile | None:
        """See `find`; from the storage, because another machine may have changed it."""
        return self._refresh([name])[0]

    def _refresh(self, names: Sequence[str]) -> list[SourceFile | None]:
        """See `refresh`, of each name; all are read at once."""
        # Read before the storage: what another thread finds out later is not replaced.
        known = {source.name: source for source in self.index.sources(names)}
        heads = self.place.heads([f"documents/{file_of(name)}" for name in names], HEAD_BYTES)
        found = zip(names, heads, strict=True)
        return [self._index_head(name, known.get(name), head) for name, head in found]

    def _index_head(self, name: str, before: SourceFile | None, head: bytes) -> SourceFile | None:
        """Puts the first line of a document's file into the index; None if it is not readable."""
        try:
            source = SourceFile.parse(head)
        except RecordError:
            return None
        if source.name != name:
            return None
        # Without a stamp, the next start reads the file again and learns its full size.
        self.index.replace_document(before, source, len(head))
        if before is None or before.digest != source.digest:
            self.index.put_records(self.records_of(source.digest))
        return source

    def records_of(self, digest: str) -> dict[str, int]:
        """File -> size in bytes of the existing records of a source, indexed or not."""
        found = _matching(_RECORD, self.place.files("records"))
        return {f: entry.size_bytes for f, entry in found.items() if f.startswith(digest)}

    # Leases, and deleting records.

    def lease(self, record: str) -> Lease:
        """Leases a record. FileNotFoundError if it does not exist and the backend can tell."""
        path = self._lease_path(record)
        return Lease(path, create=path.parent == self._leases)

    def _lease_path(self, record: str) -> Path:
        return self.place.lease_path(f"records/{record}") or self._leases / record

    def collect(self, records: Iterable[str]) -> None:
        """Deletes records that are not in use; the others are deleted at a later start."""
        gone = []
        for record in records:
            with is_free(self._lease_path(record)) as free, suppress(OSError):
                if free:
                    self.place.remove(f"records/{record}")
                    gone.append(record)
                    (self._leases / record).unlink(missing_ok=True)
        self.index.forget_records(gone)

    def require_room(self, more_bytes: int, limit_bytes: int, keep: Collection[str]) -> None:
        """StorageFullError unless `evict` can free this many bytes; a store may always shrink."""
        if more_bytes <= 0:
            return
        total = self.index.total_bytes()
        free = sum(size for _, size in self._free_records(keep))
        if total + more_bytes - free > limit_bytes:
            raise StorageFullError(
                f"{bytes_text(more_bytes)} more would exceed the limit of "
                f"{bytes_text(limit_bytes)} for documents at {self.place.url!r}: of the "
                f"{bytes_text(total)} stored there, {bytes_text(total - free)} cannot be evicted "
                "(sources, and records that are pinned or in use); raise the limit, or unpin or "
                "remove documents"
            )

    def evict(self, limit_bytes: int, keep: Collection[str]) -> None:
        """Deletes the least recently used records until the limit holds, or none is left.

        Skips those in `keep`, pinned ones and ones in use. Sources stay.
        """
        excess = self.index.total_bytes() - limit_bytes
        for record, size in self._free_records(keep) if excess > 0 else ():
            if excess <= 0:
                break
            self.collect([record])
            excess -= size

    def _free_records(self, keep: Collection[str]) -> list[tuple[str, int]]:
        free = []
        for record, size in self.index.evictable().items():
            if record in keep:
                continue
            with is_free(self._lease_path(record)) as unused:
                if unused:
                    free.append((record, size))
        return free


def _matching(pattern: re.Pattern[str], entries: dict[str, Entry]) -> dict[str, Entry]:
    return {name: entry for name, entry in entries.items() if pattern.fullmatch(name)}


def _index_folder(url: str, cache_folder: Path | None) -> Path:
    if cache_folder is None:
        mac = Path.home() / "Library" / "Caches"
        home = mac if sys.platform == "darwin" else Path.home() / ".cache"
        cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or home) / "keyhole" / "documents"
    return cache_folder / hashlib.sha256(url.encode()).hexdigest()[:16]
