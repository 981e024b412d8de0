"""Experts of GGUF files whose blocks are kept, beside the same files dequantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen3MoeConfig

from keyhole import LLM, SamplingParams
from keyhole.models import checkpoint
from keyhole.models.loading import load
from keyhole.models.weights import packing
from keyhole.models.weights.packing import BlockExperts, BlockLinear
from tests.models.test_gguf import MIXED, write
from tests.models.verified import EACH, failed

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = list(range(3, 60))
WIDTH = 512
SIZES: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four experts, of which each token uses two; of another width than the family's default."""
    folder = tmp_path_factory.mktemp("experts")
    save(Qwen3MoeConfig(**SIZES, head_dim=64, norm_topk_prob=True), folder)
    return folder


def save(config: Any, folder: Path) -> None:
    """Saves a model of random weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def make(original: Path) -> Callable[[str], Path]:
    """A file of a format, made once."""

    def file(kind: str) -> Path:
        path = original / f"{kind}.gguf"
        if not path.exists():
            write(original, path, kind)
        return path

    return file


def experts(model: Any) -> list[BlockExperts]:
    return [module for module in model.network.modules() if isinstance(module, BlockExperts)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q4_K_M"])
def test_logits_are_those_of_the_dequantised_file(make: Callable[[str], Path], kind: str) -> None:
    kept = load(make(kind), "cpu", "float32")
    plain = load(make(kind), "cpu", "float32", weights="dequantised")
    assert (len(experts(kept)), len(experts(plain))) == (2, 0)
    for ours, theirs in zip(kept.network.model.layers, plain.network.model.layers, strict=True):
        for name in packing.EXPERTS:
            found = getattr(ours.mlp.experts, name).weight
            wanted = getattr(theirs.mlp.experts, name)
            torch.testing.assert_close(found.view(wanted.shape), wanted, rtol=1e-6, atol=1e-9)
    assert LLM(kept).generate(PROMPT, GREEDY).token_ids == (
        LLM(plain).generate(PROMPT, GREEDY).token_ids
    )
    for model in (kept, plain):
        model.network.set_attn_implementation("eager")
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for some in (ids, ids[:, :7]):  # some experts get more than 32 tokens, and none does
            wanted = plain.network(some).logits
            found = kept.network(some).logits
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.slow
def test_experts_beside_one_that_all_tokens_use(tmp_path: Path) -> None:
    save(Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=2 * WIDTH), tmp_path / "whole")
    path = tmp_path / "small.gguf"
    write(tmp_path / "whole", path, "Q4_K_M")
    kept, plain = (load(path, "cpu", "float32", weights=x) for x in (None, "dequantised"))
    assert (len(experts(kept)), len(experts(plain))) == (2, 0)
    assert isinstance(kept.network.model.layers[0].mlp.shared_expert.down_proj, BlockLinear)
    for model in (kept, plain):
        model.network.set_attn_implementation("eager")
    with torch.no_grad():
        found, wanted = (x.network(torch.tensor([PROMPT])).logits for x in (kept, plain))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    held = {x.data_ptr(): x.nbytes for x in kept.network.state_dict().values()}
    assert checkpoint.read(path, "float32").weight_bytes == sum(held.values())


def test_products_are_those_of_single_experts_in_float64(make: Callable[[str], Path]) -> None:
    """Every token alone through its experts; a token may have none of those that others have."""
    module: Any = experts(load(make("Q4_K_M"), "cpu", "float32"))[0]
    random = torch.Generator().manual_seed(0)
    x = torch.randn(50, 256, generator=random)
    chosen = torch.stack([torch.randperm(3, generator=random)[:2] for _ in x])  # none the last
    shares = torch.rand(50, 2, generator=random)
    both, down = (getattr(module, name).weight.double() for name in packing.EXPERTS)
    both, down = both.view(4, 2 * WIDTH, 256), down.view(4, 256, WIDTH)
    wanted = torch.zeros(50, 256, dtype=torch.float64)
    for token, (of_token, own) in enumerate(zip(chosen.tolist(), shares.tolist(), strict=True)):
        for expert, share in zip(of_token, own, strict=True):
            gate, up = (both[expert] @ x[token].double()).chunk(2)
            inner = gate / (1 + torch.exp(-gate)) * up
            wanted[token] += share * (down[expert] @ inner)
    found = module(x, chosen, shares).double()
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["Q8_0", *MIXED])
def test_a_plan_counts_the_blocks_of_experts(make: Callable[[str], Path], kind: str) -> None:
    held = {x.data_ptr(): x.nbytes for x in load(make(kind), "cpu").network.state_dict().values()}
    shape = checkpoint.read(make(kind))
    assert shape.weight_bytes == sum(held.values())
    assert shape.weight_bytes < 0.6 * shape.num_parameters * shape.itemsize


@pytest.mark.slow
@EACH
def test_every_check_passes(make: Callable[[str], Path], every: int) -> None:
    assert failed(load(make("Q4_K_M"), "cpu"), every) == []


def test_gates_of_another_format_are_dequantised_with_their_layer(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.models.test_gguf._FINER", ("0.mlp.experts.gate",))
    write(original, original / "odd.gguf", "Q4_K_M")
    kept = load(original / "odd.gguf", "cpu", "float32")
    plain = load(original / "odd.gguf", "cpu", "float32", weights="dequantised")
    assert len(experts(kept)) == 1
    first = (model.network.model.layers[0].mlp.experts for model in (kept, plain))
    ours, theirs = (layer.gate_up_proj for layer in first)
    assert torch.equal(ours, theirs)
    assert LLM(kept).generate(PROMPT, GREEDY).token_ids == (
        LLM(plain).generate(PROMPT, GREEDY).token_ids
    )
