"""Stored blocks that were read last are not read again, and change no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from keyhole import LLM
from keyhole.cache.layout import list_bytes
from keyhole.documents import storage as storage_module
from keyhole.engine.documents.stored_rows import HostBlocks, HotBlocks
from keyhole.errors import ConfigError
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.models.shrink import random_model, shrink
from tests.checkpoints import make_model
from tests.engine.documents.asking import BLOCK, CASES, TEXTS, WIDE, ask, tokens

NAMES = ["a", "c", "b", "tiny", "a", "short"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    folder = tmp_path_factory.mktemp("llama")
    model, store = load(make_model("llama", folder, **WIDE), "cpu"), folder / "store"
    documents = LLM(model, documents=store).documents
    for name, ids in TEXTS.items():
        documents.add(name, {"prompt_token_ids": ids}, block_size=BLOCK)
    return model, store


def engine(places: tuple[Model, Path], most: int | None, host: int | None = None) -> LLM:
    model, store = places
    return LLM(
        model,
        page_size=4,
        prefill_chunk=37,
        documents=store,
        hot_document_bytes=most,
        host_document_bytes=host,
    )


@pytest.mark.slow
def test_hot_blocks_are_a_part_of_the_memory(places: tuple[Model, Path], tmp_path: Path) -> None:
    """They were held beside `memory`, so that an engine took more than it was given."""
    model, store = places
    hot, memory = 100_000, 1_000_000
    given: tuple[tuple[str, dict[str, Any]], ...] = (
        ("resident", {"memory": memory}),
        ("offloading", {"memory": memory, "offload": str(tmp_path), "policy": "quest"}),
        ("total", {"total_memory": 20_000_000}),
    )
    for name, more in given:
        alone = LLM(model, documents=store, **more).engine
        with_hot = LLM(model, documents=store, hot_document_bytes=hot, **more).engine
        fewer = alone.cache.max_pages - with_hot.cache.max_pages
        each = alone.cache.page_bytes
        if name == "total":  # which counts lists of pages and tokens, too
            each += list_bytes(alone.cache.page_size)
        if name == "offloading":
            assert with_hot.offloader is not None
            assert with_hot.offloader.plan.model.terms(0, 0)["documents"] == hot
            assert fewer > 0  # all pages are counted with every layer offloaded
        else:
            assert hot <= fewer * each + each
            assert fewer * each <= hot + each
    with pytest.raises(
        ConfigError, match=r"no room for a page .* beside hot_document_bytes 1000000; raise"
    ):
        LLM(model, documents=store, memory=memory, hot_document_bytes=memory)


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("gpt2", {}, "has no rotary embedding"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 16}, "have a recurrent state"),
    ],
)
def test_a_model_that_cannot_use_documents_refuses_memory_for_them(
    kind: str, fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    """The memory was taken from the KV cache, and nothing ever used it."""
    random_model(shrink(CONFIG_MAPPING[kind](**fields))).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"leave out hot_document_bytes=1000: .* {why}"):
        LLM(tmp_path, device="cpu", memory="16MB", hot_document_bytes=1000)


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled as soon as they are written."""
    monkeypatch.setattr(storage_module, "_SETTLED_NS", -(10**18))


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "case", ["reuse", "epic", "cacheblend", "multi_infllm", "sam_kv", "fusion"]
)
@pytest.mark.parametrize("most", [1 << 20, 3000])
def test_answers_are_bitwise_those_without_a_cache(
    places: tuple[Model, Path], case: str, most: int
) -> None:
    method, settings, _ = CASES[case]
    settings = {"block_size": BLOCK, **settings} if method == "sam_kv" else settings
    plain, cached = engine(places, None), engine(places, most)
    for seed in (1, 2, 1):
        question = tokens(9, seed)
        wanted = ask(plain, NAMES, question, method, settings)
        found = ask(cached, NAMES, question, method, settings)
        assert found.tokens == wanted.tokens
        for one, other in zip(found.logits, wanted.logits, strict=True):
            assert torch.equal(one, other)
        assert cached.engine.filler.hot.num_bytes <= most
    read = found.stats().store_bytes_read
    assert read is not None
    assert read == 0 if most > 3000 else read > 0


@pytest.mark.slow
def test_a_replaced_document_is_read_again(places: tuple[Model, Path]) -> None:
    llm = engine(places, 1 << 20)
    llm.documents.add("new", {"prompt_token_ids": tokens(40, 5)}, block_size=BLOCK)
    before = ask(llm, ["new"], tokens(9, 1), "reuse", {})
    llm.documents.add("new", {"prompt_token_ids": tokens(40, 6)}, block_size=BLOCK, overwrite=True)
    after = ask(llm, ["new"], tokens(9, 1), "reuse", {})
    wanted = ask(engine(places, None), ["new"], tokens(9, 1), "reuse", {})
    assert torch.equal(after.logits[0], wanted.logits[0])
    assert not torch.equal(after.logits[0], before.logits[0])


def test_the_least_recently_used_blocks_are_dropped() -> None:
    cache, rows = HotBlocks(100), (torch.zeros(40, dtype=torch.uint8), None)
    cache.put(("x", 0, 0), rows)
    cache.put(("x", 0, 1), rows)
    assert cache.get(("x", 0, 0)) is rows
    cache.put(("x", 0, 2), rows)
    assert cache.get(("x", 0, 1)) is None
    assert cache.get(("x", 0, 0)) is cache.get(("x", 0, 2)) is rows
    assert cache.num_bytes == 80
    cache.put(("x", 0, 3), (torch.zeros(101, dtype=torch.uint8), None))  # above the limit
    assert cache.num_bytes == 0


def test_blocks_that_leave_the_device_come_back_from_the_host() -> None:
    host = HostBlocks(80)
    cache = HotBlocks(80, host)
    rows = {n: (torch.full((20,), n), torch.full((20,), -n)) for n in range(5)}
    rows = {n: (keys.to(torch.int8), values.to(torch.int8)) for n, (keys, values) in rows.items()}
    for n, pair in rows.items():
        cache.put(("x", 0, n), pair)
    assert (cache.num_bytes, host.num_bytes) == (80, 80)
    assert cache.get(("x", 0, 0)) is None  # 1 and 2 are on the host, 3 and 4 on the device
    for n in (1, 2, 1, 3, 4):
        found = cache.get(("x", 0, n))
        assert found is not None
        for part, wanted in zip(found, rows[n], strict=True):
            assert part is not None
            assert torch.equal(part, wanted)
        assert (cache.num_bytes, host.num_bytes) == (80, 80)


def test_a_block_that_is_larger_than_the_host_s_limit_drops_no_other() -> None:
    host = HostBlocks(50)
    host.put(("x", 0, 0), (torch.zeros(40, dtype=torch.uint8), None))
    host.put(("x", 0, 1), (torch.zeros(51, dtype=torch.uint8), None))
    assert host.num_bytes == 40
    assert host.take(("x", 0, 1)) is None
    found = host.take(("x", 0, 0))
    assert found is not None
    assert found[1] is None
    assert host.num_bytes == 0


def test_a_question_reads_nothing_twice_with_room_on_the_host(places: tuple[Model, Path]) -> None:
    plain, cached = engine(places, None), engine(places, 3000, 1 << 20)
    for seed in (1, 2):
        wanted = ask(plain, NAMES, tokens(9, seed), "reuse", {})
        found = ask(cached, NAMES, tokens(9, seed), "reuse", {})
        for one, other in zip(found.logits, wanted.logits, strict=True):
            assert torch.equal(one, other)
    assert found.stats().store_bytes_read == 0
    assert cached.engine.filler.hot.num_bytes <= 3000


def test_blocks_on_the_host_need_blocks_on_the_device(places: tuple[Model, Path]) -> None:
    with pytest.raises(ConfigError, match="host_document_bytes 5 holds what is evicted"):
        engine(places, None, 5)
