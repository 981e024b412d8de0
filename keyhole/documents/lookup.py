"""Opens stored documents without an index and without locks, for read-only processes of a server.

Any number of them may share a store with writers. Files are replaced atomically, so a read sees one
version. A record may be evicted before it is opened; an open one stays readable where the storage
allows it, and otherwise reading it raises RecordError.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path

from keyhole.documents.catalogue import told
from keyhole.documents.index import DocumentInfo, record_file
from keyhole.documents.integrity import Fingerprint, RecordError, differences, model_of
from keyhole.documents.reader import MEMORY_BYTES, StoredDocument, VerifiedRecords, absent
from keyhole.documents.record import find_header
from keyhole.documents.remote import open_storage
from keyhole.documents.source import HEAD_BYTES, SourceFile, file_of
from keyhole.errors import ConfigError, UnknownNameError


class DocumentLookup:
    """The documents at `place` as one model sees them, read only.

    place: a folder or any URL that fsspec opens. fingerprint: the model's.
    """

    def __init__(self, place: str | Path, fingerprint: Fingerprint) -> None:
        self._place = open_storage(place)
        self._fingerprint = dict(fingerprint)
        self._model = model_of(fingerprint)
        self._verified = VerifiedRecords(self._fingerprint, MEMORY_BYTES)

    def check_model(self) -> None:
        """ConfigError if all records belong to other models; an empty store is valid."""
        records = self._files("records")
        headers = [find_header(self._place, name) for name in records]
        theirs = [header.fingerprint for header in headers if header is not None]
        if not theirs or any(f"-{self._model}." in name for name in records):
            return
        nearest = min(theirs, key=lambda found: len(differences(found, self._fingerprint)))
        fields = differences(nearest, self._fingerprint)
        there, here = (
            ", ".join(f"{name} {side.get(name)!r}" for name in fields)
            for side in (nearest, self._fingerprint)
        )
        raise ConfigError(
            f"documents at {self._place.url!r} were encoded by another model: it has {there}, this "
            f"one {here}; encode them with this model by `keyhole documents add`"
        )

    def digest(self, name: str) -> str:
        """The digest of a document's source.

        UnknownNameError with the nearest name; RecordError if its first line is damaged.
        """
        head = b""
        if name.isprintable():  # no other is stored, and halves of characters have no digest
            with told(self._place.url, "read"):
                head = self._place.heads([f"documents/{file_of(name)}"], HEAD_BYTES)[0]
        if not head:
            paths = [f"documents/{name}" for name in self._files("documents")]
            known = []
            for other in self._place.heads(paths, HEAD_BYTES):
                with suppress(RecordError):  # a damaged first line has no name
                    known.append(SourceFile.parse(other).name)
            raise UnknownNameError("document", name, known)
        try:
            return SourceFile.parse(head).digest
        except RecordError as error:
            raise error.of(name) from error

    def open(self, name: str, digest: str) -> StoredDocument:
        """Opens the record of a source; close it afterwards. name: for messages.

        RecordError for a record that is damaged, missing, or another model's.
        """
        with told(self._place.url, "read"), ExitStack() as held:
            try:
                reader = self._place.reader(f"records/{record_file(digest, self._model)}")
                held.callback(reader.close)
                record = self._verified.read(reader, digest)
            except FileNotFoundError:
                records = [file for file in self._files("records") if file.startswith(digest)]
                raise absent(self._place, records, self._fingerprint).of(name) from None
            except RecordError as error:
                raise error.of(name) from error
            info = DocumentInfo(
                name=name,
                tokens=record.header.tokens,
                block_size=record.header.block_size,
                size_bytes=reader.size,
                created=record.header.created,
                last_used=record.header.created,
                hits=0,
                pinned=False,
                digest=digest,
                records=(self._model,),
                encoded=True,
                metadata={},
            )
            return StoredDocument(info, record, reader, held.pop_all(), checks=not reader.is_local)

    def _files(self, folder: str) -> list[str]:
        with told(self._place.url, "read"):
            return sorted(self._place.files(folder))
