"""Fused norms and rotary embeddings compute what transformers computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm as RMSNorm
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama import modeling_llama

from keyhole.kernels import cpu
from keyhole.models import fast_layers
from tests.checkpoints import make_model

#: What is faster in each family: Gemma's norms count their weight from one.
KINDS = {
    "llama": (True, True),
    "qwen3": (True, True),
    "gemma2": (False, True),
    "phi3": (True, True),
    "deepseek_v3": (True, True),
    "gpt_oss": (True, False),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_stay_what_they_are(tmp_path: Path, kind: str) -> None:
    path = make_model(kind, tmp_path)
    network = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "norm" in name:
                parameter.normal_(generator=generator)
    tokens = torch.randint(3, 250, (2, 20), generator=generator)
    wanted = network(tokens).logits
    for speed_up in (fast_layers.speed_up_norms, fast_layers.speed_up_rotary):
        speed_up(network)
    names = {type(module).__name__ for module in network.modules()}
    has = [any(n.startswith("Fast") and part in n for n in names) for part in ("Norm", "Attention")]
    assert tuple(has) == KINDS[kind]
    assert (network(tokens).logits - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_what_is_not_plain_is_left() -> None:
    class ShiftedRMSNorm(modeling_llama.LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    class WiderRMSNorm(modeling_llama.LlamaRMSNorm):
        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * gate

    for cls in (ShiftedRMSNorm, WiderRMSNorm):
        assert not fast_layers.is_plain_norm(cls(8))
    assert fast_layers.is_plain_norm(modeling_llama.LlamaRMSNorm(8))
    assert not fast_layers.is_plain_norm(nn.LayerNorm(8))
    # Pairs that lie side by side.
    assert not fast_layers.is_plain_rotary(modeling_glm4.apply_rotary_pos_emb)
    assert fast_layers.is_plain_rotary(modeling_llama.apply_rotary_pos_emb)
    assert fast_layers.faster(nn.Linear) is None


def test_a_norm_without_a_weight_is_left() -> None:
    """Gemma's are of one class: it ended in an AttributeError at the first token."""
    with torch.no_grad():
        network = nn.Sequential(RMSNorm(8), RMSNorm(8, with_scale=False))
        x = torch.randn(3, 8)
        wanted = network(x)
        fast_layers.speed_up_norms(network)
        assert [type(one) is RMSNorm for one in network] == [False, True]
        torch.testing.assert_close(network(x), wanted)


def test_numbers_of_another_dtype_than_the_weight_are_left_to_transformers() -> None:
    network = nn.Sequential(modeling_llama.LlamaRMSNorm(8).bfloat16())
    with torch.no_grad():
        x = torch.randn(3, 8)
        wanted = network(x)
        fast_layers.speed_up_norms(network)
        assert torch.equal(network(x), wanted)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("owners", [(0, 0, 0, 2, 2, 2, 3, None), (1,), (0, 1, 1, 3)])
def test_rows_are_multiplied_by_their_expert(
    owners: tuple[int | None, ...], transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 16, 8, generator=generator).bfloat16()
    x = torch.randn(len(owners), 16 if transposed else 8, generator=generator).bfloat16()
    bias = torch.randn(len(owners), 8 if transposed else 16, generator=generator).bfloat16()
    counts = torch.tensor([owners.count(expert) for expert in range(4)])
    ends = counts.cumsum(0).int()
    found = fast_layers.grouped_linear(x, weight, ends, bias, transposed)
    for row, expert in enumerate(owners):
        if expert is not None:
            matrix = weight[expert].double()
            product = x[row].double() @ (matrix if transposed else matrix.T)
            wanted = bias[row].double() + product
            torch.testing.assert_close(found[row].double(), wanted, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
def test_experts_stay_what_they_are(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = AutoModelForCausalLM.from_pretrained(make_model(kind, tmp_path), dtype="bfloat16")
    tokens = torch.arange(5, 25)[None]

    def experts() -> set[str]:
        found = (one for one in network.modules() if hasattr(one, "_is_expert_parallel"))
        return {type(one).__name__[:4] for one in found}

    with torch.no_grad():
        wanted = network(tokens).logits
        monkeypatch.setattr(cpu, "torch_is_slow", lambda dtype: False)
        fast_layers.speed_up_experts(network, torch.device("cpu"))
        assert experts() != {"Fast"}
        monkeypatch.setattr(cpu, "torch_is_slow", lambda dtype: True)
        fast_layers.speed_up_experts(network, torch.device("cuda"))
        assert experts() != {"Fast"}
        fast_layers.speed_up_experts(network, torch.device("cpu"))
        assert experts() == {"Fast"}
        assert (network(tokens).logits - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_gradients_go_through(tmp_path: Path) -> None:
    """Our kernel has none: transformers' function is called where they are wanted."""
    network = AutoModelForCausalLM.from_pretrained(make_model("llama", tmp_path), dtype="float32")
    tokens = torch.arange(5, 25)[None]

    def gradients() -> list[torch.Tensor]:
        network.zero_grad()
        network(tokens, labels=tokens).loss.backward()
        return [parameter.grad.clone() for parameter in network.parameters()]

    wanted = gradients()
    for speed_up in (fast_layers.speed_up_norms, fast_layers.speed_up_rotary):
        speed_up(network)
    for ours, theirs in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
