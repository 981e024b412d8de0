"""Layers that read the keys and values of an earlier layer (Gemma 3n and 4): each keeps its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from keyhole import LLM, SamplingParams
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.models.shrink import random_model, shrink
from keyhole.policies import available_policies, make_policy

FAMILIES = {"gemma3n_text": {}, "gemma4_text": {"num_kv_shared_layers": 10}}
#: All but those that need a head or a gate of their own, trained for the model.
SELECTING = sorted(available_policies().keys() - {"spe_context", "seer_attention_r"})
COUNT = 8
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
PROMPTS = [[*range(2, 60)], [*range(90, 3, -7)], [5, 9] * 30]


@pytest.fixture(scope="module", params=FAMILIES)
def network(request: pytest.FixtureRequest) -> Any:
    config = CONFIG_MAPPING[request.param](**FAMILIES[request.param])
    small = shrink(config)
    assert 0 < small.num_kv_shared_layers < small.num_hidden_layers
    small._attn_implementation = "eager"
    return random_model(small)


@pytest.fixture(scope="module")
def model(network: Any, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("checkpoint")
    network.save_pretrained(folder)
    return load(folder, "cpu", torch.float32)


def logits(llm: LLM, prompts: list[list[int]]) -> list[Tensor]:
    requests = [llm.engine.add(prompt, GREEDY, keep_logits=True) for prompt in prompts]
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.check_integrity()
    assert all(request.error is None for request in requests)
    return [torch.stack(request.logits) for request in requests]


def assert_near(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


def settings_of(policy: str, budget: int) -> dict[str, int]:
    return {"token_budget": budget} if policy != "full" else {}


def test_a_checkpoint_generates_what_transformers_does(network: Any, model: Model) -> None:
    found = logits(LLM(model, page_size=8, prefill_chunk=11), PROMPTS)
    wanted = []
    for prompt in PROMPTS:
        out = network.generate(
            torch.tensor([prompt]),
            max_new_tokens=COUNT,
            min_new_tokens=COUNT,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        wanted.append(torch.cat(out.logits))
    assert_near(found, wanted)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", SELECTING)
def test_policies_select_in_them_too(model: Model, policy: str) -> None:
    """With everything read it is full attention; requests of a batch get what they get alone."""
    dense = logits(LLM(model, page_size=8), PROMPTS)
    everything = make_policy(policy, settings_of(policy, 512))
    assert_near(logits(LLM(model, everything, page_size=8), PROMPTS), dense)
    few = [make_policy(policy, settings_of(policy, 32)) for _ in range(4)]
    together = logits(LLM(model, few[0], page_size=8), PROMPTS)
    alone = [
        logits(LLM(model, each, page_size=8), [prompt])[0]
        for each, prompt in zip(few[1:], PROMPTS, strict=True)
    ]
    assert_near(together, alone)


def test_a_stored_document_at_the_beginning_is_the_same_text(model: Model, tmp_path: Path) -> None:
    llm = LLM(model, page_size=8, documents=tmp_path)
    llm.documents.add("d", {"prompt_token_ids": PROMPTS[0]}, block_size=8)
    found = llm.ask({"prompt_token_ids": PROMPTS[1]}, ["d"], reuse="reuse", params=GREEDY)
    wanted = llm.generate([{"prompt_token_ids": PROMPTS[0] + PROMPTS[1]}], GREEDY)[0]
    assert found.token_ids == wanted.token_ids


def test_offloaded_layers_hold_the_same_rows(model: Model, tmp_path: Path) -> None:
    policy = make_policy("quest", settings_of("quest", 32))
    roomy = LLM(model, policy, page_size=8)
    memory = 3 * len(PROMPTS) * 5 * roomy.engine.cache.page_bytes
    tight = LLM(model, policy, page_size=8, memory=memory, offload=tmp_path)
    assert_near(logits(tight, PROMPTS), logits(roomy, PROMPTS))
