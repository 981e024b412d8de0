"""Stored documents: what is added is found again, by name and bit for bit."""

from __future__ import annotations

import dataclasses
import hashlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from keyhole.cache.documents import DocumentStore, RecordError, StoredDocument
from keyhole.cache.record import STATISTICS, DocumentRecord, HeadRecord, LayerRecord
from keyhole.errors import ConfigError, NumericalError, UnknownNameError

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
    extremes: bool = True,
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
            block_queries=normal(N, 2 * heads, dims[0]),
            representatives=first + (n - 1 - first).clamp(max=block_size - 1),
            representative_keys=normal(N, heads, dims[0]).to(dtype),
            alpha=normal(N),
            received=normal(N).abs(),
            extreme_keys=normal(N, 3, heads, dims[0]).to(dtype) if extremes else None,
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
    extremes = [x for x in (layer.extreme_keys for layer in record.layers) if x is not None]
    assert stored.has_extremes == bool(extremes)
    pairs += zip(stored.extreme_keys(), extremes, strict=True) if extremes else []
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


# What is added is there.


def test_what_is_added_is_there_after_a_restart(place: str | Path, store: DocumentStore) -> None:
    before = time.time()
    record = make_record()
    info = store.add("handbook", "The text.\r\n\0 Ünïcode 🙂", record)
    assert (info.name, info.tokens, info.block_size) == ("handbook", 150, 64)
    assert info.digest == hashlib.sha256("The text.\r\n\0 Ünïcode 🙂".encode()).hexdigest()
    assert before <= info.created <= time.time()
    assert (info.hits, info.pinned, info.encoded) == (0, False, True)
    assert info.records == (store.model,)
    for start in (False, True):
        again = DocumentStore(place, MODEL) if start else store
        assert again.source("handbook") == "The text.\r\n\0 Ünïcode 🙂"
        assert [x.name for x in again.list()] == ["handbook"]
        with again.open("handbook") as stored:
            assert same(stored, record)
            assert stored.length == 150
        assert again.verify() == []
    info = store.info("handbook")
    assert info.hits == 2
    assert info.last_used > info.created


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("values", [True, False])
def test_every_dtype_and_layers_without_values(
    store: DocumentStore, dtype: torch.dtype, values: bool
) -> None:
    record = make_record(dtype=dtype, values=values, n=129, dims=(5, 3), heads=3)
    store.add("x", "text", record)
    with store.open("x") as stored:
        assert same(stored, record)


@settings(max_examples=15)
@given(
    n=st.sampled_from([1, 2, 63, 64, 65, 128, 200]),
    block_size=st.sampled_from([1, 64, 500]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_rows_are_rows(
    n: int, block_size: int, dtype: torch.dtype, cut: tuple[float, float]
) -> None:
    store = DocumentStore("memory://rows", MODEL)
    record = make_record(n=n, block_size=block_size, dtype=dtype, num_layers=2)
    store.add("x", "text", record, overwrite=True)
    start, stop = sorted(int(share * n) for share in cut)
    with store.open("x") as stored:
        keys, values = stored.rows(1, start, stop)
        assert torch.equal(keys, record.layers[1].keys[start:stop])
        assert values is not None
        assert torch.equal(values, record.layers[1].values[start:stop])


def test_token_ids_are_a_source(store: DocumentStore) -> None:
    store.add("ids", [5, 0, 2**40], make_record())
    store.add("text", "[5,0,1099511627776]", make_record(1))
    assert store.source("ids") == [5, 0, 2**40]
    assert store.source("text") == "[5,0,1099511627776]"
    assert store.info("ids").digest != store.info("text").digest
    assert store.verify() == []


def test_any_program_that_reads_safetensors_reads_a_record(tmp_path: Path) -> None:
    record = make_record()
    DocumentStore(tmp_path, MODEL).add("x", "text", record)
    [file] = (tmp_path / "records").iterdir()
    with safe_open(file, framework="pt") as tensors:
        assert tensors.metadata()["name"] == "x"
        assert torch.equal(tensors.get_tensor("token_ids"), record.token_ids)
        assert len(tensors.keys()) == 1 + 9 * len(record.layers)
        for number, layer in enumerate(record.layers):
            for field in dataclasses.fields(layer):
                found = tensors.get_tensor(f"layers.{number}.{field.name}")
                assert torch.equal(found, getattr(layer, field.name))


def test_a_record_of_an_older_version_opens_and_is_written_anew_when_added_again(
    store: DocumentStore,
) -> None:
    old = make_record(extremes=False)
    store.add("x", "text", old)
    with store.open("x") as stored:
        assert same(stored, old)
        with pytest.raises(ConfigError, match="extreme keys of document 'x' must be stored"):
            stored.extreme_keys()
    [problem] = store.verify()
    assert (problem.kind, problem.what) == ("missing", "its record has no extreme keys")
    assert store.stored("x", "text") is None
    new = make_record()
    store.add("x", "text", new)
    with store.open("x") as stored:
        assert same(stored, new)
    assert store.verify() == []


def test_a_text_is_readable_without_a_program(tmp_path: Path) -> None:
    DocumentStore(tmp_path, MODEL).add("x", "one\ntwo\n", make_record())
    [file] = (tmp_path / "documents").iterdir()
    assert file.read_text().split("\n", 1)[1] == "one\ntwo\n"


# Reading is lazy and counted.


def test_only_the_rows_asked_for_are_read(store: DocumentStore) -> None:
    info = store.add("x", "text", make_record(n=2000, heads=4, dims=(64, 32)))
    with store.open("x") as stored:
        opened = stored.bytes_read
        assert opened < info.size_bytes / 5
        stored.statistics(2)
        stored.rows(0, 7, 7)
        assert stored.bytes_read == opened
        stored.rows(1, 64, 128)
        assert stored.bytes_read == opened + 64 * 4 * (64 + 32) * 2
        stored.extreme_keys()
        opened += 3 * 32 * 3 * 4 * 64 * 2  # 3 keys of each of 32 blocks, in 3 layers
        assert stored.bytes_read == opened + 64 * 4 * (64 + 32) * 2
        stored.rows(2, 0, 2000)
        assert stored.bytes_read == opened + (64 + 2000) * 4 * (64 + 32) * 2


def test_tensors_stay_after_closing(store: DocumentStore) -> None:
    record = make_record()
    store.add("x", "text", record)
    stored = store.open("x")
    keys, _ = stored.rows(0, 3, 90)
    small = stored.statistics(1)
    stored.close()
    stored.close()
    assert stored.closed
    store.remove("x")
    assert torch.equal(keys, record.layers[0].keys[3:90])
    assert torch.equal(small.alpha, record.layers[1].alpha)
    with pytest.raises(ConfigError, match="closed of document 'x' must be open"):
        stored.rows(0, 0, 1)


@pytest.mark.parametrize(
    ("layer", "start", "stop"), [(3, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 151), (0, 5, 4)]
)
def test_rows_that_are_not_there(store: DocumentStore, layer: int, start: int, stop: int) -> None:
    store.add("x", "text", make_record())
    with store.open("x") as stored, pytest.raises(ConfigError, match="of document 'x' must be"):
        stored.rows(layer, start, stop)


def test_writing_into_what_was_read_changes_no_file(store: DocumentStore) -> None:
    record = make_record()
    store.add("x", "text", record)
    with store.open("x") as stored:
        stored.rows(0, 0, 10)[0].fill_(7)
        stored.token_ids.zero_()
    with store.open("x") as stored:
        assert same(stored, record)


# Names.


def test_the_same_text_again_changes_nothing(store: DocumentStore) -> None:
    assert store.stored("x", "text") is None
    first = store.add("x", "text", make_record(0))
    assert store.stored("x", "text") == first
    assert store.add("x", "text", make_record(1)) == first
    with store.open("x") as stored:
        assert same(stored, make_record(0))
    with store.open("x"):
        pass
    assert store.add("x", "text", make_record(1)).hits == 2


def test_another_text_under_a_name_is_refused_unless_overwritten(store: DocumentStore) -> None:
    store.add("x", "text", make_record(0), pinned=True)
    with pytest.raises(ConfigError, match=r"'x' is stored with another text .* overwrite=True"):
        store.add("x", "text two", make_record(1))
    with pytest.raises(ConfigError, match="'x' is stored with another text"):
        store.stored("x", "text two")
    assert store.stored("x", "text two", overwrite=True) is None
    assert store.source("x") == "text"
    info = store.add("x", "text two", make_record(1), overwrite=True)
    assert info.pinned
    assert info == store.info("x")
    assert store.source("x") == "text two"
    with store.open("x") as stored:
        assert same(stored, make_record(1))
    assert store.verify() == []
    assert len(store._catalogue.place.files("records")) == 1


def test_overwriting_with_the_same_text_puts_the_record_anew(store: DocumentStore) -> None:
    store.add("x", "text", make_record(0))
    store.add("x", "text", make_record(1), overwrite=True)
    with store.open("x") as stored:
        assert same(stored, make_record(1))


def test_names_with_one_text_share_a_record(store: DocumentStore) -> None:
    store.add("a", "text", make_record())
    assert store.stored("b", "text") is None
    store.add("b", "text", make_record())
    assert len(store._catalogue.place.files("records")) == 1
    store.remove("a")
    with store.open("b") as stored:
        assert same(stored, make_record())
    store.add("c", "text", make_record())
    store.add("b", "text two", make_record(1), overwrite=True)
    with store.open("c") as stored:
        assert same(stored, make_record())
    assert store.verify() == []
    store.remove("b")
    store.remove("c")
    assert store._catalogue.place.files("records") == {}


def test_removed_documents_are_gone(place: str | Path, store: DocumentStore) -> None:
    store.add("a", "one", make_record())
    store.add("b", "two", make_record())
    store.remove("a")
    for start in (False, True):
        again = DocumentStore(place, MODEL) if start else store
        assert [info.name for info in again.list()] == ["b"]
        for call in (again.info, again.open, again.source, again.remove, again.pin):
            with pytest.raises(UnknownNameError, match="unknown document 'a'"):
                call("a")
    assert len(store._catalogue.place.files("documents")) == 1
    assert len(store._catalogue.place.files("records")) == 1


def test_the_nearest_name_is_offered(store: DocumentStore) -> None:
    store.add("handbook", "text", make_record())
    with pytest.raises(UnknownNameError, match="unknown document 'hanbook'; did you mean 'handb"):
        store.open("hanbook")
    with pytest.raises(UnknownNameError, match="unknown document 'hanbook'"):
        store.verify(["handbook", "hanbook"])


def test_of_many_names_the_nearest_are_told(store: DocumentStore) -> None:
    for number in range(14):
        store.add(f"chapter {number}", "text", make_record())
    with pytest.raises(UnknownNameError) as raised:
        store.open("chapter 77")
    assert "unknown document 'chapter 77'; did you mean 'chapter 7'? (known: " in str(raised.value)
    assert "… and 2 others)" in str(raised.value)
    with pytest.raises(UnknownNameError, match=r"\(known: chapter 0, … and 13 others\)$"):
        store.open("zzz")


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "a\0", "\x1b[1m", "x" * 201, "\ud800", 7, None])
def test_names_that_cannot_be(store: DocumentStore, name: str) -> None:
    with pytest.raises(ConfigError, match=r"document name .* must be printable"):
        store.add(name, "text", make_record())
    assert store.list() == []


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "a/b", ".", "con", "ÄÖ 文書 🙂", "x" * 200, "a'; DROP TABLE x", "%s"],
)
def test_any_other_name_can_be(place: str | Path, store: DocumentStore, name: str) -> None:
    store.add(name, "text", make_record())
    again = DocumentStore(place, MODEL)
    assert [info.name for info in again.list()] == [name]
    assert again.source(name) == "text"
    again.remove(name)
    assert again.list() == []


# Pins, models.


def test_a_pin_survives_a_restart(place: str | Path, store: DocumentStore) -> None:
    assert store.add("a", "one", make_record(), pinned=True).pinned
    assert not store.add("b", "two", make_record()).pinned
    assert store.add("b", "two", make_record(), pinned=True).pinned
    assert store.add("b", "two", make_record()).pinned
    store.pin("a", False)
    again = DocumentStore(place, MODEL)
    assert [info.pinned for info in again.list()] == [False, True]
    assert again.source("a") == "one"
    assert again.verify() == []


def test_records_of_several_models_live_side_by_side(place: str | Path) -> None:
    other = MODEL | {"dtype": "float32", "tokenizer": "11"}
    one, two = DocumentStore(place, MODEL), DocumentStore(place, other)
    record, wide = make_record(n=150), make_record(n=70, dtype=torch.float32, block_size=32)
    one.add("x", "text", record)
    assert not two.info("x").encoded
    assert two.stored("x", "text") is None
    two.add("x", "text", wide)
    for store in (one, two, DocumentStore(place, MODEL), DocumentStore(place, other)):
        mine = record if store.model == one.model else wide
        info = store.info("x")
        assert info.records == tuple(sorted([one.model, two.model]))
        assert (info.tokens, info.block_size) == (len(mine.token_ids), mine.block_size)
        with store.open("x") as stored:
            assert same(stored, mine)
        assert store.verify() == []


def test_what_a_model_counts_is_known_after_the_index_is_lost(tmp_path: Path) -> None:
    one, two = (DocumentStore(tmp_path, MODEL | {"tokenizer": name}) for name in ("a", "b"))
    one.add("x", "text", make_record(n=150))
    two.add("x", "text", make_record(n=70, block_size=32))
    (tmp_path / "index.sqlite").unlink()
    infos = [DocumentStore(tmp_path, store.fingerprint).info("x") for store in (one, two)]
    assert [(info.tokens, info.block_size) for info in infos] == [(150, 64), (70, 32)]


def test_a_foreign_record_is_named_by_the_field_that_differs(store: DocumentStore) -> None:
    place = store._catalogue.place.url
    store.add("x", "text", make_record())
    other = DocumentStore(place, MODEL | {"dtype": "float32", "rope_factor": 4})
    with pytest.raises(RecordError) as raised:
        other.open("x")
    assert raised.value.kind == "foreign"
    assert str(raised.value) == (
        "document 'x': its record is another model's: dtype 'bfloat16', no rope_factor; right "
        "would be dtype 'float32', rope_factor 4; documents.verify(repair=True), or adding the "
        "same text, encodes it again"
    )
    [problem] = other.verify()
    assert (problem.name, problem.kind) == ("x", "foreign")
    assert "dtype 'bfloat16'" in problem.what
    assert "dtype 'float32'" in problem.right
    assert store.verify() == []
    other.add("x", "text", make_record(dtype=torch.float32))
    assert other.verify() == store.verify() == []


@pytest.mark.parametrize(
    "fingerprint", [{}, {"a": None}, {"a": [1]}, {1: "a"}, {"a": float("nan")}]
)
def test_fingerprints_that_cannot_be(tmp_path: Path, fingerprint: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="fingerprint"):
        DocumentStore(tmp_path, fingerprint)


# Wrong input.


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("", "has no text"),
        ([], "has no text"),
        ("a\ud800", "no Unicode text: surrogates not allowed at character 1"),
        (b"bytes", "is bytes; decode"),
        ([1, -1], "token id -1"),
        ([1, "a"], "token id 'a'"),
        ([True], "token id True"),
    ],
)
def test_sources_that_cannot_be(store: DocumentStore, source: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        store.add("x", source, make_record())
    assert store.list() == []


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("keys", (149, 2, 8)),
        ("keys", (150, 16)),
        ("values", (150, 1, 6)),
        ("block_keys", (2, 2, 8)),
        ("block_queries", (3, 4, 7)),
        ("representative_keys", (3, 2, 7)),
        ("extreme_keys", (3, 3, 2, 7)),
        ("extreme_keys", (2, 3, 2, 8)),
        ("extreme_keys", (3,)),
        ("alpha", (3, 1)),
        ("received", (4,)),
    ],
)
def test_a_record_whose_shapes_disagree_is_refused(
    store: DocumentStore, name: str, shape: tuple[int, ...]
) -> None:
    record = make_record()
    dtype = getattr(record.layers[1], name).dtype
    setattr(record.layers[1], name, torch.zeros(shape, dtype=dtype))
    with pytest.raises(ConfigError, match=f"layer 1: {name}"):
        store.add("x", "text", record)
    assert store.list() == []


@pytest.mark.parametrize("name", ["keys", "values", "block_keys", "received"])
def test_a_record_of_another_dtype_is_refused(store: DocumentStore, name: str) -> None:
    record = make_record()
    setattr(record.layers[2], name, getattr(record.layers[2], name).double())
    with pytest.raises(ConfigError, match=f"layer 2: {name} .* torch.float64"):
        store.add("x", "text", record)


def test_representatives_stand_in_their_block(store: DocumentStore) -> None:
    for wrong in ([0, 64, 150], [0, 0, 128], [-1, 64, 128]):
        record = make_record()
        record.layers[0].representatives = torch.tensor(wrong)
        with pytest.raises(ConfigError, match="layer 0: representatives"):
            store.add("x", "text", record)


def test_other_records_that_cannot_be(store: DocumentStore) -> None:
    whole = make_record()
    nothing = torch.empty(0, dtype=torch.int64)
    for record, error in (
        (DocumentRecord(whole.token_ids, 64, []), "layers"),
        (DocumentRecord(whole.token_ids, 0, whole.layers), "block_size 0"),
        (DocumentRecord(nothing, 64, whole.layers), "token_ids"),
        (DocumentRecord(whole.token_ids.int(), 64, whole.layers), "token_ids"),
    ):
        with pytest.raises(ConfigError, match=error):
            store.add("x", "text", record)


def make_head(seed: int, n: int = 150, dtype: torch.dtype = torch.bfloat16) -> HeadRecord:
    random = torch.Generator().manual_seed(seed)
    keys, last = torch.randn(n, 2, 8, generator=random), torch.randn(24, generator=random)
    return HeadRecord(keys.to(dtype), last.to(dtype))


def test_keys_of_retrieval_heads_lie_beside_the_layers(store: DocumentStore) -> None:
    """Rows are read alone; a record without heads, as all were once, has none."""
    store.add("plain", "a text", make_record())
    with store.open("plain") as stored:
        assert stored.heads == frozenset()
    record = make_record()
    record.heads = {"3a": make_head(1), "07": make_head(2)}
    store.add("x", "text", record)
    with store.open("x") as stored:
        assert stored.heads == {"3a", "07"}
        before = stored.bytes_read
        for name, head in record.heads.items():
            assert torch.equal(stored.head_keys(name, 3, 9), head.keys[3:9])
            assert torch.equal(stored.head_last(name), head.last)
        # Of a place far away a small record is read at once.
        assert stored.bytes_read <= before + 2 * 2 * (6 * 2 * 8 + 24)
        assert same(stored, record)
        whole = stored.head_record("07")
        assert torch.equal(whole.keys, record.heads["07"].keys)
        with pytest.raises(ConfigError, match="rows 3 to 151"):
            stored.head_keys("07", 3, 151)
    assert store.verify() == []


@pytest.mark.parametrize(
    ("head", "error"),
    [
        (make_head(1, 149), "head 3a: keys"),
        (make_head(1, dtype=torch.float32), "head 3a: keys .* torch.float32"),
        (HeadRecord(make_head(1).keys[:, 0], make_head(1).last), "head 3a: keys"),
        (HeadRecord(make_head(1).keys, make_head(1).last[None]), "head 3a: last"),
    ],
)
def test_keys_of_a_head_that_cannot_be(store: DocumentStore, head: HeadRecord, error: str) -> None:
    record = make_record()
    record.heads = {"3a": head}
    with pytest.raises(ConfigError, match=error):
        store.add("x", "text", record)
    record.heads["3a"] = make_head(1)
    record.heads["3a"].keys[5, 1, 2] = float("nan")
    with pytest.raises(NumericalError, match="head 3a: keys hold 1 NaN"):
        store.add("x", "text", record)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["keys", "values", "block_queries", "representative_keys"])
def test_numbers_that_are_none_are_refused(store: DocumentStore, name: str, value: float) -> None:
    record = make_record()
    getattr(record.layers[2], name)[2, 1, 3] = value
    with pytest.raises(NumericalError, match=f"layer 2: {name} hold 1 NaN"):
        store.add("x", "text", record)
    assert store.list() == []


def test_the_decay_of_a_block_that_nobody_looks_at_may_be_infinite(store: DocumentStore) -> None:
    record = make_record()
    record.layers[0].alpha[1] = float("inf")
    store.add("x", "text", record)
    with store.open("x") as stored:
        assert stored.statistics(0).alpha[1] == float("inf")
    record.layers[0].alpha[1] = float("nan")
    with pytest.raises(NumericalError, match="layer 0: alpha"):
        store.add("y", "text", record)


def test_tensors_need_not_be_contiguous(store: DocumentStore) -> None:
    record, turned = make_record(), make_record()
    for layer in turned.layers:
        layer.keys = layer.keys.transpose(0, 1).contiguous().transpose(0, 1)
        layer.alpha = torch.stack([layer.alpha, layer.alpha], 1)[:, 0]
        layer.block_keys.requires_grad_()
    assert not turned.layers[0].keys.is_contiguous()
    store.add("x", "text", turned)
    with store.open("x") as stored:
        assert same(stored, record)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "1GB"])
def test_limits_that_cannot_be(tmp_path: Path, limit: int) -> None:
    with pytest.raises(ConfigError, match="limit_bytes"):
        DocumentStore(tmp_path, MODEL, limit_bytes=limit)
