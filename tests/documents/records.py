"""Records of random numbers, and stores to put them into."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from torch import Tensor

from keyhole.documents.record import STATISTICS, DocumentRecord, HeadRecord, LayerRecord
from keyhole.documents.store import DocumentStore, StoredDocument

MODEL: dict[str, str | int | float] = {
    "model": "tiny",
    "revision": "main",
    "dtype": "bfloat16",
    "rope_theta": 10000.0,
    "tokenizer": "4f2a",
}


def make_record(
    seed: int = 0,
    n: int = 150,
    *,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 64,
    num_layers: int = 3,
    heads: int = 2,
    dims: tuple[int, int] = (8, 6),
    values: bool = True,
) -> DocumentRecord:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    N = -(-n // block_size)
    first = torch.arange(N) * block_size
    layers = [
        LayerRecord(
            keys=normal(n, heads, dims[0]).to(dtype),
            values=normal(n, heads, dims[1]).to(dtype) if values else None,
            block_keys=normal(N, heads, dims[0]),
            local_queries=normal(N, 2 * heads, dims[0]),
            representatives=first + (n - 1 - first).clamp(max=block_size - 1),
            representative_keys=normal(N, heads, dims[0]).to(dtype),
            alpha=normal(N),
            received=normal(N).abs(),
            extreme_keys=normal(N, 3, heads, dims[0]).to(dtype),
        )
        for _ in range(num_layers)
    ]
    return DocumentRecord(torch.randint(0, 999, (n,), generator=random), block_size, layers)


def same(stored: StoredDocument, record: DocumentRecord) -> bool:
    """Whether everything in the stored document is bit-equal to `record`."""
    pairs = [(stored.token_ids, record.token_ids)]
    for number, layer in enumerate(record.layers):
        keys, values = stored.rows(number, 0, stored.length)
        pairs += [(keys, layer.keys)]
        pairs += [(values, layer.values)] if values is not None and layer.values is not None else []
        assert (values is None) == (layer.values is None)
        small = stored.statistics(number)
        pairs += [(getattr(small, name), getattr(layer, name)) for name in STATISTICS]
    extremes = [layer.extreme_keys for layer in record.layers]
    pairs += zip(stored.extreme_keys(), extremes, strict=True)
    sizes = (stored.block_size, stored.num_layers) == (record.block_size, len(record.layers))
    return sizes and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str | Path]:
    if request.param == "folder":
        yield tmp_path / "documents of mine"
        return
    url = f"memory://{uuid.uuid4().hex}/documents"
    yield url
    system, path = fsspec.url_to_fs(url)
    if system.exists(path):
        system.rm(path, recursive=True)


@pytest.fixture
def store(place: str | Path) -> DocumentStore:
    return DocumentStore(place, MODEL)


def make_head(seed: int, n: int = 150, dtype: torch.dtype = torch.bfloat16) -> HeadRecord:
    random = torch.Generator().manual_seed(seed)
    keys, last = torch.randn(n, 2, 8, generator=random), torch.randn(24, generator=random)
    return HeadRecord(keys.to(dtype), last.to(dtype))
