"""Problems of stored documents, as errors and as lines of a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from keyhole.documents.digest import Fingerprint, differences
from keyhole.errors import RequestError

__all__ = ["Kind", "Problem", "RecordError", "foreign"]

#: damaged: changed since it was written. foreign: another model's. missing: the record was evicted
#: or removed, or an older version lacks newer tensors. source: the text itself is damaged, so that
#: it cannot be encoded again.
Kind = Literal["damaged", "foreign", "missing", "source"]


class RecordError(RequestError):
    """A record, or a text, that cannot be used. Nothing else that is stored is affected."""

    def __init__(self, kind: Kind, what: str, right: str, name: str | None = None) -> None:
        self.kind: Kind = kind
        self.what, self.right, self.name = what, right, name
        document = "a document" if name is None else f"document {name!r}"
        if kind == "source":
            helps = "adding the right text again repairs it"
        else:
            helps = "documents.verify(repair=True), or adding the same text, encodes it again"
        super().__init__(f"{document}: {what}; right would be {right}; {helps}")

    def of(self, name: str) -> RecordError:
        """The same error, with the document's name in it."""
        return RecordError(self.kind, self.what, self.right, name)


@dataclass(frozen=True)
class Problem:
    """A problem of the document of this name, and what would be right.

    All but those of the kind "source" are repaired by encoding the document's source again.
    """

    name: str
    what: str
    right: str
    kind: Kind


def foreign(theirs: Fingerprint, ours: Fingerprint) -> RecordError | None:
    """The error for a record of another model, naming the differences; None if there are none."""
    fields = differences(theirs, ours)
    if not fields:
        return None
    there, here = (
        ", ".join(
            f"{field} {side[field]!r}" if field in side else f"no {field}" for field in fields
        )
        for side in (theirs, ours)
    )
    return RecordError("foreign", f"its record is another model's: {there}", here)
