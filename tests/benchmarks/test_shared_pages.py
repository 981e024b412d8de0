"""The pages that two questions could share, against counts made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.document_reuse.shared_pages import Kept, blocks, common


def made(text: list[str], pages: set[bytes]) -> Kept:
    """A row per layer: x is unchanged, o is computed again."""
    marks = np.asarray([list(row) for row in text])
    return Kept(marks != ".", marks == "x", pages)


def test_blocks_are_whole_but_for_a_token() -> None:
    row = np.asarray(list("xxxxx.xxxx..xxxx")) == "x"
    assert blocks(row, 4) == [0, 1, 3]


def test_what_is_common() -> None:
    one = made(["ooxxxx....xx....", "oo..xxxx..xx...."], {b"a", b"b", b"c"})
    other = made(["ooxxxx......xx..", "oo..xxxxxx......"], {b"a", b"d"})
    found = common(one, other, 2)
    assert found["unchanged"] == pytest.approx(12 / 16)
    assert found["in_each_layer"] == pytest.approx(8 / 16)
    assert found["in_all_layers"] == pytest.approx(4 / 16)  # the tokens 4 and 5
    assert found["paired"] == pytest.approx(8 / 16)  # two of three rows of blocks
    assert found["shared"] == pytest.approx(1 / 3)
