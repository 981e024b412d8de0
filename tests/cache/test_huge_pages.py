"""Large tensors: huge pages are requested for them, and they grow in place."""

from __future__ import annotations

import itertools
import mmap
import re
import subprocess
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
    reason="huge pages are requested only on Linux",
)
def test_large_tensors_ask_for_huge_pages_and_small_ones_do_not() -> None:
    like = torch.empty(0, dtype=torch.float32)
    # With addresses of their own: what torch allocates may lie where a large tensor lay before.
    large, small = (huge_pages.new_empty(like, size, most=size) for size in (1 << 22, 1 << 18))
    assert "hg" in flags(large)
    assert "hg" not in flags(small)


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="address space is reserved on Linux")


@LINUX
def test_tensors_of_one_shape_enter_huge_pages_at_different_rows() -> None:
    """All layers entered one in the same step: 28 ms where a step takes 11."""
    huge, like = 1 << 21, torch.empty(0)
    layers = [huge_pages.new_empty(like, 2, 1 << 12, most=1 << 10) for _ in range(8)]
    places = sorted(layer.data_ptr() % huge for layer in layers)
    gaps = [b - a for a, b in itertools.pairwise([*places, places[0] + huge])]
    assert min(gaps) > huge // 32


@LINUX
def test_a_tensor_grows_in_place_and_holds_only_what_is_written() -> None:
    gib = 1 << 30
    before = resident()
    tensor = huge_pages.new_empty(torch.empty(0), 2, 1 << 18, most=64 << 10)  # 64 GiB of addresses
    tensor.fill_(1)
    larger = huge_pages.enlarged(tensor, 32 << 10, 64 << 10)
    assert larger.data_ptr() == tensor.data_ptr()
    assert larger.shape == (32 << 10, 1 << 18)
    larger[-1] = 2
    assert (larger[:2] == 1).all()
    assert larger.nbytes == 32 * gib
    assert resident() - before < gib // 8


@pytest.mark.parametrize("most", [0, 3, 5])
def test_beyond_what_was_reserved_growth_copies(most: int) -> None:
    tensor = huge_pages.new_empty(torch.empty(0, dtype=torch.bfloat16), 3, 7, most=most).fill_(1)
    larger = huge_pages.enlarged(tensor, 6, 9)
    assert larger.data_ptr() != tensor.data_ptr()
    assert larger.shape == (6, 7)
    assert (larger[:3] == 1).all()
    assert huge_pages.enlarged(larger, 4, 9) is larger


@LINUX
def test_a_tensor_without_numbers_grows() -> None:
    tensor = huge_pages.enlarged(torch.empty(0, 3, 0), 4, 8)
    assert tensor.shape == (4, 3, 0)
    assert huge_pages.enlarged(tensor, 8, 8).shape == (8, 3, 0)


@LINUX
@pytest.mark.parametrize("counted", ["limit", "overcommit"])
def test_no_address_space_is_reserved_where_it_counts_as_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counted: str
) -> None:
    if counted == "limit":
        monkeypatch.setattr("resource.getrlimit", lambda _: (1 << 33, 1 << 33))
    else:
        (tmp_path / "overcommit").write_text("2\n")
        monkeypatch.setattr(huge_pages, "_OVERCOMMIT", tmp_path / "overcommit")
    tensor = huge_pages.new_empty(torch.empty(0), 2, 5, most=100)
    assert tensor.untyped_storage().nbytes() == 2 * 5 * 4


@LINUX
def test_more_than_there_are_addresses_is_not_reserved() -> None:
    tensor = huge_pages.new_empty(torch.empty(0), 2, 5, most=1 << 56)
    assert tensor.untyped_storage().nbytes() == 2 * 5 * 4


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.slow
@LINUX
def test_a_limit_on_private_memory_counts_what_a_tensor_is_not_what_it_may_become() -> None:
    """Reserved addresses used the limit up: later tensors were refused, or grew by copying."""
    program = """
import resource
from pathlib import Path
import torch
from keyhole.cache import huge_pages
text = Path("/proc/self/status").read_text()
data = 1024 * int(text[text.index("VmData:"):].split()[1])
limit = data + (64 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
rows = 1 << 18  # bytes
tensor = huge_pages.new_empty(torch.empty(0), 2, rows // 4, most=1 << 16)
larger = huge_pages.enlarged(tensor.fill_(1), 128, 1 << 16)
assert larger.data_ptr() == tensor.data_ptr() and larger[:2].eq(1).all()
larger.fill_(2)
try:
    huge_pages.enlarged(larger, 512, 1 << 16)
except MemoryError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused\n"
