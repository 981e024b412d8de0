"""Offloaded layers: the same pages, in a file that leaves nothing behind."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from keyhole import kernels
from keyhole.cache import pages as pages_module
from keyhole.cache import tiers
from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.cache.pages import PageCache
from keyhole.cache.tiers import FileStore, FileTier, PinnedTier, Tier
from keyhole.errors import CapacityError, ConfigError
from tests.cache import test_machine
from tests.disks import files_at_most
from tests.effort import examples

PLAIN = LayerLayout(num_kv_heads=2, key_dim=8, value_dim=6)
LATENT = LayerLayout(num_kv_heads=1, key_dim=10, value_dim=7, shared_values=True)
WINDOW = LayerLayout(num_kv_heads=2, key_dim=8, value_dim=8, window=5)
LAYERS = (PLAIN, LATENT, WINDOW)
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["file", "pinned"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    return FileTier(tmp_path) if request.param == "file" else PinnedTier()


def make_cache(
    *layers: LayerLayout, most: int = 64, dtype: torch.dtype = torch.float32
) -> PageCache:
    geometry = Geometry(
        layers=layers or LAYERS, num_query_heads=2, page_size=4, itemsize=dtype.itemsize
    )
    data = [{"low": (layer.num_kv_heads, 3)} for layer in geometry.layers]
    return PageCache(geometry, most, dtype=dtype, device=torch.device("cpu"), page_data=data)


def fill(cache: PageCache, seed: int = 0) -> None:
    random = torch.Generator().manual_seed(seed)
    for keys, values in zip(cache.keys, cache.values, strict=True):
        for tensor in (keys, values):
            tensor.copy_(torch.randn(tensor.shape, generator=random))
    for data in cache.data:
        data["low"].copy_(torch.randn(data["low"].shape, generator=random))


def contents(cache: PageCache, layer: int) -> list[torch.Tensor]:
    return [cache.keys[layer].clone(), cache.values[layer].clone()]


# Stores.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_store_grows_and_keeps_its_pages(tier: Tier, dtype: torch.dtype) -> None:
    store = tier.store(torch.empty(5, 2, 3, dtype=dtype))
    assert store.resized(0).shape == (0, 2, 3)
    first = store.resized(4)
    assert first.dtype == dtype
    assert first.shape == (4, 2, 3)
    first.copy_(torch.arange(24.0).view(4, 2, 3))
    second = store.resized(1000)
    assert second.shape == (1000, 2, 3)
    assert second[:4].flatten().tolist() == [*range(24)]
    second[999] = 7.0
    assert store.resized(3) is second
    assert second[999].eq(7.0).all()


def test_a_file_grows_without_being_copied(tmp_path: Path) -> None:
    store = FileTier(tmp_path).store(torch.empty(0, 3))
    first = store.resized(2)
    second = store.resized(5000)
    second[1] = 4.0
    assert first[1].eq(4.0).all()
    first[0] = 5.0
    assert second[0].eq(5.0).all()


@pytest.mark.slow
def test_a_file_ends_with_its_tensors(tmp_path: Path) -> None:
    maps, files = Path("/proc/self/maps"), Path("/proc/self/fd")
    if not maps.exists():
        pytest.skip("only Linux tells")

    def used() -> tuple[int, int]:
        gc.collect()
        mapped = sum(str(tmp_path) in line for line in maps.read_text().splitlines())
        return mapped, sum(
            str(tmp_path) in os.readlink(file) for file in files.iterdir() if file.is_symlink()
        )

    store = FileTier(tmp_path).store(torch.empty(0, 3))
    tensor = store.resized(2000)
    assert used()[0] == 2  # with and without read-ahead
    assert used()[1] >= 1
    view = tensor[1999]
    del store, tensor
    view.fill_(1.0)
    assert used()[0] == 1
    del view
    assert used() == (0, 0)


# Directories.


@pytest.mark.parametrize("name", ["missing", "file", "closed"])
def test_a_directory_that_cannot_be_used_is_an_error_that_names_it(
    tmp_path: Path, name: str
) -> None:
    place = tmp_path / name
    if name == "file":
        place.write_text("")
    if name == "closed":
        place.mkdir(mode=0o500)
        if os.geteuid() == 0:
            pytest.skip("root writes everywhere")
    with pytest.raises(ConfigError, match=rf"cannot be kept in .*{name}'.*can be written to"):
        FileTier(place)


def test_a_directory_without_permission_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    with pytest.raises(ConfigError, match="Permission denied"):
        FileTier(tmp_path)


def test_a_store_that_is_larger_than_the_disk_is_refused_before_it_is_written(
    tmp_path: Path,
) -> None:
    store = FileTier(tmp_path).store(torch.empty(0, 1 << 20))
    small = store.resized(1)
    small.fill_(3.0)
    with pytest.raises(CapacityError, match=r"do not fit into .*MiB left; name a directory"):
        store.resized(1 << 28)
    assert store.resized(1) is small
    assert store.resized(2)[0].eq(3.0).all()


def test_a_limit_met_while_space_is_set_aside_leaves_all_as_it_was(tmp_path: Path) -> None:
    store = FileTier(tmp_path).store(torch.empty(0, 1 << 10))
    small = store.resized(4)
    small.fill_(3.0)
    with files_at_most(1 << 16), pytest.raises(CapacityError, match="File too large"):
        store.resized(1 << 10)
    assert store.resized(4) is small
    assert store.resized(1 << 10)[:4].eq(3.0).all()


def test_a_disk_that_fills_up_half_way_gets_its_space_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(number: int, start: int, size: int) -> None:
        os.ftruncate(number, start + size // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    store = FileStore(tmp_path, torch.float32, (1 << 10,))
    small = store.resized(4)
    small.fill_(3.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full, raising=False)
        with pytest.raises(CapacityError, match="No space left"):
            store.resized(1 << 10)
    assert os.fstat(store._file.fileno()).st_size == small.nbytes
    assert store.resized(8)[:4].eq(3.0).all()


def test_a_file_system_that_cannot_set_space_aside_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported, raising=False)
    store = FileTier(tmp_path).store(torch.empty(0, 100))
    store.resized(2).fill_(1.0)
    assert store.resized(50)[:2].eq(1.0).all()
    monkeypatch.delattr(os, "posix_fallocate")
    assert store.resized(100)[:2].eq(1.0).all()


# Processes.

_PROCESS = """
import sys, torch
from keyhole.cache.tiers import FileTier
tensor = FileTier(sys.argv[1]).store(torch.empty(0, 1000)).resized(50)
tensor.fill_(float(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
print(bool(tensor.eq(float(sys.argv[2])).all()), flush=True)
"""


@contextmanager
def process(directory: Path, number: int) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    arguments = [sys.executable, "-c", _PROCESS, str(directory), str(number)]
    with subprocess.Popen(arguments, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        yield running
        running.kill()


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_and_the_others_go_on(tmp_path: Path) -> None:
    with process(tmp_path, 1) as living, process(tmp_path, 2) as dying:
        dying.send_signal(signal.SIGKILL)
        dying.wait()
        assert list(tmp_path.iterdir()) == []
        ours = FileTier(tmp_path).store(torch.empty(0, 1000)).resized(50)
        ours.fill_(3.0)
        assert living.stdin is not None
        assert living.stdout is not None
        living.stdin.write("go on\n")
        living.stdin.flush()
        assert living.stdout.readline() == "True\n"
        assert ours.eq(3.0).all()
        assert living.wait() == 0
    assert list(tmp_path.iterdir()) == []


# The cache.


def test_a_layer_that_moves_down_is_the_same(tier: Tier) -> None:
    cache = make_cache()
    pages = cache.allocate(5)
    assert pages is not None
    fill(cache)
    wanted = [contents(cache, layer) for layer in range(3)]
    low = [data["low"] for data in cache.data]
    for moved, layer in enumerate((2, 0, 1), start=1):
        cache.offload_layer(layer, tier)
        assert len(cache.offloaded_layers) == moved
        for i in range(3):
            assert all(map(torch.equal, contents(cache, i), wanted[i]))
    assert cache.offloaded_layers == (0, 1, 2)
    assert all(data["low"] is tensor for data, tensor in zip(cache.data, low, strict=True))
    assert cache.values[1].data_ptr() == cache.keys[1].data_ptr()
    cache.check_integrity([pages])


def test_bytes_move_from_the_upper_tier_to_the_lower(tier: Tier) -> None:
    cache = make_cache()
    cache.allocate(1)
    total = cache.capacity * cache.page_bytes
    assert (cache.resident_bytes, cache.offloaded_bytes) == (total, 0)
    cache.offload_layer(1, tier)
    assert cache.offloaded_bytes == cache.capacity * 4 * LATENT.numbers_per_token * 4
    assert cache.resident_bytes + cache.offloaded_bytes == total


def test_offloaded_pages_grow_and_are_copied(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "_FIRST_PAGES", 2)
    cache = make_cache()
    for layer in (1, 2):  # one before there are any pages
        cache.offload_layer(layer, tier)
    first = cache.allocate(2)
    assert first is not None
    fill(cache)
    cache.offload_layer(0, tier)
    wanted = [contents(cache, layer) for layer in range(3)]
    second = cache.allocate(9)
    assert second is not None
    assert cache.capacity == 16
    for layer in range(3):
        for tensor, old in zip(contents(cache, layer), wanted[layer], strict=True):
            assert torch.equal(tensor[:2], old)
    cache.share(first)
    copy = cache.writable(first[1])
    assert copy is not None
    for layer in range(3):
        tensors = cache.keys[layer], cache.values[layer]
        for tensor in tensors:
            assert torch.equal(tensor[copy], tensor[first[1]])
        for tensor in tensors:
            tensor[copy] = 0.0
            assert tensor[first[1]].any()
    cache.check_integrity([first, [first[0], copy], second])


def test_kernels_read_and_write_an_offloaded_layer(tmp_path: Path) -> None:
    """All but elastic loading: prompts, windows and dense layers read the mapped file itself."""
    above, below = make_cache(), make_cache()
    pages, length = torch.tensor([3, 0, 2]), 10
    query = torch.randn(1, 2, 8)
    found = []
    for cache in (above, below):
        cache.allocate(4)
        fill(cache)
        if cache is below:
            cache.offload_layer(0, FileTier(tmp_path))
        keys, values = cache.keys[0], cache.values[0]
        new = torch.ones(1, 2, 8), torch.ones(1, 2, 6)
        kernels.append(keys, values, *new, torch.tensor([2 * 4 + 1]))
        paged = keys, values, pages[None].int(), torch.tensor([length], dtype=torch.int32)
        found.append(
            (
                kernels.attend((query, *paged), scale=1.0),
                kernels.attend((query, *paged), scale=1.0, window=5),
                kernels.prefill(query.expand(3, -1, -1), keys, values, pages, 7, scale=1.0),
            )
        )
    assert all(map(torch.equal, *found))


def test_the_host_waits_for_a_gpu_before_it_writes_offloaded_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels write new keys to it without synchronisation."""
    cache = make_cache(PLAIN, PLAIN, most=64 * 4)
    pages = cache.allocate(3)
    assert pages is not None
    waited: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(cache, "device", torch.device("cuda"))
    cache.content(pages)
    assert waited == []  # everything is resident
    cache.offload_layer(0, PinnedTier())
    for touches in (
        lambda: cache.content(pages),
        lambda: cache.copy(pages[:1], pages[1:2]),
        lambda: cache.write(pages[:1], [tensor[:1].clone() for tensor in cache._pages]),
        lambda: cache.share(pages[:1]) or cache.writable(pages[0]),
        lambda: cache.allocate(70),
    ):
        waited.clear()
        touches()
        assert waited, touches
    assert cache.capacity > 64


def test_a_full_disk_in_growth_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "_FIRST_PAGES", 16)
    cache = make_cache()
    first = cache.allocate(10)
    assert first is not None
    fill(cache)
    cache.offload_layer(1, FileTier(tmp_path))
    wanted = [contents(cache, layer) for layer in range(3)]
    # Layer 0 has grown by then.
    with files_at_most(1 << 12), pytest.raises(CapacityError, match="name a directory"):
        cache.allocate(10)
    assert cache.available == 54
    cache.check_integrity([first])
    cache.offload_layer(0, FileTier(tmp_path))
    second = cache.allocate(54)
    assert second is not None
    for layer in range(3):
        for tensor, old in zip(contents(cache, layer), wanted[layer], strict=True):
            assert torch.equal(tensor[:16], old)
    cache.check_integrity([first, second])


def test_a_full_disk_in_a_move_changes_nothing(tmp_path: Path) -> None:
    cache = make_cache()
    cache.allocate(1)
    fill(cache)
    wanted = contents(cache, 0)
    with files_at_most(1 << 10), pytest.raises(CapacityError):
        cache.offload_layer(0, FileTier(tmp_path))
    assert cache.offloaded_layers == ()
    assert all(map(torch.equal, contents(cache, 0), wanted))


def test_resident_memory_is_freed_while_a_layer_is_offloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a limit on memory, the moment of moving must not be the one that needs most."""
    monkeypatch.setattr(tiers, "BLOCK_BYTES", 1 << 20)
    upper = torch.arange(3 << 20, dtype=torch.float32).view(-1, 1 << 10)
    wanted, lower = upper.clone(), torch.empty_like(upper)
    neighbour = torch.ones(100)
    tiers.move(upper, lower)
    assert torch.equal(lower, wanted)
    assert neighbour.eq(1).all()
    if sys.platform == "linux":
        assert not upper[8:-8].any()


class LowerMachine(test_machine.Machine):
    """Whatever is done to the cache, also with layers that move down and up in between."""

    @precondition(lambda self: len(self.cache.offloaded_layers) < 3)
    @rule(layer=st.integers(0, 2), pinned=st.booleans())
    def offload_layer(self, layer: int, pinned: bool) -> None:
        if layer not in self.cache.offloaded_layers:
            tier = PinnedTier() if pinned else FileTier(tempfile.gettempdir())
            self.cache.offload_layer(layer, tier)

    @precondition(lambda self: self.cache.offloaded_layers)
    @rule(number=st.integers(0, 2))
    def make_resident(self, number: int) -> None:
        below = self.cache.offloaded_layers
        self.cache.make_resident(below[number % len(below)])

    @rule(more=st.integers(0, 6), cuts=st.booleans())
    def pack(self, more: int, cuts: bool) -> None:
        """Pages in use become the first ones, and the tensors as small as that, or a bit larger."""
        numbers = self.cache.pack()
        assert sorted(self.index.held()) == sorted(page for page, _ in self.known.values())
        count = len(self.content)
        assert all(page >= count > new for page, new in numbers.items())
        self.index.renumber(numbers)
        self.held = {name: [numbers.get(p, p) for p in ps] for name, ps in self.held.items()}
        self.content = {numbers.get(p, p): number for p, number in self.content.items()}
        self.known = {s: (numbers.get(p, p), exact) for s, (p, exact) in self.known.items()}
        assert set(self.content) == set(range(count))
        if cuts:
            size = min(self.cache.capacity, count + more)
            self.cache.cut(size)
            assert self.cache.capacity == size
            upper = [x for x, keys in enumerate(self.cache.keys) if len(keys) > size]
            assert set(upper) <= set(self.cache.offloaded_layers)


TestLowerMachine = LowerMachine.TestCase
TestLowerMachine.settings = settings(examples(60), stateful_step_count=40, deadline=None)
