"""What a head learns from is what transformers' eager attention says."""

from __future__ import annotations

import pytest
import torch

from keyhole.errors import ConfigError, NumericalError
from keyhole.retrieval.training import teacher
from keyhole.retrieval.training.teacher import Teacher
from tests.checkpoints import KINDS, VOCAB_SIZE, make_config, make_network

LENGTH = 40
FULL = {"qwen2_sliding": [0, 1], "gemma2": [1, 3], "gemma3": [1, 3], "gpt_oss": [1, 3]}


def text(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (LENGTH,), generator=generator)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mistral_sliding"])
def test_mass_features_and_logits_are_those_of_eager_attention(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "_BLOCK", 7 * LENGTH * 4)  # several blocks of queries
    network = make_network(make_config(kind))
    rows = torch.tensor([5, 20, 21, 37])
    targets = Teacher(network, (1, 2)).targets(text(), rows, logit_steps=2)
    with torch.no_grad():
        out = network(text()[None], output_attentions=True, output_hidden_states=True)
    layers = FULL.get(kind, list(range(len(out.attentions))))
    mean = torch.stack([out.attentions[layer][0] for layer in layers]).double().mean(0)
    group = len(mean) // len(targets.mass)
    for head in range(len(targets.mass)):
        wanted = mean[head * group : (head + 1) * group].mean(0)[rows]
        torch.testing.assert_close(targets.mass[head].double(), wanted, atol=2e-6, rtol=1e-4)
    for own, layer in zip(targets.hidden, (1, 2), strict=True):
        torch.testing.assert_close(own, out.hidden_states[layer][0], atol=1e-4, rtol=1e-4)
    assert targets.logits is not None
    for step in range(2):
        wanted = out.logits[0, rows + step]
        torch.testing.assert_close(targets.logits[:, step], wanted, atol=1e-3, rtol=1e-3)
    assert network.config._attn_implementation == "eager"


def test_mass_is_per_kv_head_or_per_head_with_latents() -> None:
    for kind, heads in (("llama_group3", 2), ("gpt_bigcode", 1), ("deepseek_v3", 4)):
        network = make_network(make_config(kind))
        assert len(Teacher(network, ()).targets(text(), torch.tensor([9])).mass) == heads


def test_a_model_without_full_attention_is_refused() -> None:
    network = make_network(make_config("mistral_sliding"))
    with pytest.raises(ConfigError, match="layers with full attention, but this model has none"):
        Teacher(network, ()).targets(text(), torch.tensor([9]))


def test_a_target_that_gives_nan_is_named() -> None:
    network = make_network(make_config("llama"))
    with torch.no_grad():
        network.model.layers[2].self_attn.q_proj.weight[0, 0] = float("nan")
    with pytest.raises(NumericalError, match="the model computes NaN for a text of 40 tokens"):
        Teacher(network, ()).targets(text(), torch.tensor([9]))
    assert network.config._attn_implementation == "eager"
