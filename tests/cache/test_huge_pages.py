"""Large tensors: as torch makes them, with a word to the system."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from keyhole.cache import huge_pages

MAPS = Path("/proc/self/smaps")


def flags(tensor: Tensor) -> list[str]:
    """What the system knows of the memory in the middle of a tensor."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    found = re.finditer(
        r"^(\w+)-(\w+) .*?^VmFlags: (.*?)$", MAPS.read_text(), re.MULTILINE | re.DOTALL
    )
    for low, high, words in (area.groups() for area in found):
        if int(low, 16) <= middle < int(high, 16):
            return words.split()
    raise AssertionError("no such memory")


@pytest.mark.parametrize("shape", [(0,), (3, 5), (1 << 20,), (3, 1 << 21)])
def test_shape_and_dtype_are_as_asked_for(shape: tuple[int, ...]) -> None:
    like = torch.empty(2, dtype=torch.bfloat16)
    tensor = huge_pages.new_empty(like, *shape)
    assert tensor.shape == shape
    assert tensor.dtype is torch.bfloat16
    assert tensor.fill_(3).eq(3).all()


@pytest.mark.skipif(
    sys.platform != "linux" or not MAPS.exists() or not hasattr(mmap, "MADV_HUGEPAGE"),
    reason="huge pages are asked for on Linux",
)
def test_large_tensors_ask_for_huge_pages_and_small_ones_do_not() -> None:
    like = torch.empty(0, dtype=torch.float32)
    large, small = (huge_pages.new_empty(like, size) for size in (1 << 22, 1 << 18))
    assert "hg" in flags(large)
    assert "hg" not in flags(small)
