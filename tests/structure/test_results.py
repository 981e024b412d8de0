"""Stored lines can be repeated by anyone: no place of one machine stands in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
#: A path from the root, after a quote, a space or "=".
ABSOLUTE = re.compile(r"""(?<=[\s='"])(/|~/)\w[\w.-]*/""")


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.name)
def test_no_line_has_an_absolute_path(path: Path) -> None:
    found = ABSOLUTE.search(path.read_text())
    assert found is None, found


def test_an_absolute_path_is_seen() -> None:
    assert ABSOLUTE.search('{"command": "python /a/b.py"}')
    assert ABSOLUTE.search("head=/a/b")
    assert not ABSOLUTE.search(
        '{"command": "python -m benchmarks.x head=runs/b", "f": "needs/ends"}'
    )
