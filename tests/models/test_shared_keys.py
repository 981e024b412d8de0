"""Layers that read the keys and values of an earlier layer (Gemma 3n and 4): each keeps its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING

from keyhole import LLM, SamplingParams, sparse
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    params = dataclasses.replace(GREEDY, logprobs=3)
    llm = LLM(model, page_size=8, documents=tmp_path)
    llm.documents.add("d", {"prompt_token_ids": PROMPTS[0]}, block_size=8)
    found = llm.ask({"prompt_token_ids": PROMPTS[1]}, ["d"], reuse="reuse", params=params)
    text = {"prompt_token_ids": PROMPTS[0] + PROMPTS[1]}
    wanted = LLM(model, page_size=8).generate([text], params)[0]
    assert found.token_ids == wanted.token_ids
    for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def test_offloaded_layers_hold_the_same_rows(model: Model, tmp_path: Path) -> None:
    policy = make_policy("quest", settings_of("quest", 32))
    llm = LLM(model, policy, page_size=8, offload=str(tmp_path), memory="64MiB")
    offloader = llm.engine.offloader
    assert offloader is not None
    order = offloader.plan.model.order
    config = model.network.config
    assert max(order) >= config.num_hidden_layers - config.num_kv_shared_layers
    offloader.offload_layer(len(order))
    offloader.least = len(order)
    found = logits(llm, PROMPTS)
    assert offloader.offloaded == len(order)
    assert_near(found, logits(LLM(model, policy, page_size=8), PROMPTS))


@pytest.mark.slow
def test_inside_transformers_a_policy_selects(network: Any) -> None:
    options = {"max_new_tokens": COUNT, "min_new_tokens": COUNT, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    ids = torch.tensor([PROMPTS[0]])
    wanted = torch.cat(network.generate(ids, **options).logits)
    with sparse(network, make_policy("quest", settings_of("quest", 512)), page_size=8):
        found = torch.cat(network.generate(ids, **options).logits)
    assert_near([found], [wanted])


@pytest.mark.slow
def test_the_text_part_of_a_multimodal_checkpoint_runs(
    network: Any, model: Model, tmp_path: Path
) -> None:
    """As published ones are: names with the text part's prefix, beside those of a vision tower."""
    text = network.config
    config = CONFIG_MAPPING[text.model_type.removesuffix("_text")](text_config=text.to_dict())
    config.architectures = [type(network).__name__.replace("CausalLM", "ConditionalGeneration")]
    config.save_pretrained(tmp_path)
    weights = {
        name.replace("model.", "model.language_model.", 1): weight.contiguous()
        for name, weight in network.state_dict().items()
        if name != "lm_head.weight"
    }
    weights["model.vision_tower.some.weight"] = torch.zeros(2, 2)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(tmp_path, device="cpu", dtype="float32", page_size=8)
    assert_near(logits(llm, PROMPTS), logits(LLM(model, page_size=8), PROMPTS))
