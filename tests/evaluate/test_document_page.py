"""The benchmark over stored documents, its tables and its picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import keyhole
from benchmarks import samkv
from keyhole import LLM
from keyhole.evaluate import document_page
from keyhole.evaluate.document_methods import ABLATION, METHODS


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("samkv")
    llm = LLM(keyhole.tiny(), device="cpu", prefix_cache=False, documents=folder)
    variants = METHODS | {"ends": ABLATION["sam_kv: ends only; overwrite"]}
    found = samkv.count(llm, "needs_each_other/ends", "2x384", variants, 2, 32)
    assert llm.documents.list() == []
    return found


def test_only_what_is_computed_again_answers(results: list[dict[str, Any]]) -> None:
    by_name = {result["method"]: result for result in results}
    assert by_name["recompute"]["exact"] == 1.0
    assert by_name["reuse"]["exact"] == 0.0
    assert by_name["sam_kv overwrite"]["exact"] == 1.0
    sam_kv, reuse = by_name["sam_kv overwrite"], by_name["reuse"]
    assert 0.2 < sam_kv["sequence_ratio"] < 0.5
    assert sam_kv["bytes_read"] < 0.5 * reuse["bytes_read"]
    assert by_name["ends"]["share"] is None


def _line(results: list[dict[str, Any]], kind: str, shape: str) -> dict[str, Any]:
    machine = {"cpu": "a processor", "cores": 2}
    versions = {"torch": "2", "transformers": "5"}
    return {
        "kind": kind,
        "shape": shape,
        "items": 2,
        "block_size": 32,
        "results": results,
        "machine": machine,
        "versions": versions,
        "date": "2026-11-21T00:00:00+00:00",
        "commit": "abc",
        "command": "python -m benchmarks.samkv",
        "note": "",
    }


def test_tables_say_what_the_lines_say(results: list[dict[str, Any]], tmp_path: Path) -> None:
    lines = [
        _line(results, "needs_each_other/ends", "2x384"),
        _line(results, "one/ends", "2x384"),
        _line(results[:1], "one/ends", "4x512"),
    ]
    path = tmp_path / "samkv.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [lines[2], *lines]))
    stored = document_page.stored(path)
    assert len(stored) == 3
    docs = tmp_path / "docs"
    (docs / "images").mkdir(parents=True)
    page = docs / document_page.PAGE
    page.write_text(f"before\n{document_page.BEGIN}old{document_page.END}after\n")
    document_page.write(stored, docs)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert text.index("2 documents of 384") < text.index("4 documents of 512")
    row = next(line for line in text.splitlines() if line.startswith("| reuse |"))
    assert row.split(" | ")[1:4] == ["0", "0", "100%"]
    assert (docs / "images" / document_page.PICTURE).stat().st_size > 5000


def test_the_page_in_the_repository_is_that_of_its_lines() -> None:
    lines = document_page.stored(samkv.OUTPUT)
    text = (samkv.measure.ROOT / "docs" / document_page.PAGE).read_text()
    assert document_page.inserted(text, document_page.render(lines)) == text
