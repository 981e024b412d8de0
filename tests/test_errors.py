"""Errors of libraries in messages of ours."""

from __future__ import annotations

import pytest

from keyhole.errors import one_line


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ValueError("\n  the head is cut\nat byte 9\n"), "ValueError: the head is cut"),
        (OSError(), "OSError: no message"),
        (KeyError("name"), "KeyError: 'name'"),
    ],
)
def test_an_error_of_many_lines_is_one_line(error: Exception, wanted: str) -> None:
    """Damaged configs and files of weights were reported with all lines of the library's error."""
    assert one_line(error) == wanted
