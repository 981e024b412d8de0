"""What a prefill policy works beside: with all of the mass, everything is as without one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, BloomConfig, MptConfig

from keyhole import LLM, SamplingParams, exactness_gate
from keyhole.models.loading import adopt
from keyhole.models.model import Model
from keyhole.models.shrink import random_model, shrink
from keyhole.policies import make_policy
from tests.policies.models import prompt, twins
from tests.policies.recording import forced, make_engine, run

EVERYTHING = "xattention:block_size=8,stride=4,min_length=0,mass=1.0"
HALF = "xattention:block_size=8,stride=4,min_length=0,mass=0.5"
PROMPT, GIVEN, CHUNK = prompt(61), prompt(5), 24


@functools.cache
def network(family: str) -> Any:
    """A small model of a family; ALiBi's positions are in its keys, and count in the estimate."""
    made = {
        "bloom": lambda: BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4),
        "mpt": lambda: MptConfig(vocab_size=96, d_model=32, n_layers=2, n_heads=4, max_seq_len=256),
        "lfm2": lambda: shrink(CONFIG_MAPPING["lfm2"](**exactness_gate._EXAMPLES.get("lfm2", {}))),
    }
    config = made[family]()
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        return random_model(config)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bloom", "mpt", "lfm2"])
def test_alibi_and_recurrent_layers(family: str) -> None:
    def logits(text: str | None) -> tuple[Tensor, float | None]:
        settings: dict[str, Any] = {"prefill_chunk": CHUNK, "prefix_cache": False}
        llm = LLM(
            network(family),
            device="cpu",
            memory="16MB",
            page_size=8,
            prefill_policy=text,
            **settings,
        )
        request = forced(llm.engine, PROMPT, GIVEN)
        run(llm.engine)
        return torch.stack(request.logits), request.stats().prompt_attended_fraction

    wanted, none = logits(None)
    assert none is None
    found, share = logits(EVERYTHING)
    assert share == 1.0
    assert (found - wanted).abs().max() <= 2e-4 * wanted.std()
    found, share = logits(HALF)
    assert share < 1.0
    assert found.isfinite().all()


def test_the_share_counts_the_heads_of_each_layer() -> None:
    """It counted as many for each as the layer with the most has."""
    config = CONFIG_MAPPING["laguna"](
        num_attention_heads_per_layer=[48, 64] * 20, layer_types=["full_attention"] * 40
    )
    engine = make_engine(
        adopt(random_model(shrink(config)), device="cpu"),
        make_policy(None),
        prefill_policy=EVERYTHING,
    )
    request = forced(engine, PROMPT, GIVEN)
    run(engine)
    assert request.stats().prompt_attended_fraction == 1.0


@pytest.fixture(scope="module")
def llama() -> Model:
    return twins("llama")[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("text", [EVERYTHING, HALF])
def test_offloaded_layers_read_the_same_blocks(llama: Model, tmp_path: Path, text: str) -> None:
    quest = make_policy("quest", {"token_budget": 16})
    settings: dict[str, Any] = {"max_batch": 1, "prefill_chunk": CHUNK, "prefill_policy": text}
    plain = make_engine(llama, quest, **settings)
    memory = {"memory": 14 * plain.cache.page_bytes, "offload": tmp_path}
    below = make_engine(llama, quest, **settings, **memory)
    requests = [forced(engine, PROMPT, GIVEN) for engine in (plain, below)]
    run(plain)
    run(below)
    assert requests[1].stats().offloaded_layers
    one, other = (torch.stack(request.logits) for request in requests)
    assert (one - other).abs().max() <= 1e-5
    shares = {request.stats().prompt_attended_fraction for request in requests}
    assert len(shares) == 1


@pytest.mark.slow
def test_proposed_tokens_are_checked_against_the_same_prompt(llama: Model) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    settings: dict[str, Any] = {"page_size": 4, "memory": "16MiB", "prefill_chunk": CHUNK}
    ids = {"prompt_token_ids": PROMPT + PROMPT[:30]}
    found = [
        LLM(llama, prefill_policy=HALF, draft=draft, **settings).generate(ids, params).token_ids
        for draft in (None, "ngram")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["reuse", "sam_kv:block_size=8"])
def test_a_question_over_stored_documents_reads_everything(
    llama: Model, tmp_path: Path, method: str
) -> None:
    """Where every token of the documents was kept, it read selected blocks."""
    found = []
    for text in (None, HALF):
        llm = LLM(llama, page_size=4, memory="16MiB", documents=tmp_path, prefill_policy=text)
        if text is None:
            llm.documents.add("a", {"prompt_token_ids": PROMPT}, block_size=8)
        params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=5, ignore_eos=True)
        question = {"prompt_token_ids": prompt(30, 1)}
        found.append(llm.ask(question, ["a"], reuse=method, params=params))
    assert found[0].logprobs == found[1].logprobs
    assert found[1].stats.prompt_attended_fraction is None


def test_the_same_prompt_again_comes_from_the_prefix_cache(llama: Model) -> None:
    engine = make_engine(llama, make_policy(None), prefill_policy=HALF, prefill_chunk=CHUNK)
    first = forced(engine, PROMPT, GIVEN)
    run(engine)
    again = forced(engine, PROMPT, GIVEN)
    run(engine)
    assert again.num_cached == 60
    # Its last token alone is computed again, and reads everything: fewer tokens than a block.
    assert again.stats().prompt_attended_fraction == 1.0
    assert torch.stack(again.logits).isfinite().all()
    assert (torch.stack(again.logits)[1:] - torch.stack(first.logits)[1:]).abs().max() < 1.0


@pytest.mark.parametrize(
    ("text", "same", "chunk"),
    [pytest.param(EVERYTHING, None, CHUNK, marks=pytest.mark.slow), (HALF, HALF, 1024)],
)
def test_a_preempted_request_computes_its_prompt_again(
    llama: Model, text: str, same: str | None, chunk: int
) -> None:
    """And no more than that as a prompt: generated tokens went on to read selected blocks."""
    probe = make_engine(llama, make_policy(None))
    settings: dict[str, Any] = {"prefill_chunk": chunk, "prefix_cache": False}
    memory = 34 * probe.cache.page_bytes
    tight = make_engine(llama, make_policy(None), prefill_policy=text, memory=memory, **settings)
    roomy = make_engine(llama, make_policy(None), prefill_policy=same, **settings)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    texts = [prompt(41), prompt(23), prompt(31)]
    wanted = [roomy.add(text, params) for text in texts]
    found = [tight.add(text, params) for text in texts]
    run(roomy)
    preempted = False
    while tight.has_work:
        tight.step()
        preempted |= any(request.generated for request in tight.scheduler.waiting)
    assert preempted
    assert [one.generated for one in found] == [one.generated for one in wanted]
