"""Nothing in the package is left for later or swept under a rug."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Ruff finds bare excepts (E722).
_MARKERS = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")


def faults(source: str) -> Iterator[str]:
    """Notes to do it later, and methods that are not there, each with its line."""
    for line, text in enumerate(source.splitlines(), start=1):
        if found := _MARKERS.search(text):
            yield f"line {line}: {found[0]}"


def test_the_package_has_no_such_faults() -> None:
    paths = sorted((ROOT / "keyhole").rglob("*.py"))
    assert not [
        f"{path.relative_to(ROOT)} {fault}" for path in paths for fault in faults(path.read_text())
    ]


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("x = 1  # TODO: two", "line 1: TODO"),
        ('"""What it does.\n\nFIXME later."""', "line 3: FIXME"),
        ("# XXX", "line 1: XXX"),
        ("def f():\n    raise NotImplementedError", "line 2: NotImplementedError"),
        ("def f():\n    raise NotImplementedError('f')", "line 2: NotImplementedError"),
    ],
)
def test_a_fault_is_seen_with_its_line(source: str, fault: str) -> None:
    assert list(faults(source)) == [fault]


def test_good_code_has_no_faults() -> None:
    assert not list(faults("try:\n    todo()\nexcept ValueError:\n    raise"))
