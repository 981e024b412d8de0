"""Searches of stored documents: BM25 against its formula, odd queries, a table that is lost."""

from __future__ import annotations

import dataclasses
import math
import re
import sqlite3
import threading
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole import ConfigError
from keyhole.documents.index import DocumentInfo, Index
from keyhole.documents.search import BM25
from keyhole.documents.source import SourceFile
from keyhole.errors import StorageFullError
from tests.effort import examples

TEXTS = {
    "fruit": "The pear and the apple are fruit; a pear is green.",
    "lamp": "A lamp is green or red. The lamp stands on a table.",
    "café": "In the Café nobody eats an APPLE.",
    "table": "A table, a chair, another table and one lamp.",
    "none": "Words that nobody looks for.",
}


def info(name: str, text: str) -> DocumentInfo:
    return DocumentInfo(
        name=name,
        tokens=1,
        block_size=1,
        size_bytes=1,
        created=0.0,
        last_used=0.0,
        hits=0,
        pinned=False,
        digest=text,
        records=(),
        encoded=True,
        metadata={},
    )


def infos(texts: dict[str, str]) -> list[DocumentInfo]:
    return [info(*pair) for pair in texts.items()]


@pytest.fixture
def table(tmp_path: Path) -> BM25:
    made = BM25(tmp_path / "search.sqlite")
    made.update(lambda: infos(TEXTS), TEXTS.get)
    return made


def words(text: str) -> list[str]:
    plain = "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))
    return re.findall(r"\w+", plain.lower())


def scores(query: str) -> dict[str, float]:
    """Okapi BM25 as its authors write it; idf as SQLite's documentation says."""
    texts = {name: words(text) for name, text in TEXTS.items()}
    mean = sum(map(len, texts.values())) / len(texts)
    found: dict[str, float] = {}
    for word in dict.fromkeys(words(query)):
        have = sum(word in text for text in texts.values())
        idf = max(1e-6, math.log((len(texts) - have + 0.5) / (have + 0.5))) if have else 0.0
        for name, text in texts.items():
            if word in text:
                f = text.count(word)
                part = idf * f * 2.2 / (f + 1.2 * (0.25 + 0.75 * len(text) / mean))
                found[name] = found.get(name, 0.0) + part
    return found


@pytest.mark.parametrize("query", ["pear", "lamp table", "cafe apple", "GREEN lamp?", "the pear a"])
def test_scores_are_those_of_the_formula(table: BM25, query: str) -> None:
    found = {one.name: one.score for one in table.search(query, 10)}
    # SQLite computes in float64 in another order, and floors a common word's idf at 1e-6.
    assert found == pytest.approx(scores(query), rel=1e-6, abs=1e-9)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert [one.name for one in table.search(query, 1)] == [*found][:1]


@pytest.mark.parametrize("query", ["", "  ", "?!", "zebra", '"', "* - ^ ( )"])
def test_a_query_without_known_words_finds_nothing(table: BM25, query: str) -> None:
    assert table.search(query, 3) == []


@pytest.mark.parametrize(
    "query",
    [
        '"pear',
        "pear OR",
        "NOT pear",
        "name:pear",
        "pear*",
        "NEAR(pear, 2)",
        "pear AND",
        "{name} : pear",
        "pear; DROP TABLE texts",
        "pear\x00'--",
        "+pear -pear",
    ],
)
def test_no_query_is_an_expression(table: BM25, query: str) -> None:
    """The words of a question were operators of SQLite's: a quote alone was an error."""
    assert "fruit" in [one.name for one in table.search(query, 5)]
    assert len(table.search("the a", 5)) == len(scores("the a"))


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> BM25:
    """One table for all examples of a property: a search changes nothing in it."""
    made = BM25(tmp_path_factory.mktemp("search") / "search.sqlite")
    made.update(lambda: infos(TEXTS), TEXTS.get)
    return made


@examples(100)
@given(query=st.text(max_size=40))
def test_any_text_is_a_query(searched: BM25, query: str) -> None:
    assert {one.name for one in searched.search(query, 9)} <= TEXTS.keys()


def test_it_follows_what_is_stored(table: BM25, tmp_path: Path) -> None:
    changed = {**TEXTS, "fruit": "A plum."}
    del changed["lamp"]
    asked: list[str] = []

    def text(name: str) -> str:
        asked.append(name)
        return changed[name]

    table.update(lambda: infos(changed), text)
    assert asked == ["fruit"]
    assert [one.name for one in table.search("plum pear", 5)] == ["fruit"]
    assert [one.name for one in table.search("lamp", 5)] == ["table"]
    assert b"stands on a table" not in (tmp_path / "search.sqlite").read_bytes()


def test_a_text_that_cannot_be_read_is_found_later(table: BM25) -> None:
    more = [*infos(TEXTS), info("new", "a zebra")]
    table.update(lambda: more, lambda _: None)
    assert table.search("zebra", 5) == []
    table.update(lambda: more, {"new": "a zebra"}.get)
    assert [one.name for one in table.search("zebra", 5)] == ["new"]


@pytest.mark.parametrize("content", [None, b"", b"no database" * 100])
def test_a_table_that_is_lost_is_made_again(
    table: BM25, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "search.sqlite"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    table.update(lambda: infos(TEXTS), TEXTS.get)
    assert [one.name for one in table.search("pear", 5)] == ["fruit"]


def test_a_table_whose_pages_are_damaged_is_made_again(table: BM25, tmp_path: Path) -> None:
    path = tmp_path / "search.sqlite"
    whole = path.read_bytes()
    for damaged in (
        whole[:4096] + b"\xff" * (len(whole) - 4096),  # all but the schema
        whole.replace(b"stands", b"\xff\xff\xff\xff\xff\xff"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="was damaged; search again"):
            table.search("lamp", 5)
        table.update(lambda: infos(TEXTS), TEXTS.get)
        assert [one.name for one in table.search("pear", 5)] == ["fruit"]
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    table.update(lambda: infos(TEXTS), TEXTS.get)
    assert [one.name for one in table.search("pear", 5)] == ["fruit"]


def test_what_another_thread_stores_meanwhile_stays_found(table: BM25) -> None:
    more = {**TEXTS, "new": "a zebra"}
    stored, listed, threads = dict(TEXTS), threading.Event(), []

    def store() -> None:
        stored.update(more)
        listed.set()
        table.update(lambda: infos(stored), more.get)

    def documents() -> list[DocumentInfo]:
        found = infos(stored)  # old, once it is used
        threads.append(threading.Thread(target=store))
        threads[0].start()
        assert listed.wait(10)
        return found

    table.update(documents, more.get)
    threads[0].join()
    assert [one.name for one in table.search("zebra", 5)] == ["new"]


def test_a_full_disk_is_named_with_its_remedy(table: BM25, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = table._connect

    def full() -> sqlite3.Connection:
        connection = connect()
        connection.execute("PRAGMA max_page_count = 1")  # SQLite takes as many as there are
        return connection

    monkeypatch.setattr(table, "_connect", full)
    more = {**TEXTS, "large": "many words " * 1000}
    with pytest.raises(StorageFullError, match=r"search.sqlite cannot be written: .*; free disk"):
        table.update(lambda: infos(more), more.get)
    assert [one.name for one in table.search("pear", 5)] == ["fruit"]


def test_unusable_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("search.sqlite cannot be used")):
        BM25(tmp_path / "nowhere" / "search.sqlite").search("x", 1)
    with pytest.raises(ConfigError, match="top_k 0"):
        BM25(tmp_path / "search.sqlite").search("x", 0)


def test_an_index_without_metadata_keeps_its_uses(tmp_path: Path) -> None:
    """A new version threw the index away, and with it how often documents were used."""
    path = tmp_path / "index.sqlite"
    index = Index(path)
    source = SourceFile(
        name="a", digest="d", model="m", tokens=1, block_size=1, created=1.0, pinned=False
    )
    index.put_documents([(source, 1, "")])
    connection = sqlite3.connect(path)
    connection.executescript(
        "UPDATE documents SET hits = 7; ALTER TABLE documents DROP COLUMN metadata; "
        "PRAGMA user_version = 1;"
    )
    connection.close()
    (found,) = Index(path).infos("m")
    assert (found.hits, found.metadata) == (7, {})
    described = dataclasses.replace(source, metadata='{"by":"Ann"}')
    Index(path).put_documents([(described, 1, "")])
    assert Index(path).infos("m")[0].metadata == {"by": "Ann"}
    assert SourceFile.parse(described.line()) == described
    assert b"metadata" not in source.line()
