"""Models with an indexer of their own give the logits of transformers, however work is cut up."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import CONFIG_MAPPING

import keyhole
from keyhole import LLM, ConfigError, Delta, Full, ModelError, SamplingParams, kernels
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence
from keyhole.exactness_gate import measure
from keyhole.models import checkpoint, families
from keyhole.models.loading import adopt
from keyhole.models.modules import indexed_attention
from keyhole.models.shrink import random_model, shrink
from tests.effort import examples
from tests.engine.pair import Pair
from tests.models import compared
from tests.models.compared import Text, add, logits_of, random_texts, run
from tests.policies.models import VOCAB

#: The indexer rotates its first numbers in halves; in pairs, and some layers read what another one
#: selected; beside a gate; its last numbers, and with sinks.
FAMILIES = ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"]
TOPK = 8
PAGE = 8
#: Below, at and above what an indexer selects, and a page.
LENGTHS = (5, 1, 29, PAGE, 12)
NEW = 6
#: Logits differ by the order of sums only.
TOLERANCE = 1e-4


@functools.cache
def network_of(family: str) -> Any:
    config = CONFIG_MAPPING[family](**({"index_topk_freq": 3} if family == "glm_moe_dsa" else {}))
    small = shrink(config)
    assert small.index_topk == TOPK
    small._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        return random_model(small)


@functools.cache
def texts() -> list[Text]:
    return random_texts(11, LENGTHS, NEW)


@functools.cache
def expected(family: str) -> list[Tensor]:
    return logits_of(network_of(family), texts())


def engine_of(family: str, **more: Any) -> Engine:
    options = {"page_size": PAGE, "memory": "16MB", "prefix_cache": False} | more
    return LLM(network_of(family), device="cpu", **options).engine


def assert_exact(family: str, sequences: list[Sequence]) -> None:
    compared.assert_exact(sequences, expected(family), TOLERANCE)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_a_ragged_batch(family: str) -> None:
    engine = engine_of(family)
    sequences = [add(engine, text) for text in texts()]
    run(engine)
    assert_exact(family, sequences)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3, PAGE - 1, PAGE, PAGE + 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_prompt_chunks(family: str, chunk: int) -> None:
    engine = engine_of(family, prefill_chunk=chunk)
    sequences = [add(engine, text) for text in texts()]
    run(engine)
    assert_exact(family, sequences)


def test_in_blocks_of_a_chunk_and_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_attention, "_NUMBERS", 3 * 64)
    monkeypatch.setattr("keyhole.kernels.composed.blocks._PRODUCTS", 1)
    engine = engine_of("glm_moe_dsa")
    sequences = [add(engine, text) for text in texts()]
    run(engine)
    assert_exact("glm_moe_dsa", sequences)


def test_a_trace_has_what_the_indexer_selected_for_the_prompt_too() -> None:
    """The first token was said to have read the whole prompt."""
    engine = engine_of("glm_moe_dsa")
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, trace=True)
    sequence = engine.add(texts()[2][0], params)
    run(engine)
    for read in sequence.reads or ():
        for layer in range(engine.geometry.num_layers):
            assert read.shares(layer).sum() == TOPK
    assert len(sequence.reads or ()) == 3


def test_with_cached_prefixes() -> None:
    """The keys of the indexer are shared and copied with the page that they are in."""
    engine = engine_of("deepseek_v32", prefix_cache=True)
    for _ in range(2):
        sequences = [add(engine, text) for text in texts()]
        run(engine)
        assert_exact("deepseek_v32", sequences)
    assert sequences[2].num_cached == LENGTHS[2] // PAGE * PAGE


@pytest.mark.slow
def test_preemption_changes_nothing() -> None:
    # The longest text has five pages; with seven, two of them cannot run at once.
    engine = engine_of("deepseek_v32")
    engine = engine_of("deepseek_v32", memory=7 * engine.cache.page_bytes)
    sequences = [add(engine, texts()[2]) for _ in range(3)]
    run(engine)
    for sequence in sequences:
        found, theirs = torch.stack(sequence.logits), expected("deepseek_v32")[2]
        assert (found - theirs).abs().max() < TOLERANCE * theirs.std()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_generated_tokens_equal_those_of_transformers(draft: str | None) -> None:
    """Also where proposed tokens are checked: each row of a step selects for itself."""
    prompt = texts()[2][0] * 2
    theirs = network_of("glm_moe_dsa").generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1
    )
    llm = LLM(network_of("glm_moe_dsa"), device="cpu", memory="16MB", draft=draft)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    ours = llm.generate({"prompt_token_ids": prompt}, params)
    assert ours.token_ids == theirs[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_steps_can_be_repeated_from_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA graphs do: a step's shapes decide alone whether it selects."""
    config = shrink(CONFIG_MAPPING["glm_moe_dsa"](index_topk_freq=3))
    config.vocab_size, config.index_topk = VOCAB, 20
    with torch.random.fork_rng(devices=[]):
        pair = Pair(monkeypatch, adopt(random_model(config), device="cpu"), Full())
    pair.run(((0, 3, 30), (2, 40, 20)), within=1e-4)
    assert pair.recorder.repeated > 20


def test_the_statistics_say_how_much_is_read() -> None:
    llm = LLM(network_of("deepseek_v32"), device="cpu", memory="16MB")
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    stats = llm.generate({"prompt_token_ids": texts()[2][0]}, params).stats
    assert stats.attended_fraction == pytest.approx(TOPK / (LENGTHS[2] + 1))


def test_layers_that_share_a_selection_have_no_key_of_an_indexer() -> None:
    config = network_of("glm_moe_dsa").config
    assert set(config.indexer_types) == {"full", "shared"}
    for kind, layout in zip(config.indexer_types, families.layouts(config), strict=True):
        assert layout.index_topk == TOPK
        assert layout.index_dim == (config.index_head_dim if kind == "full" else 0)
        assert layout.key_dim == config.kv_lora_rank + config.qk_rope_head_dim + layout.index_dim


def test_what_an_indexer_cannot_have_is_refused_by_name(tmp_path: Path) -> None:
    network = network_of("deepseek_v32")
    place: dict[str, Any] = {"device": "cpu", "memory": "16MB"}
    with pytest.raises(ConfigError, match=r"'delta' cannot be used.*indexer selects 8 tokens"):
        LLM(network, Delta(), **place)
    llm = LLM(network, **place)
    with pytest.raises(ConfigError, match="'quest' cannot be used"):
        llm.generate({"prompt_token_ids": [1, 2]}, policy="quest")
    with pytest.raises(ConfigError, match="stored documents cannot be used with"):
        _ = llm.documents
    with pytest.raises(ConfigError, match="a window or an indexer of its own"):
        LLM(network, prefill_policy="xattention", **place)
    with pytest.raises(ConfigError, match="offload"):
        LLM(network, offload=tmp_path, **place)
    with (
        pytest.raises(ConfigError, match=r"own indexer selects.*keyhole.LLM"),
        keyhole.sparse(network, Delta(), memory="16MB"),
    ):
        pass
    network.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="no layer can be offloaded"):
        checkpoint.read(tmp_path / "model")


def test_other_indexers_are_refused_with_their_reason() -> None:
    reasons = {
        "qwen4_exp_text": "an indexer other than DeepSeek-V3.2's",
        "dots3_note_text": "whose shape differs between layers",  # not in transformers 5.22
        "deepseek_v4": "compressed_sparse_attention, heavily_compressed_attention",
    }
    for family in reasons.keys() & CONFIG_MAPPING.keys():
        assert reasons[family] in str(measure(CONFIG_MAPPING[family]()).reason)


def test_an_unknown_class_of_indexer_is_named() -> None:
    class Other(torch.nn.Module):
        def forward(self, past_key_values: Any) -> Any:
            return past_key_values.update_indexer()

    around = torch.nn.Module()
    around.indexer = Other()
    with pytest.raises(ModelError, match="'this' selects tokens by Other"):
        indexed_attention.adapt(around, "this")


def test_a_users_network_keeps_its_classes() -> None:
    network = network_of("deepseek_v32")
    classes = [type(module) for module in network.modules()]
    _ = engine_of("deepseek_v32")
    assert [type(module) for module in network.modules()] == classes


@examples(60)
@given(
    rows=st.integers(1, 3),
    queries=st.integers(1, 4),
    heads=st.sampled_from([1, 3, 8]),
    dim=st.sampled_from([1, 16, 80]),
    pages=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_scores_are_the_papers_formula(
    rows: int, queries: int, heads: int, dim: int, pages: int, seed: int
) -> None:
    """sum_j w_tj ReLU(q_tj . k_s), arXiv 2512.02556, eq. 1, in float64, one number at a time."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(9, 1, PAGE, dim + 5, generator=generator)[..., 5:]  # the end of longer rows
    query = torch.randn(rows, queries, heads, dim, generator=generator)
    weights = torch.randn(rows, queries, heads, generator=generator)
    table = torch.randint(0, 9, (rows, pages), generator=generator, dtype=torch.int32)
    found = kernels.index_scores(query, weights, keys, table)
    assert found.shape == (rows, queries, pages * PAGE)
    for b in range(rows):
        for s in range(pages * PAGE):
            key = keys[table[b, s // PAGE], 0, s % PAGE].double()
            for t in range(queries):
                products = [max(0.0, float(query[b, t, j].double() @ key)) for j in range(heads)]
                total = sum(float(w) * p for w, p in zip(weights[b, t], products, strict=True))
                assert float(found[b, t, s]) == pytest.approx(total, abs=1e-4)
