"""Engines whose keys and values have 8 bits: one set of numbers, read alike by everything.

A key that two runs compute with another rounding may be quantised to neighbouring numbers, so runs
agree within `_NEAR` instead of the rounding of float32: one step of a number, far below what
quantising itself changes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, LlamaConfig, PreTrainedConfig

from keyhole import LLM, SamplingParams
from keyhole.cache.layout import Geometry
from keyhole.errors import ConfigError, KeyholeError, UnknownNameError
from keyhole.models import families
from keyhole.models.model import Model
from keyhole.policies import available_policies
from tests.checkpoints import make_model
from tests.combinations import COUNT, DOCUMENTS, LARGE, PLAIN, REQUESTS, SMALL, Cell, Lab

KV_DTYPES = ("int8", "fp8")
_NEAR = 5e-3
#: What quantising changes, relative to the largest logit; unrelated logits differ by more than 1.
_CHANGE = {"int8": (1e-4, 0.1), "fp8": (1e-3, 0.6)}
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest logit."""
    return float((one - other).abs().max() / other.abs().max())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("auto"))


@pytest.fixture(scope="module")
def labs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lab]:
    return {name: Lab(tmp_path_factory.mktemp(name), kv_dtype=name) for name in KV_DTYPES}


@pytest.fixture(scope="module")
def model(labs: dict[str, Lab]) -> Model:
    found: Model = labs["int8"].model("GQA")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("policy", available_policies())
def test_with_budget_for_everything_a_policy_is_full_attention(
    labs: dict[str, Lab], policy: str, kv_dtype: str
) -> None:
    """Three ragged requests side by side, prompts in chunks."""
    lab = labs[kv_dtype]
    found = lab.logits(Cell(policy, "GQA"), LARGE, range(3))
    for one, dense in zip(found, lab.dense("GQA", PLAIN), strict=True):
        assert apart(one, dense) <= _NEAR


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("family", ["GQA", "windows", "softcap", "sinks"])
def test_quantising_changes_the_logits_a_little(
    labs: dict[str, Lab], plain: Lab, family: str, kv_dtype: str
) -> None:
    pairs = zip(labs[kv_dtype].dense(family, PLAIN), plain.dense(family, PLAIN), strict=True)
    # Of the prompts alone: later logits may belong to other tokens.
    changes = [apart(one[:1], other[:1]) for one, other in pairs]
    least, most = _CHANGE[kv_dtype]
    assert least <= max(changes) <= most, changes


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["quest", "spe_context", "delta"])
def test_offloaded_layers_hold_the_same_rows(labs: dict[str, Lab], policy: str) -> None:
    lab = labs["int8"]
    below = lab.logits(Cell(policy, "GQA", lower=True), SMALL, range(3))
    above = lab.logits(Cell(policy, "GQA"), SMALL, range(3))
    for one, other in zip(below, above, strict=True):
        assert apart(one, other) <= _NEAR


@pytest.mark.slow
@pytest.mark.parametrize("way", ["reuse", "sam_kv", "cacheblend"])
def test_stored_documents_are_rotated_and_quantised_again(
    labs: dict[str, Lab], plain: Lab, way: str
) -> None:
    """Near the same method over unquantised documents: rows are quantised twice."""
    for name, lab in labs.items():
        found = lab.logits(Cell("full", "GQA", way), SMALL, range(3))
        wanted = plain.logits(Cell("full", "GQA", way), SMALL, range(3))
        changes = [apart(one[:1], other[:1]) for one, other in zip(found, wanted, strict=True)]
        if way == "reuse":  # others choose what they compute again, by keys that differ
            assert max(changes) <= _CHANGE[name][1], changes
        alone = [lab.logits(Cell("full", "GQA", way), SMALL, [i])[0] for i in range(3)]
        assert max(apart(one, other) for one, other in zip(found, alone, strict=True)) <= _NEAR


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_prefix_cache_and_chunks_change_nothing(model: Model, kv_dtype: str) -> None:
    def logits(llm: LLM, prompt: list[int]) -> tuple[Tensor, int]:
        request = llm.engine.add(prompt, GREEDY, keep_logits=True)
        while llm.engine.has_work:
            llm.engine.step()
        llm.engine.check_integrity()
        return torch.stack(request.logits), request.stats().cached_prompt_tokens

    llm = LLM(model, kv_dtype=kv_dtype, page_size=4)
    first, cached = logits(llm, REQUESTS[1])
    assert cached == 0
    again, cached = logits(llm, REQUESTS[1])  # forks from the cached pages
    assert cached > 0
    assert apart(again, first) <= _NEAR
    chunked, _ = logits(LLM(model, kv_dtype=kv_dtype, page_size=4, prefill_chunk=7), REQUESTS[1])
    assert apart(chunked, first) <= _NEAR


def test_a_preempted_request_is_replayed(model: Model) -> None:
    """With too few pages for both requests one waits, and computes its rows again."""
    roomy = LLM(model, kv_dtype="int8", page_size=4)
    prompts = [REQUESTS[1], REQUESTS[2]]
    wanted = [result.token_ids for result in roomy.generate(prompts, GREEDY)]
    pages = -(-len(REQUESTS[1]) // 4) + -(-len(REQUESTS[2]) // 4) + 1
    memory = pages * roomy.engine.cache.page_bytes
    tight = LLM(model, kv_dtype="int8", page_size=4, memory=memory, prefix_cache=False)
    assert [result.token_ids for result in tight.generate(prompts, GREEDY)] == wanted


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_bytes_are_those_of_the_rows(model: Model, kv_dtype: str) -> None:
    """Read, held and predicted: a byte per number and four per row."""
    llm, whole = LLM(model, kv_dtype=kv_dtype), LLM(model)
    (layout, *_), count = llm.engine.geometry.layers, llm.engine.geometry.num_layers
    numbers = count * layout.num_kv_heads * (layout.key_dim + layout.value_dim)
    scales = count * layout.num_kv_heads * 2
    assert llm.engine.geometry.token_bytes == numbers + 4 * scales
    assert whole.engine.geometry.token_bytes == numbers * model.dtype.itemsize
    stats = [engine.generate([3, 4, 5], GREEDY).stats for engine in (llm, whole)]
    assert stats[0].kv_bytes_read * numbers * 4 == stats[1].kv_bytes_read * (numbers + 4 * scales)
    held = sum(
        keys.nbytes + values.nbytes
        for keys, values in zip(llm.engine.cache.keys, llm.engine.cache.values, strict=True)
    )
    assert held == llm.engine.cache.capacity * llm.engine.cache.page_bytes
    assert llm.engine.cache.page_bytes == 16 * (numbers + 4 * scales)


def test_stored_documents_take_the_bytes_of_rows_and_belong_to_one_kv_dtype(
    model: Model, tmp_path: Path
) -> None:
    ids = {"prompt_token_ids": DOCUMENTS["a"]}
    quantised = LLM(model, kv_dtype="int8", documents=tmp_path)
    quantised.documents.add("a", ids)
    with quantised.documents.store.open("a") as stored:
        keys, values = stored.rows(0, 0, 5)
    layout = quantised.engine.geometry.layers[0]
    assert values is not None
    assert keys.dtype == values.dtype == torch.int8
    assert keys.shape == (5, layout.num_kv_heads, layout.key_dim + 4)
    other = LLM(model, kv_dtype="fp8", documents=tmp_path)
    for llm, here in ((other, "kv_dtype 'fp8'"), (LLM(model, documents=tmp_path), "no kv_dtype")):
        with pytest.raises(KeyholeError, match="kv_dtype 'int8'") as caught:
            llm.ask({"prompt_token_ids": [3]}, documents=["a"])
        assert here in str(caught.value)


def test_latents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype 'int8'.*MLA"):
        LLM(make_model("deepseek_v3", tmp_path), kv_dtype="int8")


@pytest.mark.parametrize(
    ("config", "why"),
    [(BloomConfig(), "ALiBi"), (LlamaConfig(hidden_size=36, num_attention_heads=6), "not 6")],
)
def test_what_cannot_be_quantised_is_refused(config: PreTrainedConfig, why: str) -> None:
    layers = families.layouts(config)
    geometry = Geometry(layers=layers, num_query_heads=1, page_size=4, itemsize=4)
    with pytest.raises(ConfigError, match=f"kv_dtype 'fp8'.*{why}"):
        geometry.stored_as("fp8")


def test_an_unknown_kv_dtype_is_refused(model: Model) -> None:
    with pytest.raises(UnknownNameError, match="int4"):
        LLM(model, kv_dtype="int4")
