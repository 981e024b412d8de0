"""Integrity checks: whether a stored document is unchanged and belongs to this model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from keyhole.documents import file
from keyhole.documents.catalogue import Catalogue
from keyhole.documents.digest import Fingerprint, differences, model_of
from keyhole.documents.file import RecordHeader
from keyhole.documents.index import record_file
from keyhole.documents.integrity_error import Problem, RecordError, foreign
from keyhole.documents.source import SourceFile
from keyhole.documents.storage import StorageReader

__all__ = ["absent", "header_of", "nameless", "problems"]


def problems(catalogue: Catalogue, source: SourceFile, fingerprint: Fingerprint) -> list[Problem]:
    """The problems of a document; reads everything stored of it for this model.

    An evicted record is no problem, nor is a document that another process replaces or removes
    meanwhile.
    """
    found = list(_faults(catalogue, source, fingerprint))
    if found:
        with catalogue.locked():
            now = catalogue.refresh(source.name) or catalogue.index.source(source.name)
            found = list(_faults(catalogue, now, fingerprint)) if now is not None else []
    return [Problem(source.name, fault.what, fault.right, fault.kind) for fault in found]


def _faults(
    catalogue: Catalogue, source: SourceFile, fingerprint: Fingerprint
) -> Iterator[RecordError]:
    place = catalogue.place
    try:
        data = place.read(f"documents/{source.file}")
        source.source(data)
        SourceFile.parse(data)
    except RecordError as error:
        # If the text is intact, encoding it again repairs the first line.
        whole = error.name is None
        yield RecordError("damaged" if whole else "source", error.what, error.right)
    except OSError as error:
        yield RecordError("source", f"its text cannot be read: {error}", "there")
    record = record_file(source.digest, model_of(fingerprint))
    try:
        with closing(place.reader(f"records/{record}")) as reader:
            header = header_of(reader, source.digest, fingerprint)
            file.check_all(reader, header)
            if not header.extremes:
                yield RecordError("missing", "its record has no extreme keys", "a record with them")
    except FileNotFoundError:
        fault = absent(catalogue, source.digest, fingerprint)
        if fault.kind != "missing":
            yield fault
    except RecordError as error:
        yield error
    except OSError as error:
        yield RecordError("damaged", f"its record cannot be read: {error}", "there")


def nameless(catalogue: Catalogue) -> list[Problem]:
    """Files of texts whose first line is damaged and that no record identifies."""
    files = catalogue.unreadable()
    what = "the first line of this file has changed, so nobody knows which document it is"
    return [Problem(f"documents/{f}", what, "as it was written", "source") for f in sorted(files)]


def header_of(reader: StorageReader, digest: str, fingerprint: Fingerprint) -> RecordHeader:
    """The header of a record; RecordError if it is damaged, or of another model or text."""
    header = file.parse(reader)
    error = foreign(header.fingerprint, fingerprint)
    if error is not None:
        raise error
    if header.digest != digest:
        raise RecordError(
            "damaged", f"its record is of another text, {header.digest[:12]}", digest[:12]
        )
    return header


def absent(catalogue: Catalogue, digest: str, fingerprint: Fingerprint) -> RecordError:
    """Why a document has no record of this model: "foreign" if another model has one.

    Of several, the one that differs in the fewest fields is named.
    """
    errors = []
    for record in catalogue.index.records(digest):
        header = catalogue.header(record)
        if header is None:
            continue
        error = foreign(header.fingerprint, fingerprint)
        if error is not None:
            errors.append((len(differences(header.fingerprint, fingerprint)), error.what, error))
    if errors:
        return min(errors, key=lambda found: found[:2])[2]
    return RecordError(
        "missing", "it has no record, which made room for others or was taken away", "a record"
    )
