"""Adding, pinning and removing documents, and the order in which files are committed.

Large files are written first, without a lock. Then, under the lock: the record is committed, then
the text, then the index; unreferenced files are deleted last. A process that is killed in between
leaves at most a record without a text, which the next start deletes.
"""

from __future__ import annotations

import dataclasses
import time

from keyhole.documents.catalogue import Catalogue
from keyhole.documents.index import DocumentInfo, record_file
from keyhole.documents.integrity import Fingerprint, RecordError, model_of
from keyhole.documents.reader import header_of
from keyhole.documents.record import DocumentRecord, serialise
from keyhole.documents.source import Source, SourceFile
from keyhole.documents.storage import Staged
from keyhole.errors import ConfigError

__all__ = ["Writer"]


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

    def is_whole(self, found: SourceFile) -> bool:
        """Whether the text is intact and there is a record with a valid header."""
        return self._is_encoded(found.digest) and self._has_text(found)

    def _has_text(self, found: SourceFile) -> bool:
        try:
            data = self._catalogue.place.read(f"documents/{found.file}")
            found.source(data)
            return SourceFile.parse(data).name == found.name
        except (FileNotFoundError, RecordError):
            return False

    def _is_encoded(self, digest: str) -> bool:
        try:
            reader = self._catalogue.place.reader(f"records/{self._file(digest)}")
        except FileNotFoundError:
            return False
        try:
            header_of(reader, digest, self._fingerprint)
        except RecordError:
            return False
        finally:
            reader.close()
        return True

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
        pieces = serialise(
            record,
            name=name,
            digest=origin.digest,
            created=head.created,
            fingerprint=self._fingerprint,
        )
        size = sum(map(len, pieces))
        with self._catalogue.locked():
            self._require_room(head, origin, size)
        path = f"records/{self._file(origin.digest)}"
        staged = self._catalogue.place.stage(path, pieces)
        try:
            with self._catalogue.locked():
                self._commit(head, origin, staged, size, overwrite, pinned, metadata)
                return self._catalogue.index.infos(self._model, [name])[0]
        finally:
            staged.discard()

    def _commit(
        self,
        head: SourceFile,
        origin: Source,
        staged: Staged,
        size: int,
        overwrite: bool,
        pinned: bool | None,
        metadata: str | None,
    ) -> None:
        """Makes what was staged the document. pinned, metadata: None keeps what it has now."""
        catalogue, file = self._catalogue, self._file(head.digest)
        # Checked again, because another process may have been faster.
        old = catalogue.find(head.name)
        same = self.same(head.name, origin, overwrite=overwrite)
        # Pinned or described, perhaps, while the record was written.
        if pinned is None and old is not None:
            head = dataclasses.replace(head, pinned=old.pinned)
        if metadata is None and same is not None:
            head = dataclasses.replace(head, metadata=same.metadata)
        self._require_room(head, origin, size)
        staged.commit()
        given = (head.pinned, head.metadata)
        if (
            same is None
            or given != (same.pinned, same.metadata)
            or overwrite
            or not self._has_text(same)
        ):
            self._write_source(head, origin.body)
        catalogue.index.put_records({file: size}, head.tokens, head.block_size)
        catalogue.index.used(file)
        if old is not None and old.digest != head.digest:
            self._drop(old.digest)
        if self._limit_bytes is not None:
            catalogue.evict(self._limit_bytes, {file})

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
        """Rewrites the document's file with changed fields; RecordError if its text is damaged."""
        with self._catalogue.locked():
            found = self._catalogue.source(name)
            changed = dataclasses.replace(found, **fields)  # type: ignore[arg-type]
            if changed != found:
                data = self._catalogue.place.read(f"documents/{found.file}")
                body = found.source(data).body
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
