"""What steps are to reach is taken from the run's own ratios."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.llama_cpp.__main__ import targets


def result(system: str, ratio: float | None, context: int = 32768) -> dict[str, Any]:
    return {"system": system, "context": context, "ratio_to_full": ratio}


@pytest.mark.parametrize(("batch", "wanted", "met"), [(1, ">= 1.3", True), (8, ">= 2.0", False)])
def test_the_faster_of_both_ways_counts(batch: int, wanted: str, met: bool) -> None:
    found = [
        result("transformers_sdpa", 1.1),
        result("llama_cpp", 1.5),
        result("llama_cpp_flash", 1.9),
        result("llama_cpp", 1.2, context=8192),
    ]
    name = f"full, 32,768 tokens, batch {batch}: tokens/s by those of llama_cpp"
    assert targets(found, batch) == [{"bar": name, "value": 1.5, "wanted": wanted, "met": met}]


def test_nothing_is_wanted_where_nothing_was_measured() -> None:
    assert targets([result("llama_cpp", 1.2, context=8192)], 1) == []
    assert targets([result("llama_cpp", None)], 1) == []  # full attention was not asked for
    assert targets([result("llama_cpp", 1.5)], 4) == []
