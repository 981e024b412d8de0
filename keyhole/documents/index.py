"""An SQLite index of a store: names, sizes, dates, uses, pins.

Everything in it except the usage counters can be rebuilt from the storage. A damaged index is
therefore replaced, and writes are not synced to disk. Several processes use it at once; each
operation opens its own connection, which makes it safe for threads and forks.

It can be read, and rows can be removed, when the disk is full: reading creates no file (as it would
with a write-ahead log), and a rollback journal that does not fit on the disk is kept in memory.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from keyhole.documents.source import SourceFile

_T = TypeVar("_T")
_VERSION = 2
_WAIT_S = 60.0
_SCHEMA = f"""
CREATE TABLE documents (
  name TEXT PRIMARY KEY, file TEXT NOT NULL UNIQUE, digest TEXT NOT NULL,
  model TEXT NOT NULL, tokens INTEGER NOT NULL, block_size INTEGER NOT NULL,
  created REAL NOT NULL, pinned INTEGER NOT NULL,
  metadata TEXT NOT NULL DEFAULT '{{}}',
  size_bytes INTEGER NOT NULL, stamp TEXT NOT NULL, hits INTEGER NOT NULL DEFAULT 0,
  last_used REAL NOT NULL);
CREATE INDEX by_digest ON documents (digest);
CREATE TABLE records (
  file TEXT PRIMARY KEY, digest TEXT NOT NULL, model TEXT NOT NULL, tokens INTEGER,
  block_size INTEGER, size_bytes INTEGER NOT NULL, last_used REAL NOT NULL);
CREATE INDEX of_digest ON records (digest);
PRAGMA user_version = {_VERSION};
"""
# Migrated, because a new index would lose the usage counters.
_FROM_1 = f"""
BEGIN;
ALTER TABLE documents ADD COLUMN metadata TEXT NOT NULL DEFAULT '{{}}';
PRAGMA user_version = {_VERSION};
COMMIT;
"""
_INFO = """
SELECT d.*, own.file IS NOT NULL AS encoded, own.tokens AS own_tokens,
  own.block_size AS own_block_size, group_concat(r.model) AS models,
  coalesce(sum(r.size_bytes), 0) AS record_bytes
FROM documents d LEFT JOIN records r ON r.digest = d.digest
LEFT JOIN records own ON own.digest = d.digest AND own.model = :model
WHERE :names IS NULL OR d.name IN (SELECT value FROM json_each(:names))
GROUP BY d.name ORDER BY d.name
"""
_SOURCE_FIELDS = [field.name for field in dataclasses.fields(SourceFile)]
# The disk is full, or the system refuses to write.
_NO_ROOM = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
# Errors that do not mean damage: another process holds a lock, or the file cannot be opened.
_NOT_DAMAGE = _NO_ROOM | {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
}


@dataclass(frozen=True, kw_only=True)
class DocumentInfo:
    """A stored document, as one model sees it.

    digest: SHA-256 of its source. tokens, block_size: of this model's record or, if it has none, as
    counted by the model that stored the document. size_bytes: its source and the records of all
    models. created, last_used: seconds since 1970, UTC. hits: how often it was opened. records: the
    models that have a record, by the digest of their fingerprint. encoded: whether this model has
    one. metadata: JSON that was stored with it.
    """

    name: str
    tokens: int
    block_size: int
    size_bytes: int
    created: float
    last_used: float
    hits: int
    pinned: bool
    digest: str
    records: tuple[str, ...]
    encoded: bool
    metadata: dict[str, Any]


class Index:
    """The index in the file `path`; a new one if there is none or it is damaged.

    Create it under the store's lock. Any operation may raise sqlite3.Error.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if not self._is_sound():
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            with closing(self._connect()) as connection:
                connection.executescript(f"BEGIN;{_SCHEMA}COMMIT;")

    def _is_sound(self) -> bool:
        try:
            with closing(self._connect()) as connection:
                checked = connection.execute("PRAGMA quick_check").fetchone()[0]
                version = connection.execute("PRAGMA user_version").fetchone()[0]
                if (version, checked) == (1, "ok"):
                    connection.executescript(_FROM_1)
                    version = _VERSION
                return bool(version == _VERSION and checked == "ok")
        except sqlite3.DatabaseError as error:
            if _code(error) == sqlite3.SQLITE_IOERR_SHORT_READ:  # the file was cut
                return False
            if _code(error) & 0xFF in _NOT_DAMAGE:
                raise
            return False

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=_WAIT_S, isolation_level=None)
        connection.row_factory = sqlite3.Row
        try:
            connection.execute("PRAGMA synchronous = OFF")
        except BaseException:  # of a file that is no database
            connection.close()
            raise
        return connection

    def _write(self, change: Callable[[sqlite3.Connection], _T]) -> _T:
        """The result of `change`, run in a transaction; again if its journal does not fit."""
        try:
            return self._in_transaction(change, "DELETE")
        except sqlite3.OperationalError as error:
            if _code(error) & 0xFF not in _NO_ROOM:
                raise
            # If the process is killed meanwhile, the index is damaged and then rebuilt.
            return self._in_transaction(change, "MEMORY")

    def _in_transaction(self, change: Callable[[sqlite3.Connection], _T], journal: str) -> _T:
        with closing(self._connect()) as connection:
            connection.execute(f"PRAGMA journal_mode = {journal}")
            connection.execute("BEGIN IMMEDIATE")
            result = change(connection)
            connection.execute("COMMIT")  # without it, closing rolls back
            return result

    def _for_each(self, query: str, rows: list[dict[str, Any]]) -> None:
        """Runs a statement for the values of each row, in one transaction."""
        if rows:
            self._write(lambda connection: connection.executemany(query, rows))

    def _rows(self, query: str, **values: Any) -> list[sqlite3.Row]:
        with closing(self._connect()) as connection:
            return connection.execute(query, values).fetchall()

    # Documents.

    def source(self, name: str) -> SourceFile | None:
        """The first line of the document's file."""
        rows = self._rows("SELECT * FROM documents WHERE name = :name", name=name)
        return _source(rows[0]) if rows else None

    def sources(self, names: Collection[str] | None = None) -> list[SourceFile]:
        """The first lines of the documents of these names, or of all; sorted by name."""
        rows = self._rows(
            "SELECT * FROM documents WHERE :names IS NULL "
            "OR name IN (SELECT value FROM json_each(:names)) ORDER BY name",
            names=_listed(names),
        )
        return [_source(row) for row in rows]

    def names(self) -> list[str]:
        """All names, sorted."""
        return [row["name"] for row in self._rows("SELECT name FROM documents ORDER BY name")]

    def source_bytes(self, name: str) -> int:
        """The size of the document's file; 0 if there is none."""
        rows = self._rows("SELECT size_bytes FROM documents WHERE name = :name", name=name)
        return int(rows[0]["size_bytes"]) if rows else 0

    def stamps(self) -> dict[str, str]:
        """File -> the stamp it had when its first line was read."""
        rows = self._rows("SELECT file, stamp FROM documents")
        return {row["file"]: row["stamp"] for row in rows}

    def put_documents(self, found: Iterable[tuple[SourceFile, int, str]]) -> None:
        """Adds first line, size in bytes and stamp of each file; usage counters are kept."""
        if rows := list(found):
            self._write(lambda connection: _put(connection, rows))

    def replace_document(self, before: SourceFile | None, now: SourceFile, size: int) -> None:
        """Updates a document, unless it has changed since `before`."""
        if before == now:
            return

        def change(connection: sqlite3.Connection) -> None:
            query = "SELECT * FROM documents WHERE name = ?"
            row = connection.execute(query, (now.name,)).fetchone()
            if (_source(row) if row is not None else None) == before:
                _put(connection, [(now, size, "")])

        self._write(change)

    def forget_documents(self, files: Iterable[str]) -> None:
        """Removes documents whose file is gone."""
        self._for_each("DELETE FROM documents WHERE file = :file", [{"file": f} for f in files])

    # Records.

    def records(self, digest: str | None = None) -> dict[str, int]:
        """File -> size in bytes, of one source or of all."""
        rows = self._rows(
            "SELECT file, size_bytes FROM records WHERE :digest IS NULL OR digest = :digest",
            digest=digest,
        )
        return {row["file"]: row["size_bytes"] for row in rows}

    def put_records(
        self, sizes: dict[str, int], tokens: int | None = None, block_size: int | None = None
    ) -> None:
        """Adds records by file; a new one counts as used now, or when its document was made."""
        self._for_each(
            "INSERT INTO records VALUES (:file, :digest, :model, :tokens, :block_size, :size, "
            "(SELECT coalesce(max(last_used), 0) FROM documents WHERE digest = :digest)) "
            "ON CONFLICT (file) DO UPDATE SET size_bytes = excluded.size_bytes, "
            "tokens = coalesce(excluded.tokens, tokens), "
            "block_size = coalesce(excluded.block_size, block_size)",
            [
                dict(_parts(file), file=file, tokens=tokens, block_size=block_size, size=size)
                for file, size in sizes.items()
            ],
        )

    def uncounted(self) -> list[str]:
        """Files of records whose tokens are not known: another model stored their document."""
        rows = self._rows(
            "SELECT r.file FROM records r JOIN documents d ON r.digest = d.digest "
            "WHERE r.tokens IS NULL GROUP BY r.file HAVING sum(r.model = d.model) < count(*)"
        )
        return [row["file"] for row in rows]

    def forget_records(self, files: Iterable[str]) -> None:
        """Removes records whose file is gone."""
        self._for_each("DELETE FROM records WHERE file = :file", [{"file": f} for f in files])

    def orphans(self) -> list[str]:
        """Files of records of which no document has the source."""
        rows = self._rows(
            "SELECT file FROM records WHERE digest NOT IN (SELECT digest FROM documents)"
        )
        return [row["file"] for row in rows]

    def sharing(self, digest: str, name: str) -> list[str]:
        """The names, besides this one, of documents with the source."""
        query = "SELECT name FROM documents WHERE digest = :digest AND name != :name ORDER BY name"
        return [row["name"] for row in self._rows(query, digest=digest, name=name)]

    def total_bytes(self) -> int:
        """Bytes of all sources and records."""
        row = self._rows(
            "SELECT (SELECT coalesce(sum(size_bytes), 0) FROM documents) + "
            "(SELECT coalesce(sum(size_bytes), 0) FROM records) AS total"
        )[0]
        return int(row["total"])

    def evictable(self) -> dict[str, int]:
        """File -> bytes of the records that no pinned document has, in the order of eviction.

        First those of no document at all, then the least recently used.
        """
        rows = self._rows(
            "SELECT file, size_bytes FROM records r WHERE NOT EXISTS "
            "(SELECT 1 FROM documents d WHERE d.digest = r.digest AND d.pinned) "
            "ORDER BY digest IN (SELECT digest FROM documents), last_used, file"
        )
        return {row["file"]: row["size_bytes"] for row in rows}

    # Uses.

    def opened(self, files: Mapping[str, str], model: str) -> dict[str, DocumentInfo]:
        """Counts a use of documents and records in one transaction; returns the documents by name.

        files: the record that was opened of each document. On a full disk it may not be counted.
        """
        now, names = time.time(), _listed(files)
        records = _listed(files.values())
        among = "IN (SELECT value FROM json_each(?))"

        def change(connection: sqlite3.Connection) -> None:
            connection.execute(
                f"UPDATE documents SET hits = hits + 1, last_used = ? WHERE name {among}",
                (now, names),
            )
            connection.execute(
                f"UPDATE records SET last_used = ? WHERE file {among}", (now, records)
            )

        try:
            self._write(change)
        except sqlite3.OperationalError as error:
            if _code(error) & 0xFF not in _NO_ROOM:
                raise
        return {info.name: info for info in self.infos(model, files)}

    def used(self, file: str) -> None:
        """Marks the record in `file` as most recently used, without a hit."""
        self._for_each(
            "UPDATE records SET last_used = :now WHERE file = :file",
            [{"now": time.time(), "file": file}],
        )

    # Documents as users see them.

    def infos(self, model: str, names: Collection[str] | None = None) -> list[DocumentInfo]:
        """The documents of these names, or all, sorted by name, as `model` sees them."""
        rows = self._rows(_INFO, model=model, names=_listed(names))
        return [_info(row) for row in rows]


def _listed(names: Iterable[str] | None) -> str | None:
    """Names as JSON, for SQL's json_each."""
    return None if names is None else json.dumps(list(names))


def record_file(digest: str, model: str) -> str:
    """The file name of a model's record of a source."""
    return f"{digest}-{model}.safetensors"


def _parts(file: str) -> dict[str, str]:
    """Digest and model of a record, from its file name."""
    digest, _, rest = file.partition("-")
    return {"digest": digest, "model": rest.partition(".")[0]}


def _put(connection: sqlite3.Connection, found: Iterable[tuple[SourceFile, int, str]]) -> None:
    fields = [*_SOURCE_FIELDS, "file", "size_bytes", "stamp"]
    marks, columns = ", ".join("?" * len(fields)), ", ".join(fields)
    changes = ", ".join(f"{field} = excluded.{field}" for field in fields)
    connection.executemany(
        f"INSERT INTO documents ({columns}, last_used) VALUES ({marks}, ?) "
        f"ON CONFLICT (name) DO UPDATE SET {changes}",
        [
            (*(getattr(s, f) for f in _SOURCE_FIELDS), s.file, size, stamp, s.created)
            for s, size, stamp in found
        ],
    )


def _code(error: sqlite3.Error) -> int:
    """SQLite's extended error code; that of damage where there is none."""
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT))


def _source(row: sqlite3.Row) -> SourceFile:
    fields = {name: row[name] for name in _SOURCE_FIELDS}
    return SourceFile(**{**fields, "pinned": bool(row["pinned"])})


def _info(row: sqlite3.Row) -> DocumentInfo:
    return DocumentInfo(
        name=row["name"],
        tokens=row["own_tokens"] or row["tokens"],
        block_size=row["own_block_size"] or row["block_size"],
        size_bytes=row["size_bytes"] + row["record_bytes"],
        created=row["created"],
        last_used=row["last_used"],
        hits=row["hits"],
        pinned=bool(row["pinned"]),
        digest=row["digest"],
        records=tuple(sorted((row["models"] or "").split(","))) if row["models"] else (),
        encoded=bool(row["encoded"]),
        metadata=json.loads(row["metadata"]),
    )
