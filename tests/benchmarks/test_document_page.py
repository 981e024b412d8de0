"""The benchmark over stored documents, its tables and its picture."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

import benchmarks
import keyhole
from benchmarks import samkv
from benchmarks.document_reuse import equal as document_equal
from benchmarks.document_reuse import page as document_page
from benchmarks.document_reuse.methods import ABLATION, EQUAL, METHODS
from benchmarks.results_page.text import between
from keyhole import LLM
from keyhole.eval.tiny_language.documents import make


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("samkv")
    llm = LLM(keyhole.tiny(), device="cpu", prefix_cache=False, documents=folder)
    variants = METHODS | {"ends": ABLATION["sam_kv: ends only; overwrite"]}
    found = samkv.count(llm, "needs_each_other/ends", "2x384", variants, 2, 32)
    assert llm.documents.list() == []
    return found


@pytest.mark.slow
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


@pytest.mark.slow
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


def _cell(methods: dict[str, float], **others: Any) -> str:
    results = [{"method": name, "ttft_ms": ms} for name, ms in methods.items()]
    return json.dumps(_line(results, "one/ends", "2x384") | others) + "\n"


def _times(path: Path) -> dict[str, tuple[float, float]]:
    line = document_page.stored(path)["one/ends", "2x384"]
    return {r["method"]: (r["ttft_ms"], r["reference_ms"]) for r in line["results"]}


def test_a_later_line_adds_methods_with_their_own_reference(tmp_path: Path) -> None:
    path = tmp_path / "samkv.jsonl"
    path.write_text(
        _cell({"recompute": 10, "reuse": 4, "epic": 5}) + _cell({"recompute": 20, "new": 8})
    )
    before = {"recompute": (10, 10), "reuse": (4, 10), "epic": (5, 10)}
    assert _times(path) == before | {"new": (8, 20)}
    with path.open("a") as file:
        file.write(_cell({"recompute": 30, "new": 9, "epic": 6}, commit="def"))
    assert _times(path) == before | {"new": (9, 30), "epic": (6, 30)}
    line = document_page.stored(path)["one/ends", "2x384"]
    assert (line["commit"], [added["commit"] for added in line["added"]]) == ("abc", ["abc", "def"])
    whole = {"recompute": 7.0, "reuse": 1.0, "new": 2.0, "epic": 3.0}
    with path.open("a") as file:
        file.write(_cell(whole))
    assert _times(path) == {name: (ms, 7.0) for name, ms in whole.items()}
    assert document_page.stored(path)["one/ends", "2x384"]["added"] == []


@pytest.mark.parametrize("other", [{"items": 3}, {"block_size": 64}])
def test_a_line_of_other_questions_or_blocks_is_a_separate_cell(
    tmp_path: Path, other: dict[str, int]
) -> None:
    path = tmp_path / "samkv.jsonl"
    path.write_text(_cell({"recompute": 10, "reuse": 4}) + _cell({"recompute": 20}, **other))
    assert _times(path) == {"recompute": (20, 20)}


def test_only_what_a_cell_lacks_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "samkv.jsonl", []

    def count(_: Any, kind: str, shape: str, variants: Any, items: int, size: int, *__: Any) -> Any:
        asked.append((kind, shape, list(variants), items, size))
        zero = dict.fromkeys(("exact", "f1", "sequence_ratio", "recompute_ratio", "bytes_read"), 0)
        return [{"method": name, "ttft_ms": 1.0, **zero} for name in variants]

    monkeypatch.setattr(samkv, "count", count)
    arguments = argparse.Namespace(output=path, items=2, again=False, note="", equal=False)
    first = {name: METHODS[name] for name in ("recompute", "reuse")}
    every = first | {"sam_kv extremes": METHODS["sam_kv extremes"]}
    where = ("one/ends", "4x512")
    for variants, items in ((first, 5), (first, 3), (every, 3), (every, 5), (every, 6)):
        arguments.items = items
        samkv._cell(None, *where, variants, arguments)  # type: ignore[arg-type]
    assert asked == [
        (*where, ["recompute", "reuse"], 5, 32),
        (*where, ["recompute", "sam_kv extremes"], 5, 32),
        (*where, ["recompute", "reuse", "sam_kv extremes"], 6, 32),
    ]
    assert len(path.read_text().splitlines()) == 3


def test_the_page_in_the_repository_is_that_of_its_lines() -> None:
    lines = document_page.stored(samkv.OUTPUT)
    text = (benchmarks.ROOT / "docs" / document_page.PAGE).read_text()
    assert (
        between(text, document_page.BEGIN, document_page.END, document_page.render(lines)) == text
    )
    models = [document_equal.stored(model.output) for model in samkv.MODELS.values()]
    for model, found in zip(samkv.MODELS.values(), models, strict=True):
        tables = document_equal.render(found)
        assert between(text, *model.comments, tables) == text
    tables = document_equal.together(models)
    assert between(text, *document_equal.TOGETHER, tables) == text


def test_another_model_is_measured_at_equal_budgets_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lines would be taken for those of the bundled model."""
    monkeypatch.setattr("sys.argv", ["samkv", "--model", "tiny-hops"])
    with pytest.raises(SystemExit):
        samkv.main()
    assert "add --equal" in capsys.readouterr().err


@pytest.mark.slow
def test_budgets_are_those_of_the_method_that_sets_them(tmp_path: Path) -> None:
    llm = LLM(keyhole.tiny(), device="cpu", prefix_cache=False, documents=tmp_path)
    variants = {name: variant for name, (variant, _) in EQUAL.items()}
    matches = {name: other for name, (_, other) in EQUAL.items() if other is not None}
    results = samkv.count(llm, "one/anywhere", "2x320", variants, 2, 16, matches)
    found = {result["method"]: result for result in results}
    assert list(found) == list(EQUAL)
    for name, other in matches.items():
        (method, _), own, theirs = variants[name], found[name], found[other]
        if method == "cacheblend":
            more = own["recompute_ratio"] - theirs["recompute_ratio"]
            assert 0 <= more < 1 / 640
        else:
            less = theirs["sequence_ratio"] - own["sequence_ratio"]
            assert 0 <= less < (16 / 640 if method == "multi_infllm" else 1e-6)
    for result in results:
        assert result["exact"] == sum(result["right"]) / 2
    line = _line(results, "one/anywhere", "2x320")
    path = tmp_path / "equal.jsonl"
    path.write_text(json.dumps(line) + "\n")
    text = document_equal.render(document_equal.stored(path))
    row = next(row for row in text.splitlines() if row.startswith("| recompute |"))
    assert row == "| recompute | 100 (34 to 100) | 100.0% | 100.0% |"
    assert sum(row.startswith("| sam_kv overwrite than ") for row in text.splitlines()) == 2


def test_the_f1_of_an_answer_counts_words_up_to_done() -> None:
    item = make("two_hop", num_documents=2, words=320, seed=0)
    first, second, *_ = item.answer.split(" .")
    assert samkv.token_f1(item, f"{item.answer} and more") == 1
    assert samkv.token_f1(item, f"{first} . done") == pytest.approx(2 * 4 / (4 + 8))
    twice = f"{first} .{second} . {first} . done"
    assert samkv.token_f1(item, twice) == pytest.approx(2 * 8 / (12 + 8))
    assert samkv.token_f1(item, "") == 0
