"""Search for the stored documents that match a query: an interface, and BM25 by SQLite's full-text
search.

The table is a copy that can be rebuilt from the texts at any time: it is updated before each
search, and recreated if it is missing or damaged.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from keyhole.config import is_count, require
from keyhole.documents.index import DocumentInfo
from keyhole.errors import ConfigError, StorageFullError

_WAIT_S = 60.0
_SCHEMA = """
CREATE VIRTUAL TABLE IF NOT EXISTS texts USING fts5(
  name UNINDEXED, digest UNINDEXED, text, tokenize = 'unicode61 remove_diacritics 2')
"""
_SEARCH = """
SELECT name, -bm25(texts) AS score, snippet(texts, 2, '', '', '…', 24) AS snippet
FROM texts WHERE texts MATCH ? ORDER BY bm25(texts), name LIMIT ?
"""
_WORD = re.compile(r"\w+")
# A query is a question, not a document; SQLite's limit for expressions is far higher.
_MOST_WORDS = 256
# Errors of a file that is not a database, or is damaged.
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


@dataclass(frozen=True, kw_only=True)
class Found:
    """A document found by a search. score: larger is better. snippet: the best-matching passage."""

    name: str
    score: float
    snippet: str


#: Lists the stored documents.
Listing = Callable[[], Sequence[DocumentInfo]]


class Retriever(Protocol):
    """Finds documents. Safe from threads."""

    def update(self, documents: Listing, text: Callable[[str], str | None]) -> None:
        """Makes these documents the searched ones.

        documents: to be called once no other update can run: an older list than that of the
        update before would remove what has just been stored. text: returns the text of a name, for
        new documents; None if it cannot be read now, or is no longer the one in the list.
        """
        ...

    def search(self, query: str, top_k: int) -> list[Found]:
        """At most `top_k` documents, the best first."""
        ...


class DamagedTableError(ConfigError):
    """A table that was damaged, and is deleted."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"the search table {path} was damaged; search again to rebuild it")


class SearchTable(ABC):
    """A table of texts in an SQLite file. path: the file. Safe from threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._guard = threading.Lock()

    def update(self, documents: Listing, text: Callable[[str], str | None]) -> None:
        """See `Retriever`; once more where the table was damaged, and so deleted."""
        try:
            self._update(documents, text)
        except DamagedTableError:
            self._update(documents, text)

    @abstractmethod
    def _update(self, documents: Listing, text: Callable[[str], str | None]) -> None:
        """See `update`."""

    @abstractmethod
    def _connect(self) -> Any:
        """A connection to the file, with the table."""

    @abstractmethod
    def _code(self, error: Exception) -> int | None:
        """SQLite's code of an error; None for an error that is not SQLite's."""

    @contextmanager
    def _table(self) -> Iterator[Any]:
        """The table, in a transaction. ConfigError if it cannot be used; deleted if damaged."""
        try:
            with self._guard, closing(self._open()) as connection:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")  # without it, closing rolls back
        except Exception as error:
            code = self._code(error)
            if code is None:
                raise
            if code in _DAMAGED:
                self._remove()
                raise DamagedTableError(self._path) from error
            if code == sqlite3.SQLITE_FULL:
                raise StorageFullError(
                    f"the search table {self._path} cannot be written: {error}; free disk space"
                ) from error
            raise ConfigError(f"the search table {self._path} cannot be used: {error}") from error

    def _open(self) -> Any:
        try:
            return self._connect()
        except Exception as error:
            if self._code(error) not in _DAMAGED:
                raise
        self._remove()
        return self._connect()

    def _remove(self) -> None:
        """Deletes the file."""
        for suffix in ("", "-journal"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)


class BM25(SearchTable):
    """Words that a query and a document share, weighted by their rarity (Okapi BM25).

    k1 is 1.2, b 0.75; case and accents are ignored.
    """

    def _update(self, documents: Listing, text: Callable[[str], str | None]) -> None:
        with self._table() as table:
            wanted = {info.name: info.digest for info in documents()}
            rows = table.execute("SELECT rowid, name, digest FROM texts").fetchall()
            gone = [(row,) for row, name, digest in rows if wanted.get(name) != digest]
            table.executemany("DELETE FROM texts WHERE rowid = ?", gone)
            known = {name for _, name, digest in rows if wanted.get(name) == digest}
            for name in wanted.keys() - known:
                found = text(name)
                if found is not None:
                    row = (name, wanted[name], found)
                    table.execute("INSERT INTO texts VALUES (?, ?, ?)", row)

    def search(self, query: str, top_k: int) -> list[Found]:
        """See `Retriever`. Words of a query are never operators of SQLite's query language."""
        require(is_count(top_k), "top_k", top_k, "at least 1")
        words = list(dict.fromkeys(_WORD.findall(query.lower())))[:_MOST_WORDS]
        if not words:
            return []
        either = " OR ".join(f'"{word}"' for word in words)
        with self._table() as table:
            rows = table.execute(_SEARCH, (either, top_k)).fetchall()
        return [Found(name=name, score=score, snippet=snippet) for name, score, snippet in rows]

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA secure_delete = ON")  # a removed text is gone
            connection.execute(_SCHEMA)
        except BaseException:
            connection.close()
            raise
        return connection

    def _code(self, error: Exception) -> int | None:
        if not isinstance(error, sqlite3.Error):
            return None
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:  # Python's own errors, of which this one is of text that is not UTF-8
            damaged = isinstance(error, sqlite3.OperationalError)
            return sqlite3.SQLITE_CORRUPT if damaged else sqlite3.SQLITE_ERROR
        return int(code & 0xFF)
