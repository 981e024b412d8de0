"""Every number of bytes in memory-layout.md is what the code computes."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import DeepseekV3Config, LlamaConfig

import keyhole
from keyhole.bench.settings import SHAPES
from keyhole.cache.layout import Geometry, bytes_per_page
from keyhole.cache.pages import _FIRST_PAGES, PageCache
from keyhole.models import families
from keyhole.policies import make_policy
from tests.docs.markdown import DOCS

TEXT = (DOCS / "memory-layout.md").read_text()
TOKENS, BUDGET = 32_768, 1_024


def geometry(config: Any) -> Geometry:
    return Geometry(
        layers=families.layouts(config),
        num_query_heads=config.num_attention_heads,
        page_size=keyhole.LLM.__init__.__kwdefaults__["page_size"],
        itemsize=torch.bfloat16.itemsize,
    )


LLAMA = geometry(LlamaConfig(**SHAPES["llama-3.2-1b"]))
#: DeepSeek-V3 as transformers knows it by default.
DEEPSEEK = geometry(DeepseekV3Config())


def row(label: str) -> int:
    """The number in the row of the worked example that begins so."""
    found = re.search(rf"^\| {re.escape(label)}[^|]*\| ([\d,]+) \|$", TEXT, re.MULTILINE)
    assert found, label
    return int(found[1].replace(",", ""))


def side_data(name: str) -> list[dict[str, tuple[int, ...]]]:
    return [make_policy(name).page_data(layout, LLAMA.page_size) for layout in LLAMA.layers]


def test_the_bytes_of_tokens_and_pages() -> None:
    plain = bytes_per_page(LLAMA, side_data("full"))
    assert row("one token") == LLAMA.token_bytes
    assert row("one page") == plain
    assert row("one page with them") == bytes_per_page(LLAMA, side_data("quest"))
    assert row("Quest's bounds") == row("one page with them") - plain
    pages = TOKENS // LLAMA.page_size
    assert f"{pages:,} pages" in TEXT
    assert row("32,768 tokens, 2,048 pages") == pages * plain
    for kv_dtype in ("int8", "fp8"):
        assert row("32,768 tokens in 8 bits") == TOKENS * LLAMA.stored_as(kv_dtype).token_bytes


def test_a_real_cache_takes_these_bytes() -> None:
    cache = PageCache(
        LLAMA, 4, dtype=torch.bfloat16, device=torch.device("cpu"), page_data=side_data("quest")
    )
    cache.allocate(4)
    tensors = [*cache.keys, *cache.values, *(t for data in cache.data for t in data.values())]
    assert sum(tensor.nbytes for tensor in tensors) == 4 * row("one page with them")


def test_the_bytes_that_a_step_reads() -> None:
    delta = make_policy("delta", {"token_budget": BUDGET}).resolve(LLAMA)
    assert delta.delta_layers == (2, 8, 12)
    assert "`{2, 8, 12}` of 16" in TEXT
    everything = {*delta.full_layers, *delta.delta_layers}
    assert len(everything) == 5
    layer = LLAMA.token_bytes // LLAMA.num_layers
    sparse = LLAMA.num_layers - len(everything)
    assert f"in {sparse} layers, all in 5" in TEXT
    read = "read by a step over them: "
    assert row(read + "`full`") == layer * LLAMA.num_layers * TOKENS
    assert row(read + "`streaming_llm`") == layer * LLAMA.num_layers * BUDGET
    assert row(read + "`delta`") == layer * (len(everything) * TOKENS + sparse * BUDGET)


def test_the_table_of_layouts() -> None:
    gqa, latent = LLAMA.layers[0], DEEPSEEK.layers[0]
    assert f"| {gqa.num_kv_heads} | {gqa.key_dim} | {gqa.value_dim} |" in TEXT
    assert f"| {gqa.numbers_per_token:,} |" in TEXT
    assert f"| 1 | {latent.key_dim} | {latent.value_dim} | {latent.numbers_per_token} |" in TEXT


def test_what_latents_save() -> None:
    config = DeepseekV3Config()
    heads = config.num_attention_heads
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    assert f"{config.num_hidden_layers} layers, rank {config.kv_lora_rank}" in TEXT
    assert f"{heads} heads with keys of {key} and\nvalues of {value}" in TEXT
    expanded = DEEPSEEK.num_layers * heads * (key + value) * DEEPSEEK.itemsize
    assert f"keeps {DEEPSEEK.token_bytes:,} bytes" in TEXT
    assert f"\nwould be {expanded:,}" in TEXT


def test_the_first_pages() -> None:
    assert f"begin with {_FIRST_PAGES} pages" in TEXT
