"""Adding, pinning and removing documents, and the order in which files are committed.

Large files are written first, without a lock. Then, under the lock: the record is committed, then
the text, then the index; unreferenced files are deleted last. A process that is killed in between
leaves at most a record without a text, which the next start deletes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager

from keyhole.documents.catalogue import Catalogue
from keyhole.documents.index import DocumentInfo, record_file
from keyhole.documents.integrity import Fingerprint, RecordError, model_of
from keyhole.documents.reader import header_of
from keyhole.documents.record import DocumentRecord, serialise
from keyhole.documents.source import Source, SourceFile
from keyhole.documents.storage import Staged
from keyhole.errors import ConfigError


class Writer:
    """One model's changes to a store; see `DocumentStore` for the arguments."""

    def __init__(
        self, catalogue: Catalogue, fingerprint: Fingerprint, limit_bytes: int | None
    ) -> None:
        self._catalogue = catalogue
        self._fingerprint = fingerprint
        self._model = model_of(fingerprint)
        self._limit_bytes = limit_bytes
        if limit_bytes is not None:
            with catalogue.locked():
                catalogue.evict(limit_bytes, ())

    def same(self, name: str, origin: Source, *, overwrite: bool) -> SourceFile | None:
        """The document of this name if it has this source; ConfigError if it has another."""
        found = self._catalogue.find(name)
        if found is None or found.digest == origin.digest:
            return found
        if overwrite:
            return None
        raise ConfigError(
            f"document {name!r} is stored with another text (sha256 {found.digest[:12]}, not "
            f"{origin.digest[:12]}); use another name, or overwrite it"
        )

    def is_whole(self, found: SourceFile, block_size: int | None = None) -> bool:
        """Whether the text is intact and there is a record with a valid header.

        block_size: of the record; None: any.
        """
        return self._is_encoded(found.digest, block_size) and self._has_text(found)

    def _has_text(self, found: SourceFile) -> bool:
        try:
            data = self._catalogue.place.read(f"documents/{found.file}")
            found.source(data)
            return SourceFile.parse(data).name == found.name
        except (FileNotFoundError, RecordError):
            return False

    def _is_encoded(self, digest: str, block_size: int | None) -> bool:
        try:
            reader = self._catalogue.place.reader(f"records/{self._file(digest)}")
        except FileNotFoundError:
            return False
        try:
            header = header_of(reader, digest, self._fingerprint)
        except RecordError:
            return False
        finally:
            reader.close()
        return block_size in (None, header.block_size)

    def add(
        self,
        name: str,
        origin: Source,
        record: DocumentRecord,
        *,
        overwrite: bool,
        pinned: bool | None,
        metadata: str | None,
    ) -> DocumentInfo:
        """Stores a record that was validated; see `DocumentStore.add`."""
        same = self.same(name, origin, overwrite=overwrite)
        head = SourceFile(
            name=name,
            digest=origin.digest,
            model=self._model,
            tokens=len(record.token_ids),
            block_size=record.block_size,
            created=same.created if same is not None else time.time(),
            pinned=bool(pinned),
            metadata="{}" if metadata is None else metadata,
        )
        with self._staged(head, origin, record) as (staged, size):
            # Checked again, because another process may have been faster.
            old = self._catalogue.find(name)
            same = self.same(name, origin, overwrite=overwrite)
            # Pinned or described, perhaps, while the record was written.
            if pinned is None and old is not None:
                head = dataclasses.replace(head, pinned=old.pinned)
            if metadata is None and same is not None:
                head = dataclasses.replace(head, metadata=same.metadata)
            self._commit(head, origin, staged, size, old, keep_source=not overwrite)
            return self._catalogue.index.infos(self._model, [name])[0]

    def renew(self, name: str, origin: Source, record: DocumentRecord) -> None:
        """Stores a record that was validated; see `DocumentStore.renew`."""
        old = self._catalogue.find(name)
        if old is None or old.digest != origin.digest:
            return
        with self._staged(self._counted(old, record), origin, record) as (staged, size):
            now = self._catalogue.find(name)
            if now is not None and now.digest == origin.digest:
                head = self._counted(now, record)
                self._commit(head, origin, staged, size, now, keep_source=False)

    def _counted(self, source: SourceFile, record: DocumentRecord) -> SourceFile:
        """With the tokens and blocks of this model's record."""
        tokens, size = len(record.token_ids), record.block_size
        return dataclasses.replace(source, model=self._model, tokens=tokens, block_size=size)

    @contextmanager
    def _staged(
        self, head: SourceFile, origin: Source, record: DocumentRecord
    ) -> Iterator[tuple[Staged, int]]:
        """The record's file, written but not committed, and its bytes; inside, under the lock."""
        pieces = serialise(
            record,
            name=head.name,
            digest=head.digest,
            created=head.created,
            fingerprint=self._fingerprint,
        )
        size = sum(map(len, pieces))
        with self._catalogue.locked():
            self._require_room(head, origin, size)
        staged = self._catalogue.place.stage(f"records/{self._file(head.digest)}", pieces)
        try:
            with self._catalogue.locked():
                yield staged, size
        finally:
            staged.discard()

    def _commit(
        self,
        head: SourceFile,
        origin: Source,
        staged: Staged,
        size: int,
        old: SourceFile | None,
        *,
        keep_source: bool,
    ) -> None:
        """Makes what was staged the document. old: the one of this name before.

        keep_source: its file is not written again if nothing in it changes.
        """
        catalogue, file = self._catalogue, self._file(head.digest)
        self._require_room(head, origin, size)
        try:
            staged.commit()
            if not (keep_source and self._is_described(old, head) and self._has_text(head)):
                self._write_source(head, origin.body)
        except OSError:  # such as a full disk, which a record without a text would keep full
            if catalogue.place.folder is not None:  # elsewhere another machine may need it
                catalogue.refresh(head.name)  # the text may be there nevertheless
                for source in (head, old):
                    if source is not None:
                        self._drop(source.digest)
            raise
        catalogue.index.put_records({file: size}, head.tokens, head.block_size)
        catalogue.index.used(file)
        if old is not None and old.digest != head.digest:
            self._drop(old.digest)
        if self._limit_bytes is not None:
            catalogue.evict(self._limit_bytes, {file})

    def _is_described(self, old: SourceFile | None, head: SourceFile) -> bool:
        """Whether the first line of a file says what a new one would say.

        Tokens and blocks may be as another model counts them.
        """
        if old is not None and old.model != self._model:
            model, tokens, size = old.model, old.tokens, old.block_size
            head = dataclasses.replace(head, model=model, tokens=tokens, block_size=size)
        return old == head

    def _require_room(self, head: SourceFile, origin: Source, size: int) -> None:
        if self._limit_bytes is None:
            return
        index, file = self._catalogue.index, self._file(head.digest)
        leaving = {f: bytes_ for f, bytes_ in index.records(head.digest).items() if f == file}
        old = self._catalogue.find(head.name)
        replaced = old is not None and old.digest != head.digest
        if old is not None and replaced and not index.sharing(old.digest, head.name):
            leaving |= index.records(old.digest)
        more = len(head.line()) + len(origin.body) + size
        more -= sum(leaving.values()) + index.source_bytes(head.name)
        self._catalogue.require_room(more, self._limit_bytes, {file, *leaving})

    def change(self, name: str, **fields: bool | str) -> None:
        """Rewrites the document's file with changed fields; RecordError for a text that is damaged
        or gone.
        """
        with self._catalogue.locked():
            found = self._catalogue.source(name)
            changed = dataclasses.replace(found, **fields)  # type: ignore[arg-type]
            if changed != found:
                body = found.source(self._catalogue.text(found)).body
                self._write_source(changed, body)

    def remove(self, name: str) -> None:
        """Deletes the document's file, and records that no other document uses."""
        with self._catalogue.locked():
            found = self._catalogue.source(name)
            self._catalogue.place.remove(f"documents/{found.file}")
            self._catalogue.index.forget_documents([found.file])
            self._drop(found.digest)

    def _write_source(self, head: SourceFile, body: bytes) -> None:
        line = head.line()
        staged = self._catalogue.place.stage(f"documents/{head.file}", [line, body])
        try:
            stamp = staged.commit()
        finally:
            staged.discard()
        self._catalogue.index.put_documents([(head, len(line) + len(body), stamp)])

    def _drop(self, digest: str) -> None:
        """Deletes the records of a source unless a document uses it."""
        if not self._catalogue.index.sharing(digest, ""):
            self._catalogue.collect(self._catalogue.records_of(digest))

    def _file(self, digest: str) -> str:
        return record_file(digest, self._model)
