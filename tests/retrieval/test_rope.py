"""A head turns queries and keys as transformers does, beyond its trained length too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from keyhole.retrieval.config import HeadConfig
from keyhole.retrieval.head import RetrievalHead, rotate
from tests.retrieval.drafts import make_draft, make_target

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TIMES_8 = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
TIMES_4 = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16}


def head_config(**changes: Any) -> HeadConfig:
    fields: dict[str, Any] = {
        "vocab_size": 8,
        "hidden_size": 32,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 64,
        "inputs": "tokens",
        "feature_size": 0,
        "feature_layers": (),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "trained_length": 64,
    }
    return HeadConfig(**(fields | changes))


def by_transformers(query: Tensor, key: Tensor, positions: Tensor, rope: dict[str, Any]) -> Tensor:
    """Logits of query [T, heads, D] and key [T, heads, D] in a Llama with this RoPE."""
    D = query.shape[-1]
    config = LlamaConfig(
        hidden_size=2 * D,
        num_attention_heads=2,
        head_dim=D,
        max_position_embeddings=rope.get("original_max_position_embeddings", 64),
        rope_parameters={"rope_theta": 10000.0} | rope,
    )
    cos, sin = LlamaRotaryEmbedding(config)(query, positions[None])
    q, k = apply_rotary_pos_emb(query[None], key[None], cos, sin, unsqueeze_dim=2)
    return torch.einsum("qhd,nhd->hqn", q[0], k[0]) * D**-0.5


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, {"rope_type": "default"}),
        ({"rope_factor": 8.0}, TIMES_8),
        ({"rope_scaling": YARN}, YARN),
        ({"rope_scaling": YARN, "rope_factor": 4.0}, TIMES_4),
        ({"rope_scaling": LLAMA3}, LLAMA3),
        ({"rope_scaling": LINEAR}, LINEAR),
    ],
    ids=["plain", "stretched", "yarn", "yarn_stretched", "llama3", "linear"],
)
def test_logits_are_those_of_transformers(changes: dict[str, Any], rope: dict[str, Any]) -> None:
    head = RetrievalHead(head_config(**changes), torch.zeros(8, 32))
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(30, 2, 64, generator=generator) for _ in range(2))
    positions = torch.arange(30) * 17
    turned = [rotate(x, positions, head._frequencies) for x in (query, key)]
    found = torch.einsum("qhd,nhd->hqn", *turned) * head.scale
    expected = by_transformers(query, key, positions, rope)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_yarn_scales_the_logits() -> None:
    plain, stretched = (
        RetrievalHead(head_config(rope_factor=factor), torch.zeros(8, 32)) for factor in (1.0, 8.0)
    )
    assert plain.scale == 64**-0.5
    assert stretched.scale == pytest.approx(plain.scale * (0.1 * 2.0794415 + 1) ** 2)


def test_a_cast_head_knows_far_positions() -> None:
    """In bfloat16 a frequency would be off by a whole turn after some hundred tokens."""
    torch.manual_seed(0)
    exact = RetrievalHead(head_config(), torch.randn(8, 32))
    rough = RetrievalHead(head_config(), exact.embedding)
    rough.load_state_dict(exact.state_dict())
    rough = rough.bfloat16()
    token_ids, positions = torch.arange(8), torch.arange(8) + 100_000
    for found, expected in zip(
        rough(token_ids, positions, None), exact(token_ids, positions, None), strict=True
    ):
        assert found.dtype == torch.bfloat16
        assert (found.float() - expected).abs().max() < 0.02 * expected.abs().max()


def test_a_draft_is_stretched_to_the_length_that_is_wanted(tmp_path: Path) -> None:
    target = make_target()
    path = make_draft(tmp_path)  # trained at 64 tokens
    with pytest.warns(
        RuntimeWarning, match=r"trained on up to 64 tokens, .* 512.* to 8 times that"
    ):
        head = RetrievalHead.from_eagle3(path, target, max_length=512)
    assert (head.config.rope_factor, head.config.trained_length) == (8.0, 64)
    assert RetrievalHead.from_eagle3(path, target, max_length=64).config.rope_factor == 1.0


def test_a_head_warns_of_texts_longer_than_it_was_trained_at(tmp_path: Path) -> None:
    head = RetrievalHead.from_eagle3(make_draft(tmp_path), make_target())
    head.check_length(64)
    with pytest.warns(RuntimeWarning, match="trained on up to 64 tokens.* not stretched"):
        head.check_length(65)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_the_rope_of_a_draft_is_read_from_its_config(name: str, tmp_path: Path) -> None:
    given = dict(LLAMA3)
    if name == "rope_scaling":  # as it was written before transformers 5
        given["type"] = given.pop("rope_type")
    else:
        given["rope_theta"] = 500.0
    head = RetrievalHead.from_eagle3(make_draft(tmp_path, **{name: given}), make_target())
    assert head.config.rope_scaling == LLAMA3
    assert head.config.rope_theta == (1000.0 if name == "rope_scaling" else 500.0)


def test_a_draft_without_theta_has_that_of_llama(tmp_path: Path) -> None:
    head = RetrievalHead.from_eagle3(make_draft(tmp_path, rope_theta=None), make_target())
    assert head.config.rope_theta == 10000.0


def test_a_draft_with_a_window_was_trained_within_it(tmp_path: Path) -> None:
    sliding = {"layer_types": ["sliding_attention"], "sliding_window": 16}
    unused = {"use_sliding_window": False, "sliding_window": 16}
    target = make_target()
    for fields, length in ((sliding, 16), (unused, 64)):
        head = RetrievalHead.from_eagle3(make_draft(tmp_path, **fields), target)
        assert head.config.trained_length == length
