"""The tables of docs/specontext.md are those of the stored line."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.results_page import head_table

ROOT = Path(__file__).parents[2]


def test_the_recall_of_heads_is_the_stored_one() -> None:
    stored = (ROOT / "benchmarks/results/head-recall.jsonl").read_text().splitlines()
    text = (ROOT / "docs/specontext.md").read_text()
    assert head_table.tables(json.loads(stored[-1])).strip() in text


def test_the_recall_on_the_other_model_is_the_stored_one() -> None:
    stored = (ROOT / "benchmarks/results/head-recall-hops.jsonl").read_text().splitlines()
    text = (ROOT / "docs/specontext.md").read_text()
    assert head_table.tables(json.loads(stored[-1])).strip() in text


def test_right_answers_are_the_stored_ones() -> None:
    stored = (ROOT / "benchmarks/results/head-tasks.jsonl").read_text().splitlines()
    text = (ROOT / "docs/specontext.md").read_text()
    assert head_table.tasks(json.loads(stored[-1])).strip() in text
