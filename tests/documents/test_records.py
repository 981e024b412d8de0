"""Records: what they hold is kept bit for bit, and what cannot be one is refused."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from keyhole.documents import reader as reader_module
from keyhole.documents import record as record_module
from keyhole.documents import storage as storage_module
from keyhole.documents.record import DocumentRecord, HeadRecord
from keyhole.documents.store import DocumentStore, RecordError
from keyhole.errors import ConfigError, NumericalError, UnknownNameError
from tests.documents.records import MODEL, make_head, make_record, place, same, store, user_cache

__all__ = ["place", "store", "user_cache"]


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


def test_any_program_that_reads_safetensors_reads_a_record(tmp_path: Path) -> None:
    record = make_record()
    DocumentStore(tmp_path, MODEL).add("x", "text", record)
    [file] = (tmp_path / "records").iterdir()
    with safe_open(file, framework="pt") as tensors:
        assert tensors.metadata()["name"] == "x"
        assert torch.equal(tensors.get_tensor("token_ids"), record.token_ids)
        assert len(tensors.keys()) == 1 + (9 + 2) * len(record.layers)
        for number, layer in enumerate(record.layers):
            for field in dataclasses.fields(layer):
                found = tensors.get_tensor(f"layers.{number}.{field.name}")
                assert torch.equal(found, getattr(layer, field.name))


def test_a_record_of_an_older_version_is_refused_and_written_anew_when_added_again(
    store: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(record_module, "_STATISTICS", "2")
        store.add("x", "text", make_record())
    with pytest.raises(RecordError, match=r"'x': its record has an older format; .*repair=True"):
        store.open("x")
    [problem] = store.verify()
    assert (problem.kind, problem.what) == ("missing", "its record has an older format")
    assert store.stored("x", "text") is None
    new = make_record()
    store.add("x", "text", new)
    with store.open("x") as stored:
        assert same(stored, new)
    assert store.verify() == []


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


def test_a_foreign_record_is_named_by_the_field_that_differs(store: DocumentStore) -> None:
    place = store._catalogue.place.url
    store.add("x", "text", make_record())
    other = DocumentStore(place, MODEL | {"dtype": "float32", "rope_factor": 4})
    with pytest.raises(RecordError) as raised:
        other.open("x")
    assert raised.value.kind == "foreign"
    assert str(raised.value) == (
        "document 'x': its record was made by another model: dtype 'bfloat16', no rope_factor; "
        "expected dtype 'float32', rope_factor 4; to encode it again, add the same text, or run "
        "documents.verify(['x'], repair=True) or `keyhole documents verify x --repair`"
    )
    [problem] = other.verify()
    assert (problem.name, problem.kind) == ("x", "foreign")
    assert "dtype 'bfloat16'" in problem.what
    assert "dtype 'float32'" in problem.right
    assert store.verify() == []
    other.add("x", "text", make_record(dtype=torch.float32))
    assert other.verify() == store.verify() == []


# Wrong input.


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("", "the document is empty"),
        ([], "the document is empty"),
        ("a\ud800", "not valid Unicode: surrogates not allowed at character 1"),
        (b"bytes", "not bytes; decode"),
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
        ("local_queries", (3, 4, 7)),
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


def test_keys_of_retrieval_heads_are_stored_with_the_layers(store: DocumentStore) -> None:
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
    with pytest.raises(NumericalError, match="head 3a: keys contain 1 NaN"):
        store.add("x", "text", record)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["keys", "values", "local_queries", "representative_keys"])
def test_numbers_that_are_none_are_refused(store: DocumentStore, name: str, value: float) -> None:
    record = make_record()
    getattr(record.layers[2], name)[2, 1, 3] = value
    with pytest.raises(NumericalError, match=f"layer 2: {name} contain 1 NaN"):
        store.add("x", "text", record)
    assert store.list() == []


def test_the_decay_of_a_block_without_attention_may_be_infinite(store: DocumentStore) -> None:
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


# Several documents at once, and documents that were open before.


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled as soon as they are written."""
    monkeypatch.setattr(storage_module, "_SETTLED_NS", -(10**18))


def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the small tensors that are compared with their digests from now on."""
    names: list[str] = []
    plain = record_module.check_tensor

    def check(key: str, *others: object) -> None:
        names.append(key)
        plain(key, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(record_module, "check_tensor", check)
    return names


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [1, 2, 3, 9])
def test_several_documents_are_opened_in_order_and_counted_once(
    store: DocumentStore, number: int
) -> None:
    names = [f"document {i}" for i in range(number)]
    records = [make_record(i, n=70 + i) for i in range(number)]
    for name, record in zip(names, records, strict=True):
        store.add(name, f"text of {name}", record)
    opened = store.open_all(names[::-1])
    assert [document.info.name for document in opened] == names[::-1]
    assert [document.info.hits for document in opened] == [1] * number
    assert all(same(*pair) for pair in zip(opened, records[::-1], strict=True))
    for document in opened:
        document.close()
    assert [info.hits for info in store.list()] == [1] * number


def test_documents_are_all_opened_or_none(store: DocumentStore, tmp_path: Path) -> None:
    for name in "abc":
        store.add(name, name, make_record())
    before = store.list()
    with pytest.raises(UnknownNameError, match="'d'"):
        store.open_all(["a", "b", "d", "c"])
    assert store.list() == before
    for name in "abc":  # nothing is in use, so that nothing is left of it
        store.remove(name)
    assert not store._place.files("records")


@pytest.mark.usefixtures("settled")
def test_an_unchanged_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DocumentStore(tmp_path, MODEL)
    store.add("x", "text", make_record(1))
    names = hashed(monkeypatch)
    with store.open("x") as stored:
        assert same(stored, make_record(1))
        read = stored.bytes_read
    assert "token_ids" in names
    names.clear()
    with store.open("x") as stored:
        assert same(stored, make_record(1))
        assert stored.bytes_read < read
    assert names == []
    store.add("x", "text", make_record(2), overwrite=True)  # another file of the same name
    with store.open("x") as stored:
        assert same(stored, make_record(2))
    assert "token_ids" in names


@pytest.mark.usefixtures("settled")
def test_a_file_that_changes_after_it_was_hashed_is_hashed_again(tmp_path: Path) -> None:
    store = DocumentStore(tmp_path, MODEL)
    store.add("x", "text", make_record(1))
    store.open("x").close()
    [file] = (tmp_path / "records").iterdir()
    time.sleep(0.02)  # longer than the clock of a file system takes to move
    with file.open("r+b") as changed:
        changed.seek(8 + int.from_bytes(changed.read(8), "little"))
        changed.write(b"\xff")
    with pytest.raises(RecordError, match="token_ids of its record has changed"):
        store.open("x")


def test_a_file_that_was_just_written_is_hashed_at_every_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a tick of the file system's clock, a change leaves no trace in the file's times."""
    monkeypatch.setattr(storage_module, "_SETTLED_NS", 10**18)
    store = DocumentStore(tmp_path, MODEL)
    store.add("x", "text", make_record(1))
    store.open("x").close()
    names = hashed(monkeypatch)
    store.open("x").close()
    assert "token_ids" in names


@pytest.mark.usefixtures("settled")
def test_the_least_recently_opened_records_are_dropped_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DocumentStore(tmp_path, MODEL)
    for name in "abc":
        store.add(name, name, make_record())
    with store.open("a") as stored:
        size = stored._record.num_bytes
    store._verified = reader_module.VerifiedRecords(MODEL, 2 * size)
    for name in "abab":
        store.open(name).close()
    names = hashed(monkeypatch)
    store.open("c").close()  # a was used before b
    assert names.count("token_ids") == 1
    store.open("b").close()
    assert names.count("token_ids") == 1
    store.open("a").close()
    assert names.count("token_ids") == 2
