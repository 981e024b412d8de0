"""The store of encoded documents: add, list, open, verify.

A store holds texts and, per text and model, a record of keys, values and statistics. A record
refers to a text by its digest and to a model by the digest of a fingerprint, so records of several
models coexist, and a changed model never reads another model's record.

Acknowledged writes are durable: every file is written under a temporary name, synced to disk and
renamed, the record before the text, so that a killed process leaves no partial document. Several
processes may read and add at once.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.config import is_count, require
from keyhole.documents.catalogue import Catalogue, told
from keyhole.documents.index import DocumentInfo, record_file
from keyhole.documents.integrity import Fingerprint, Problem, RecordError, model_of
from keyhole.documents.reader import (
    MEMORY_BYTES,
    StoredDocument,
    VerifiedRecord,
    VerifiedRecords,
    absent,
    nameless,
    problems,
)
from keyhole.documents.record import DocumentRecord, validate
from keyhole.documents.remote import open_storage
from keyhole.documents.source import Source, SourceFile, check_name, metadata_text
from keyhole.documents.storage import StorageReader
from keyhole.documents.writer import Writer
from keyhole.errors import ConfigError

__all__ = ["DocumentInfo", "DocumentStore", "Problem", "RecordError", "StoredDocument"]

#: When records are compared with what was written, besides `verify`.
CHECKS = ("open", "read")
# `list` is a method below.
Infos = list[DocumentInfo]
Problems = list[Problem]
Text = str | list[int]
#: Threads that check records; SHA-256 of one thread reads 1 to 2 GB/s, a disk 3 to 7.
_THREADS = 4


def require_check(value: str, name: str = "check") -> None:
    """ConfigError unless `value` is one of `CHECKS`."""
    require(value in CHECKS, name, value, " or ".join(map(repr, CHECKS)))


@dataclass(frozen=True)
class _OpenRecord:
    """A record that was checked. file: its name. held: releases it when closed."""

    file: str
    record: VerifiedRecord
    reader: StorageReader
    held: ExitStack


class DocumentStore:
    """The documents at `place`, as one model sees them.

    place: a folder, which is created if missing, or any URL that fsspec supports. fingerprint:
    everything that determines this model's keys and values. limit_bytes: for all texts and the
    records of all models; the least recently used records are evicted, their texts stay; None: no
    limit. check: "open" compares a record's header and statistics with their digests when it is
    opened; "read" also everything that is read of it later, as is always done at a URL, where a
    record may be replaced while it is open. cache_folder: where the index is stored
    if it cannot be in the storage (a URL, or a read-only folder); None: the user's cache folder.

    Any operation raises ConfigError if the place or its index cannot be used.
    """

    def __init__(
        self,
        place: str | Path,
        fingerprint: Fingerprint,
        *,
        limit_bytes: int | None = None,
        check: str = "open",
        cache_folder: str | Path | None = None,
    ) -> None:
        right = "a number of bytes, at least 1"
        require(limit_bytes is None or is_count(limit_bytes), "limit_bytes", limit_bytes, right)
        require_check(check)
        self.check = check
        self.model = model_of(fingerprint)
        self.fingerprint = dict(fingerprint)
        self.limit_bytes = limit_bytes
        self._verified = VerifiedRecords(self.fingerprint, MEMORY_BYTES)
        self._place = open_storage(place)
        with self._told("read"):
            self._catalogue = Catalogue(self._place, Path(cache_folder) if cache_folder else None)
            self._writer = Writer(self._catalogue, self.fingerprint, limit_bytes)

    @property
    def folder(self) -> Path:
        """A local folder for this store alone: the place itself, if it is local."""
        return self._catalogue.folder

    # Adding.

    def stored(
        self, name: str, source: str | Sequence[int], *, overwrite: bool = False
    ) -> DocumentInfo | None:
        """This model's document of exactly this source; None if it has to be added.

        A text or a record with damage that shows without reading everything, or a record of an
        older version, has to be added again. Raises ConfigError for a name or source that `add`
        would refuse.
        """
        check_name(name)
        with self._told("read"):
            same = self._writer.same(name, Source.of(source), overwrite=overwrite)
            return self.info(name) if same is not None and self._writer.is_whole(same) else None

    def require_blocks(self, name: str, source: str | Sequence[int], block_size: int) -> None:
        """ConfigError if this model has the text under another name in blocks of another size.

        Documents with the same text share a record.
        """
        with self._told("read"):
            index = self._catalogue.index
            others = index.sharing(Source.of(source).digest, name)
            infos = index.infos(self.model, others) if others else []
        for other in infos:
            if other.encoded and other.block_size != block_size:
                raise ConfigError(
                    f"block_size {block_size} of document {name!r} must be {other.block_size}, "
                    f"because document {other.name!r} has the same text in blocks of that size"
                )

    def add(
        self,
        name: str,
        source: str | Sequence[int],
        record: DocumentRecord,
        *,
        overwrite: bool = False,
        pinned: bool | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> DocumentInfo:
        """Stores a document; when this returns, it is on disk.

        Adding the same name and source again changes only the pin and the metadata, unless the
        stored files are damaged or the record has blocks of another size. overwrite: replace a
        document of this name, including the records of its old text by all models. pinned: whether
        it is never evicted; None: as the document of this name before, else not. metadata: JSON
        that is stored with it; None: that of the same text before, else none.

        Raises ConfigError for an invalid name or source, for a name that has another source, and
        for a record whose shapes disagree; NumericalError for NaN; StorageFullError if it does not
        fit. In all these cases the store is unchanged.
        """
        check_name(name)
        described = None if metadata is None else metadata_text(metadata)
        origin = Source.of(source)
        validate(record)
        with self._told("written"):
            same = self._writer.same(name, origin, overwrite=overwrite)
            size = record.block_size
            if same is None or overwrite or not self._writer.is_whole(same, size):
                return self._writer.add(
                    name,
                    origin,
                    record,
                    overwrite=overwrite,
                    pinned=pinned,
                    metadata=described,
                )
        if pinned is not None:
            self.pin(name, pinned)
        if metadata is not None:
            self.describe(name, metadata)
        return self.info(name)

    def renew(self, name: str, source: str | Sequence[int], record: DocumentRecord) -> None:
        """Replaces this model's record of a document by one that was made of `source` again.

        No effect if the document has another text by now, or was removed: encoding takes a while,
        and another process may have done so meanwhile. Raises as `add`.
        """
        origin = Source.of(source)
        validate(record)
        with self._told("written"):
            self._writer.renew(name, origin, record)

    # Reading.

    def open(self, name: str) -> StoredDocument:
        """The document's record, in use until it is closed; counts a hit.

        Checks the record's model, its size, and the digests of its header and statistics, unless
        this store has checked this very file before; keys and values are checked as they are read
        (check="read") or by `verify`. Raises UnknownNameError, and RecordError for a record that is
        damaged, missing, of an older version, or another model's.
        """
        return self.open_all([name])[0]

    def open_all(self, names: Sequence[str]) -> builtins.list[StoredDocument]:
        """Opens several documents of different names: either all of them or, on an error, none.

        The records are checked in threads, and the index counts the hits in one transaction.
        """
        with self._told("read"), ExitStack() as stack:
            sources = self._catalogue.sources(names)
            opened = self._open_in_threads(sources, stack)
            files = {name: one.file for name, one in zip(names, opened, strict=True)}
            infos = self._catalogue.index.opened(files, self.model)
            for name in names:
                if name not in infos:  # another process has just removed it
                    raise self._catalogue.unknown(name)
            stack.pop_all()  # from here on, each document closes what it has
            return [
                StoredDocument(
                    infos[name],
                    one.record,
                    one.reader,
                    one.held,
                    checks=self.check == "read" or not one.reader.is_local,
                )
                for name, one in zip(names, opened, strict=True)
            ]

    def _open_in_threads(
        self, sources: Sequence[SourceFile], stack: ExitStack
    ) -> builtins.list[_OpenRecord]:
        """The records of these sources, in order; `stack` closes those that are open."""
        threads = min(_THREADS, len(sources))
        if threads < 2:
            return [self._open_current(source, stack) for source in sources]

        def run(first: int) -> builtins.list[_OpenRecord]:
            return [self._open_current(source, stack) for source in sources[first::threads]]

        with ThreadPoolExecutor(threads) as pool:
            parts = [*pool.map(run, range(threads))]
        return [parts[i % threads][i // threads] for i in range(len(sources))]

    def _open_current(self, source: SourceFile, stack: ExitStack) -> _OpenRecord:
        name, tried = source.name, ""
        while True:
            try:
                opened = self._open(source)
                stack.callback(opened.held.close)
                return opened
            except RecordError as error:
                # Another process may have just stored another text under this name.
                fresh = self._catalogue.current(name)
                if fresh.digest == tried:
                    raise error.of(name) from error
                source, tried = fresh, fresh.digest

    def _open(self, source: SourceFile) -> _OpenRecord:
        file = record_file(source.digest, self.model)
        with ExitStack() as held:
            try:
                held.callback(self._catalogue.lease(file).close)
                reader = self._place.reader(f"records/{file}")
            except FileNotFoundError:
                records = self._catalogue.index.records(source.digest)
                raise absent(self._place, records, self.fingerprint) from None
            held.callback(reader.close)
            record = self._verified.read(reader, source.digest)
            return _OpenRecord(file, record, reader, held.pop_all())

    def info(self, name: str) -> DocumentInfo:
        """A document's entry; UnknownNameError with the nearest name."""
        with self._told("read"):
            self._catalogue.source(name)
            found = self._catalogue.index.infos(self.model, [name])
            if not found:  # another process has just removed it
                raise self._catalogue.unknown(name)
            return found[0]

    def list(self) -> Infos:
        """All documents by name; of those at a URL, as they were ten seconds ago or later."""
        with self._told("read"):
            self._catalogue.follow()
            return self._catalogue.index.infos(self.model)

    def source(self, name: str) -> Text:
        """The text or the token ids of the document.

        Raises UnknownNameError, and RecordError if it is damaged.
        """
        with self._told("read"):
            try:
                return self._text(self._catalogue.source(name))
            except RecordError:
                # Another process may be replacing or removing it.
                with self._catalogue.locked():
                    return self._text(self._catalogue.current(name))

    def _text(self, found: SourceFile) -> Text:
        return found.source(self._catalogue.text(found)).value

    def verify(self, names: Sequence[str] | None = None) -> Problems:
        """Reads everything stored of these documents, or of all, and returns the problems.

        Every digest of the sources and of this model's records is compared. A document that has
        only records of other models is reported as "foreign". An evicted record is a problem only
        of a document that is named.
        """
        with self._told("read"):
            found = [] if names is not None else nameless(self._catalogue)
            if names is None:
                sources = self._catalogue.index.sources()
            else:
                sources = self._catalogue.sources(names)
            for source in sources:
                found += problems(
                    self._catalogue, source, self.fingerprint, named=names is not None
                )
        return found

    # Changing.

    def pin(self, name: str, pinned: bool = True) -> None:
        """Pins or unpins a document; pinned ones are never evicted."""
        require(isinstance(pinned, bool), "pinned", pinned, "True or False")
        with self._told("written"):
            self._writer.change(name, pinned=pinned)

    def describe(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Replaces the metadata of a document; ConfigError for invalid JSON, or too much."""
        described = metadata_text(metadata)
        with self._told("written"):
            self._writer.change(name, metadata=described)

    def remove(self, name: str) -> None:
        """Removes a document, and the records of all models unless another name has the same
        source.

        A record in use stays readable until it is closed, and is deleted at a later start.
        """
        with self._told("written"):
            self._writer.remove(name)

    def _told(self, how: str) -> AbstractContextManager[None]:
        return told(self._place.url, how)
