"""The reader of traces finds what overlaps, in a trace that is made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.streams import beside_each_other

COPY = {"ph": "X", "cat": "kernel", "name": "copy", "ts": 100.5, "dur": 10, "args": {"stream": 20}}
SUMS = {"ph": "X", "cat": "kernel", "name": "sums", "ts": 105, "dur": 50.0, "args": {"stream": 7}}
BEGIN = {"ph": "i", "name": "begin", "ts": 0}


@pytest.mark.parametrize(
    ("changed", "overlaps"),
    [
        ({}, True),
        ({"ts": 109, "dur": 0.5}, True),
        ({"ts": 110.5}, False),
        ({"ts": 200}, False),
        ({"ts": 50, "dur": 50.5}, False),
        ({"ts": 50, "dur": 100}, True),
        ({"args": {"stream": 20}}, False),
        ({"args": {}}, False),
        ({"cat": "gpu_memcpy"}, True),
        ({"cat": "cuda_sync"}, False),
        ({"ph": "i"}, False),
    ],
    ids=str,
)
def test_work_of_two_streams_overlaps(
    tmp_path: Path, changed: dict[str, Any], overlaps: bool
) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": [SUMS | changed, BEGIN, COPY]}))
    assert bool(beside_each_other(file)) == overlaps


def test_all_pairs_are_named(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    third = COPY | {"name": "more", "ts": 120, "dur": 1}
    file.write_text(json.dumps({"traceEvents": [third, SUMS, COPY]}))
    assert beside_each_other(file) == [("copy", "sums"), ("sums", "more")]
